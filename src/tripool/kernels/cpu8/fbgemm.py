"""The one file that touches torch's quantised-tensor API: packed 8-bit products through FBGEMM.

Activations get 7 bits, 0 .. 128 around a zero point of 64. Without VNNI the CPU multiplies bytes in pairs and adds
them in 16 bits with saturation: 2 x 127 x 127 fits, 2 x 255 x 127 would not. With 7 bits every CPU computes the same.
"""

import warnings

import torch

STEPS = 63
"""Largest whole step an activation may take."""

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


def product(x: torch.Tensor, packed: torch.ScriptObject, step: float = 1.0) -> torch.Tensor:
    """x float32 [rows, in] within 64 steps either way, rounded to whole ones -> float32 [rows, out], else exact."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, step, _ZERO_POINT, packed)
