"""Quantises one layer into one shard and reports the error of each linear."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tripool.checkpoints import Checkpoint, TensorInfo
from tripool.checkpoints.safetensors import TORCH_DTYPES, SafetensorsFile
from tripool.checkpoints.write import KEPT_AS_STORED, SafetensorsWriter
from tripool.errors import CheckpointCorrupt
from tripool.kernels.weights import INT8
from tripool.models.loader import FromCheckpoint
from tripool.quant.folding import Factors
from tripool.quant.options import Techniques
from tripool.quant.parts import Input, LayerParts
from tripool.quant.rounding import TRIED_ROWS, Feedback, Rounded, Seen, largest_scales, round_linear
from tripool.quant.watched import round_tokens

_FEW_ROWS = 16
"""With fewer calibration tokens than this, an expert is rounded without data."""


@dataclass(frozen=True, slots=True)
class LinearReport:
    name: str
    unit: str
    num_weights: int
    num_seen: int
    """Calibration tokens that reached it; 0: errors are of the weights alone."""
    weight_error: float
    """|W - W8| / |W|."""
    output_error: float
    """|x8 W8^T - x W^T| / |x W^T| over a sample, with x8 rounded per token; `weight_error` without calibration data."""
    mean_clip: float
    """Clipping range of the rows, relative to their largest weights."""


class FoldedSource:
    """A checkpoint's tensors with a layer's factors applied, and with integers from a shard where it has them."""

    device = "cpu"

    def __init__(
        self, checkpoint: Checkpoint, parts: LayerParts, factors: Factors, shard: SafetensorsFile | None = None
    ) -> None:
        self._checkpoint, self._prefix, self._factors = checkpoint, f"{parts.prefix}.", factors
        self._shard, self.expect = shard, FromCheckpoint(checkpoint).expect
        self.rounded: Collection[str] = ()
        """Linears, by relative name, that are read from the shard."""

    def has(self, name: str) -> bool:
        return name in self._checkpoint.infos()

    def read(self, name: str, out: torch.Tensor) -> None:
        relative = name.removeprefix(self._prefix)
        if self._is_rounded(relative):
            out.copy_(self._stored(name).float().mul_(self._stored(f"{name}_scale")))
            return
        self._checkpoint.read(name, out)
        if name.startswith(self._prefix):
            self._factors.apply(relative, out)

    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        if kind != INT8 or not self._is_rounded(name.removeprefix(self._prefix)):
            return None
        return self._stored(f"{name}_scale").view(-1).clone()

    def floats(self, name: str) -> torch.Tensor:
        out = torch.empty(self._checkpoint.infos()[name].shape)
        self.read(name, out)
        if not out.isfinite().all():
            hint = "the training run diverged or the file is damaged; fetch it again"
            raise CheckpointCorrupt("holds infinities or NaNs", hint=hint, file=self._checkpoint.path, tensor=name)
        return out

    def linear(self, name: str) -> torch.Tensor:
        """A linear's weight or a norm's gain, by its name in the layer."""
        return self.floats(f"{self._prefix}{name}.weight")

    def has_bias(self, name: str) -> bool:
        return self.has(f"{self._prefix}{name}.bias")

    def _is_rounded(self, relative: str) -> bool:
        return relative.removesuffix(".weight") in self.rounded

    def _stored(self, name: str) -> torch.Tensor:
        assert self._shard is not None
        return self._shard.tensors[name].whole()


def stored_infos(
    infos: Mapping[str, TensorInfo], integers: Collection[str], sublayers: Collection[str] = ()
) -> dict[str, TensorInfo]:
    """Stored form of these tensors. `integers` and `sublayers` (in 16 bits) are full names of weights."""
    stored: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        if name in integers:
            stored[name] = TensorInfo(info.shape, "I8")
            stored[f"{name}_scale"] = TensorInfo((info.shape[0], 1), "F32")
        else:
            as_stored = info.dtype in KEPT_AS_STORED and not (name in sublayers and info.dtype == "F32")
            stored[name] = TensorInfo(info.shape, info.dtype if as_stored else "BF16")
    return stored


def layer_infos(checkpoint: Checkpoint, parts: LayerParts) -> dict[str, TensorInfo]:
    return {name: info for name, info in checkpoint.infos().items() if name.startswith(f"{parts.prefix}.")}


@torch.inference_mode()
def write_layer(
    path: Path,
    checkpoint: Checkpoint,
    parts: LayerParts,
    factors: Factors,
    seen: Mapping[str, Seen],
    techniques: Techniques,
) -> list[LinearReport]:
    source = FoldedSource(checkpoint, parts, factors)
    infos = layer_infos(checkpoint, parts)
    integers = {f"{parts.prefix}.{name}.weight" for name in parts.linears()}
    plan = stored_infos(infos, integers)
    reports: list[LinearReport] = []
    with SafetensorsWriter(path, plan) as writer:
        for name in infos.keys() - integers:
            writer.put(name, source.floats(name).to(TORCH_DTYPES[plan[name].dtype]))
        for one in parts.inputs:
            known = seen.get(one.observed)
            reports += _write_input(writer, parts.prefix, one, source, known, factors, techniques)
    return reports


def _write_input(
    writer: SafetensorsWriter,
    prefix: str,
    one: Input,
    source: FoldedSource,
    known: Seen | None,
    factors: Factors,
    techniques: Techniques,
) -> list[LinearReport]:
    if known is not None and known.count < _FEW_ROWS:
        known = None
    factor = factors.columns.get(one.linears[0])
    if known is not None and factor is not None:
        known = known.divided(factor)
    feedback = Feedback(known.second) if known is not None and techniques.compensate else None
    reports = []
    for name in one.linears:
        weight = source.linear(name)
        rounded = round_linear(weight, known, search=techniques.search, feedback=feedback)
        writer.put(f"{prefix}.{name}.weight", rounded.values)
        writer.put(f"{prefix}.{name}.weight_scale", rounded.scale)
        reports.append(_report(f"{prefix}.{name}", f"{prefix}.{one.unit}", weight, rounded, known))
    return reports


def _report(name: str, unit: str, weight: torch.Tensor, rounded: Rounded, known: Seen | None) -> LinearReport:
    floats = rounded.floats()
    weight_error = output_error = _relative(floats, weight)
    if known is not None:
        rows = known.sample(TRIED_ROWS)
        output_error = _relative(round_tokens(rows) @ floats.T, rows @ weight.T)
    clip = float((rounded.scale / largest_scales(weight)).mean())
    seen = 0 if known is None else known.count
    return LinearReport(name, unit, weight.numel(), seen, weight_error, output_error, clip)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


@torch.inference_mode()
def keep_in_floats(
    path: Path, checkpoint: Checkpoint, parts: LayerParts, factors: Factors, kept: Collection[str]
) -> None:
    """Rewrite a finished shard with some linears (relative names) as 16-bit floats."""
    shard = SafetensorsFile(path)
    source = FoldedSource(checkpoint, parts, factors)
    infos = layer_infos(checkpoint, parts)
    integers = {f"{parts.prefix}.{name}.weight" for name in parts.linears() if name not in kept}
    plan = stored_infos(infos, integers, sublayers={f"{parts.prefix}.{name}.weight" for name in kept})
    try:
        with SafetensorsWriter(path, plan) as writer:
            for name, info in plan.items():
                there = shard.tensors.get(name)
                if there is not None and there.info == info:
                    writer.put(name, there.whole())
                else:
                    writer.put(name, source.floats(name).to(TORCH_DTYPES[info.dtype]))
    finally:
        shard.close()
