"""GGUF number formats: type numbers, block sizes, and unpacking of the common 8- and 4-bit blocks.

Rare types are unpacked by the gguf package, which is imported on first use, so ordinary files need only torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Kind(IntEnum):
    F32, F16, Q4_0, Q4_1 = 0, 1, 2, 3
    Q5_0, Q5_1, Q8_0, Q8_1 = 6, 7, 8, 9
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K = 10, 11, 12, 13, 14, 15
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS = 16, 17, 18, 19, 20, 21, 22, 23
    I8, I16, I32, I64, F64 = 24, 25, 26, 27, 28
    IQ1_M, BF16, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0 = 29, 30, 34, 35, 39, 40, 41


_BLOCK_BYTES: Mapping[int, Mapping[str, int]] = {
    1: {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8},
    32: {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q8_1": 40, "IQ4_NL": 18, "MXFP4": 17},
    64: {"NVFP4": 36},
    128: {"Q1_0": 18},
    256: {
        "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_K": 292, "TQ1_0": 54, "TQ2_0": 66,
        "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ1_S": 50, "IQ3_XXS": 98, "IQ3_S": 110, "IQ4_XS": 136,
        "IQ1_M": 56,
    },
}  # fmt: skip
BLOCKS: Mapping[Kind, tuple[int, int]] = {
    Kind[name]: (values, size) for values, sizes in _BLOCK_BYTES.items() for name, size in sizes.items()
}
"""Values and bytes of one block."""


def unpack(packed: Bytes, kind: Kind) -> Floats:
    """Rows of whole blocks, [rows, bytes] -> float32 [rows, values]."""
    own = {Kind.Q8_0: _q8_0, Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1}
    if kind in own:
        return own[kind](packed.reshape(-1, BLOCKS[kind][1])).reshape(packed.shape[0], -1)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    unpacked: Floats = dequantize(packed, GGMLQuantizationType(kind))
    return unpacked


def _float16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes) -> Bytes:
    """Sixteen bytes hold a block's first sixteen values in their low bits and its last sixteen in their high bits."""
    return np.concatenate((blocks & 15, blocks >> 4), axis=1)


def _q8_0(blocks: Bytes) -> Floats:
    return _float16(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _float16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _float16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _float16(blocks[:, 2:4])
