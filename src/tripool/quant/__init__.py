"""The quantiser: checkpoints into INT8 with as little loss as eight bits allow, and how much was lost.

Reads through `checkpoints`, computes calibration with `models`, writes the compressed-tensors W8A8 layout. Refuses to
know who asks: the commands are in `cli`.
"""

from tripool.quant.evaluate import Comparison, Side, compare
from tripool.quant.options import PLAIN, QuantizeError, Techniques, read_windows
from tripool.quant.run import Quantized, quantize

__all__ = [
    "PLAIN",
    "Comparison",
    "QuantizeError",
    "Quantized",
    "Side",
    "Techniques",
    "compare",
    "quantize",
    "read_windows",
]
