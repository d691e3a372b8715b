"""Measures how much the rounding of each part disturbs the residual stream some layers later.

Directly after a part its error says little: a layer may produce one token that all later ones attend to, and the next
attention spreads its error over all of them. So each disturbed stream (an echo) is carried along beside the undisturbed
one, through layers in floats, and measured after a few of them. The cost per layer is constant, and memory is needed
for a few streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tripool.checkpoints import Checkpoint
from tripool.checkpoints.safetensors import SafetensorsFile
from tripool.kernels import Batch
from tripool.models.decoder import attention_sublayer, mlp_sublayer
from tripool.models.loader import Loader
from tripool.quant.folding import Factors
from tripool.quant.layer import FoldedSource
from tripool.quant.parts import LayerParts
from tripool.quant.stream import Stream
from tripool.quant.watched import W8A8

FOLLOWED_LAYERS = 4
"""On SmolLM2, with a fifth kept, choosing by the disturbance after 0, 1, 2, 4 and 6 layers leaves 0.0039, 0.0030,
0.0030, 0.0029 and 0.0029 nats of the network's KL; choosing by that KL itself, at a cost squared in layers, 0.0028.
"""

Sublayer = Callable[[torch.Tensor, Batch, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Echo:
    """A stream disturbed by the rounding of one unit."""

    unit: str
    age: int
    """Number of layers it has passed."""
    states: list[torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """For storing; read again with `echoes_of`."""
        return {f"{self.unit}/{self.age}/{i}": state for i, state in enumerate(self.states)}


def echoes_of(tensors: Mapping[str, torch.Tensor]) -> list[Echo]:
    found: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for name, state in tensors.items():
        unit, age, window = name.rsplit("/", 2)
        found.setdefault((unit, int(age)), {})[int(window)] = state
    return [Echo(unit, age, [states[i] for i in range(len(states))]) for (unit, age), states in found.items()]


@torch.inference_mode()
def follow(
    checkpoint: Checkpoint,
    parts: LayerParts,
    factors: Factors,
    shard_path: Path,
    stream: Stream,
    echoes: list[Echo],
) -> list[Echo]:
    """All echoes after the layer: earlier ones carried through it, and one for each of its own units.

    `stream` is the state before the layer, and is advanced. One sublayer is in memory at a time.
    """
    shard = SafetensorsFile(shard_path)
    source = FoldedSource(checkpoint, parts, factors, shard)

    def sublayer_of(rounded: tuple[str, ...], attention: bool) -> Sublayer:
        source.rounded = rounded
        loader = Loader(source, W8A8, torch.float32)
        if attention:
            return attention_sublayer(loader, parts.prefix, stream.arch)
        mlp = mlp_sublayer(loader, parts.prefix, stream.arch, moe=parts.moe)
        return lambda x, batch, kv: mlp(x)

    for attention in (True, False):
        start = "self_attn." if attention else "mlp."
        units: dict[str, tuple[str, ...]] = {}
        for one in parts.inputs:
            if one.label.startswith(start):
                units[one.unit] = units.get(one.unit, ()) + one.linears
        floats = sublayer_of((), attention)
        echoes = [replace(echo, states=_run(stream, echo.states, floats)) for echo in echoes]
        wanted = _run(stream, stream.states, floats)
        del floats
        for unit, linears in units.items():
            got = _run(stream, stream.states, sublayer_of(linears, attention))
            echoes.append(Echo(f"{parts.prefix}.{unit}", -1, got))
        stream.states = wanted
    shard.close()
    return [replace(echo, age=echo.age + 1) for echo in echoes]


def _run(stream: Stream, states: list[torch.Tensor], sublayer: Sublayer) -> list[torch.Tensor]:
    after = []
    for i, state in enumerate(states):
        x = state.clone()
        sublayer(x, *stream.batch(i))
        after.append(x)
    return after


def disturbance(echo: Echo, stream: Stream) -> float:
    """Squared error relative to the stream. Each token's error is relative to that token, as the next norm sees it, so
    that a token of large norm does not hide the others.
    """
    pairs = zip(echo.states, stream.states, strict=True)
    shares = [(a - b).square().sum(1) / b.square().sum(1).clamp_min(1e-30) for a, b in pairs]
    return float(torch.cat(shares).mean())
