"""How much memory a checkpoint's weights will take, from its headers alone: nothing is read or packed."""

from __future__ import annotations

import math

from tripool.checkpoints import Checkpoint
from tripool.kernels import CPU8, KernelTable

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BOTH_WAYS = ".kv_b_proj.weight"
_SCALED = 1 + 4 / 64
"""Bytes of an 8-bit weight: one, and its part of a scale for each 64."""


def weight_bytes(checkpoint: Checkpoint, kernels: KernelTable) -> int:
    """To within a few per cent: panels are padded, and small tables are not counted."""
    per_weight = _SCALED if kernels is CPU8 else 4.0
    infos = checkpoint.infos()
    total = 0.0
    for name, info in infos.items():
        count = math.prod(info.shape)
        if name == _EMBEDDING:
            total += 4 * count  # looked up in float32
            total += 0 if _HEAD in infos else per_weight * count  # and, where it is the head too, multiplied with
        elif len(info.shape) < 2:
            total += 4 * count
        else:
            copies = (
                2 if kernels is CPU8 and name.endswith(_BOTH_WAYS) else 1
            )  # whole for prompts, by head for decoding
            total += copies * per_weight * count
    return int(total)
