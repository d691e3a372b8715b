"""Quantises a checkpoint shard by shard in bounded memory: embedding and head first, then one layer at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tripool.checkpoints import Checkpoint, write
from tripool.checkpoints.folder import INDEX_FILE
from tripool.checkpoints.safetensors import TORCH_DTYPES, SafetensorsFile
from tripool.errors import CheckpointMissing
from tripool.models import read_arch
from tripool.quant.folding import Factors, choose_factors
from tripool.quant.journal import Journal
from tripool.quant.layer import FoldedSource, keep_in_floats, stored_infos, write_layer
from tripool.quant.options import Candidate, Techniques, choose_kept
from tripool.quant.parts import LayerParts, layer_parts
from tripool.quant.rounding import Seen
from tripool.quant.sensitivity import FOLLOWED_LAYERS, disturbance, echoes_of, follow
from tripool.quant.stream import Stream

OnProgress = Callable[[int, int, str], None]
"""Called with (shards finished, shards in all, what was finished or is begun)."""

REPORT = "quantize_report.json"
_TEXT_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "generation_config.json", "vocab*", "merges*")
_FOLLOWED = (2, 256)
"""Part of the calibration text used to measure sensitivity: windows, and tokens of each."""
_ROUTERS = ["re:.*mlp\\.gate$"]


@dataclass(frozen=True, slots=True)
class Quantized:
    linears: list[dict[str, Any]]
    """One `LinearReport` per linear, as a dict, with whether it was `kept` in floats."""
    kept: list[str]
    """Units that stayed in floats."""
    resumed: int
    """Shards that an earlier run had finished."""


def quantize(
    source: Checkpoint,
    target: Path,
    *,
    techniques: Techniques,
    windows: Sequence[Sequence[int]],
    on_progress: OnProgress = lambda done, total, what: None,
) -> Quantized:
    """`windows`: tokens of the calibration text; empty: without data, where only `search` has an effect."""
    return _Run(source, target, techniques, windows, on_progress).run()


class _Run:
    def __init__(
        self,
        source: Checkpoint,
        target: Path,
        techniques: Techniques,
        windows: Sequence[Sequence[int]],
        on_progress: OnProgress,
    ) -> None:
        self._source, self._target, self._techniques, self._windows = source, target, techniques, windows
        self._arch, self._tell = read_arch(source), on_progress
        names = source.infos()
        has_mtp = self._arch.mtp_layers > 0 and f"model.layers.{self._arch.layers}.eh_proj.weight" in names
        self._layers = [layer_parts(self._arch, i) for i in range(self._arch.layers + has_mtp)]
        self._total = len(self._layers) + 1
        self._journal = Journal(target, self._plan())

    def run(self) -> Quantized:
        resumed = len(self._journal.done)
        self._step("rest", self._write_rest)
        for i, parts in enumerate(self._layers):
            self._step(parts.prefix, lambda i=i, parts=parts: self._write_layer(i, parts))  # type: ignore[misc]
        linears = [one for parts in self._layers for one in self._journal.done[parts.prefix]["linears"]]
        kept = self._keep(linears)
        for one in linears:
            one["kept"] = one["unit"] in kept
        self._finish(linears, kept)
        return Quantized(linears, kept, resumed)

    def _plan(self) -> dict[str, Any]:
        path = self._source.path
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        stamps = [f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files]
        return {
            "source": str(path.resolve()),
            "files": _digest("\0".join(stamps).encode()),
            "windows": _digest(json.dumps(self._windows).encode()),
            "techniques": asdict(self._techniques),
        }

    def _step(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        done = len(self._journal.done)
        if name not in self._journal.done:
            self._tell(done, self._total, name)
            self._journal.finish(name, make())
            self._tell(done + 1, self._total, name)

    def _shard(self, index: int) -> Path:
        return self._target / f"model-{index + 1:05}-of-{self._total:05}.safetensors"

    def _write_rest(self) -> dict[str, Any]:
        """Write the tensors outside the layers: embedding, final norm, head."""
        layers = tuple(f"{parts.prefix}." for parts in self._layers)
        infos = {name: info for name, info in self._source.infos().items() if not name.startswith(layers)}
        rounded = [name for name, info in infos.items() if self._techniques.vocabulary and len(info.shape) == 2]
        plan = stored_infos(infos, rounded)
        with write.SafetensorsWriter(self._shard(0), plan) as writer:
            for name, info in infos.items():
                dtype = torch.float32 if name in rounded else TORCH_DTYPES[plan[name].dtype]
                values = torch.empty(info.shape, dtype=dtype)
                self._source.read(name, values)
                if name in rounded:
                    values, scales = write.quantise_rows(values)
                    writer.put(f"{name}_scale", scales)
                writer.put(name, values)
        return {}

    def _write_layer(self, index: int, parts: LayerParts) -> dict[str, Any]:
        factors, seen, before = Factors(), {}, None
        stream = self._stream(index)
        if stream is not None:
            before = None if parts.mtp or not self._techniques.keep else stream.start(*_FOLLOWED)
            seen = self._observe(stream, parts)
            if self._techniques.suppress:
                factors = choose_factors(parts, seen, FoldedSource(self._source, parts, Factors()))
        shard = self._shard(index + 1)
        reports = write_layer(shard, self._source, parts, factors, seen, self._techniques)
        write.write_tensors(self._journal.folder / f"factors-{index}.safetensors", factors.tensors())
        del seen  # as large as the layer, which is read again now
        found = {} if before is None else self._follow(index, parts, factors, before)
        if stream is not None:
            stream.write(self._stream_file(index + 1))
            self._stream_file(index - 1).unlink(missing_ok=True)
        return {"linears": [asdict(one) for one in reports], "sensitivity": found}

    def _follow(self, index: int, parts: LayerParts, factors: Factors, stream: Stream) -> dict[str, float]:
        """Carry disturbed streams of earlier layers through this one; returns the disturbance of units that are
        complete.
        """
        here, after = (self._journal.folder / f"echoes-{i}.safetensors" for i in (index, index + 1))
        echoes = echoes_of(write.read_tensors(here)) if index else []
        echoes = follow(self._source, parts, factors, self._shard(index + 1), stream, echoes)
        last = index == self._arch.layers - 1
        old = [echo for echo in echoes if last or echo.age == FOLLOWED_LAYERS]
        young = [echo for echo in echoes if not last and echo.age < FOLLOWED_LAYERS]
        write.write_tensors(after, {name: values for echo in young for name, values in echo.tensors().items()})
        (self._journal.folder / f"echoes-{index - 1}.safetensors").unlink(missing_ok=True)
        return {echo.unit: disturbance(echo, stream) for echo in old}

    def _stream_file(self, index: int) -> Path:
        return self._journal.folder / f"stream-{index}.safetensors"

    def _stream(self, index: int) -> Stream | None:
        if not self._windows:
            return None
        if index == 0:
            return Stream.begin(self._arch, self._source, self._windows)
        return Stream.read(self._arch, self._windows, self._stream_file(index))

    def _observe(self, stream: Stream, parts: LayerParts) -> dict[str, Seen]:
        source = FoldedSource(self._source, parts, Factors())
        seen = stream.enter_mtp(parts, self._source, source) if parts.mtp else {}
        return seen | stream.observe(parts, source)

    def _keep(self, linears: list[dict[str, Any]]) -> list[str]:
        """Choose which units stay in floats and rewrite their shards."""
        if not self._techniques.keep:
            return []
        sizes: dict[str, int] = {}
        for one in linears:  # a byte more for each weight
            sizes[one["unit"]] = sizes.get(one["unit"], 0) + one["num_weights"]
        sensitivity: dict[str, float] = {}
        for parts in self._layers:
            sensitivity |= self._journal.done[parts.prefix]["sensitivity"]
        candidates = [Candidate(unit, value, sizes[unit]) for unit, value in sensitivity.items()]
        budget = int(self._techniques.keep * sum(one["num_weights"] for one in linears))
        kept = set(choose_kept(candidates, budget))
        for i, parts in enumerate(self._layers):
            own = self._journal.done[parts.prefix]["linears"]
            mine = {one["name"].removeprefix(f"{parts.prefix}.") for one in own if one["unit"] in kept}
            if mine:
                factors = Factors.of_tensors(write.read_tensors(self._journal.folder / f"factors-{i}.safetensors"))
                keep_in_floats(self._shard(i + 1), self._source, parts, factors, mine)
        return sorted(kept)

    def _finish(self, linears: list[dict[str, Any]], kept: list[str]) -> None:
        index: dict[str, str] = {}
        total_bytes, in_floats = 0, []
        for i in range(self._total):
            shard = SafetensorsFile(self._shard(i))
            for name, tensor in shard.tensors.items():
                index[name] = self._shard(i).name
                total_bytes += tensor.stop - tensor.start
                if i > 0 and len(tensor.info.shape) == 2 and f"{name}_scale" not in shard.tensors:
                    in_floats.append(name.removesuffix(".weight"))
            shard.close()
        in_floats = [name for name in in_floats if not name.endswith((".mlp.gate", "_scale"))]
        weights = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(index.items()))}
        write.write_json(self._target / INDEX_FILE, weights, indent=1)
        write.write_json(self._target / REPORT, self._report(linears, kept), indent=1)
        config = dict(self._source.config)
        whole = self._techniques.vocabulary
        targets, always = (["Linear", "Embedding"], _ROUTERS) if whole else (["Linear"], ["lm_head", *_ROUTERS])
        config["quantization_config"] = write.int8_layout(targets, [*always, *sorted(in_floats)])
        config.setdefault("torch_dtype", "bfloat16")
        write.write_json(self._target / "config.json", self._copy_text(config), indent=1)
        self._journal.remove()

    def _report(self, linears: list[dict[str, Any]], kept: list[str]) -> dict[str, Any]:
        tokens = sum(map(len, self._windows))
        report = {"source": self._source.name, "calibration_tokens": tokens, "techniques": asdict(self._techniques)}
        return report | {"kept": kept, "linears": linears}

    def _copy_text(self, config: dict[str, Any]) -> dict[str, Any]:
        """Copy tokenizer and template files of a folder; for other formats, write equivalent ones."""
        source = self._source.path
        if source.is_dir():
            for pattern in _TEXT_FILES:
                for file in source.glob(pattern):
                    shutil.copyfile(file, self._target / file.name)
            return config
        try:
            text = self._source.text
        except CheckpointMissing:  # weights without a tokenizer are fine
            return config
        write.write_text_files(self._target, text)
        return write.with_end_ids(config, text)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
