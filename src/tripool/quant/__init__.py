"""Quantises checkpoints to INT8 with calibration, and measures what was lost.

Reads through `checkpoints`, runs calibration with `models`, writes the compressed-tensors W8A8 layout. The commands are
in `cli`.
"""

from tripool.quant.evaluate import Comparison, Side, compare
from tripool.quant.options import PLAIN, QuantizeError, Techniques, read_windows
from tripool.quant.run import Quantized, quantize

__all__ = [
    "PLAIN", "Comparison", "QuantizeError", "Quantized", "Side", "Techniques", "compare", "quantize", "read_windows",
]  # fmt: skip
