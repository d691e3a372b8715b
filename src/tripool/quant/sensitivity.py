"""How much the rounding of each part of a layer disturbs the residual stream, part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tripool.checkpoints import Checkpoint
from tripool.checkpoints.safetensors import SafetensorsFile
from tripool.kernels import Batch
from tripool.models.decoder import attention_half, mlp_half
from tripool.models.loader import Loader
from tripool.quant.folding import Factors
from tripool.quant.layer import FoldedSource
from tripool.quant.parts import LayerParts
from tripool.quant.stream import Stream
from tripool.quant.watched import W8A8

Half = Callable[[torch.Tensor, Batch, torch.Tensor], None]


@torch.inference_mode()
def sensitivities(
    checkpoint: Checkpoint, parts: LayerParts, factors: Factors, shard_path: Path, stream: Stream
) -> dict[str, float]:
    """Unit -> squared error of the stream after its half of the layer, relative to the stream, all else in floats.

    `stream` is as it was before the layer, and is used up. What a unit does is measured through what comes after it in
    its half: an error in keys, for example, counts as far as attention passes it on. Each token's error is relative to
    that token, as the next norm sees it, so that one very long token does not hide what happens to the others.
    """
    shard = SafetensorsFile(shard_path)
    source = FoldedSource(checkpoint, parts, factors, shard)

    def half_of(rounded: tuple[str, ...], attention: bool) -> Half:
        source.rounded = rounded
        loader = Loader(source, W8A8, torch.float32)
        if attention:
            return attention_half(loader, parts.prefix, stream.arch)
        mlp = mlp_half(loader, parts.prefix, stream.arch, moe=parts.moe)
        return lambda x, batch, kv: mlp(x)

    found: dict[str, float] = {}
    for attention in (True, False):
        start = "self_attn." if attention else "mlp."
        units: dict[str, tuple[str, ...]] = {}
        for one in parts.inputs:
            if one.label.startswith(start):
                units[one.unit] = units.get(one.unit, ()) + one.linears
        wanted = _run(stream, half_of((), attention))
        for unit, linears in units.items():
            got = _run(stream, half_of(linears, attention))
            found[f"{parts.prefix}.{unit}"] = _relative_error(got, wanted)
        stream.states = wanted
    shard.close()
    return found


def _run(stream: Stream, half: Half) -> list[torch.Tensor]:
    after = []
    for i, state in enumerate(stream.states):
        x = state.clone()
        half(x, *stream.batch(i))
        after.append(x)
    return after


def _relative_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    shares = [(a - b).square().sum(1) / b.square().sum(1).clamp_min(1e-30) for a, b in zip(found, wanted, strict=True)]
    return float(torch.cat(shares).mean())
