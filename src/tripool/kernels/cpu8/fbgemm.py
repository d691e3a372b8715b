"""The one file that touches torch's quantised-tensor API: packed 8-bit products through FBGEMM.

Activations get 7 bits, -63 .. 63 around a zero point of 64. Without VNNI the CPU multiplies bytes in pairs and adds
them in 16 bits with saturation: 2 x 127 x 127 fits, 2 x 255 x 127 would not. With 7 bits every CPU computes the same.
"""

import warnings

import torch

STEPS = 63
"""Whole steps from 0 to the largest activation of a row."""

_ZERO_POINT = 64


def pack(weight: torch.Tensor, scales: torch.Tensor) -> torch.ScriptObject:
    """weight int8 [out, in], scales float32 [out]; returned in FBGEMM's own layout."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the API is deprecated without a successor that is exact
            zeros = torch.zeros(len(weight), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
            return torch.ops.quantized.linear_prepack(tensor, None)
    finally:
        torch.backends.quantized.engine = engine


def product(unit: torch.Tensor, packed: torch.ScriptObject) -> torch.Tensor:
    """unit float32 [rows, in] within -1 .. 1 -> float32 [rows, out]. Rounds to steps, multiplies exactly, scales."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(unit, 1.0 / STEPS, _ZERO_POINT, packed)
