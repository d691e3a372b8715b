"""Quantises checkpoints to INT8 with calibration, and measures what was lost. Scores models on task files.

Reads through `checkpoints`, runs calibration with `models`, writes the compressed-tensors W8A8 layout. The commands are
in `cli`.
"""

from tripool.quant.evaluate import Comparison, Side, compare
from tripool.quant.options import PLAIN, QuantizeError, Techniques, read_windows
from tripool.quant.run import Quantized, quantize
from tripool.quant.score import Score, score
from tripool.quant.tasks import Task, TaskError, read_tasks

__all__ = [
    "PLAIN", "Comparison", "QuantizeError", "Quantized", "Score", "Side", "Task", "TaskError", "Techniques", "compare",
    "quantize", "read_tasks", "read_windows", "score",
]  # fmt: skip
