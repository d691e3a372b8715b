"""Write a checkpoint as int8 (compressed-tensors, one scale per row): how the bundled model was made.

Plain rounding. Scale search, outliers and error compensation belong to the quantiser, not here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tripool.checkpoints.base import Checkpoint, TensorInfo
from tripool.checkpoints.folder import FolderCheckpoint
from tripool.checkpoints.safetensors import TORCH_DTYPES
from tripool.checkpoints.write import (
    KEPT_AS_STORED,
    ROUTER,
    SafetensorsWriter,
    int8_layout,
    quantise_rows,
    with_end_ids,
    write_json,
    write_text_files,
)
from tripool.errors import CheckpointCorrupt

QUANTISATION = int8_layout(targets=["Linear", "Embedding"], ignore=["re:.*mlp\\.gate$"])


def bundle_int8(source: Checkpoint, target: Path) -> None:
    """Same source, same bytes. `target` becomes a folder that `FolderCheckpoint` reads."""
    text = source.text
    config = with_end_ids(dict(source.config) | {"quantization_config": QUANTISATION}, text)
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(source, target / "model.safetensors")
    write_json(target / "config.json", config, indent=1)
    write_text_files(target, text)


def _plan(source: Checkpoint) -> dict[str, TensorInfo]:
    stored: dict[str, TensorInfo] = {}
    for name, info in source.infos().items():
        if _is_quantised(name, info):
            stored[name] = TensorInfo(info.shape, "I8")
            stored[name + "_scale"] = TensorInfo((info.shape[0], 1), "F32")
        else:
            stored[name] = TensorInfo(info.shape, info.dtype if info.dtype in KEPT_AS_STORED else "F32")
    return stored


def _is_quantised(name: str, info: TensorInfo) -> bool:
    return len(info.shape) == 2 and name.endswith(".weight") and not name.endswith(ROUTER)


def _write_weights(source: Checkpoint, path: Path) -> None:
    plan = _plan(source)
    writer = SafetensorsWriter(path, plan)
    try:
        for name, values in _stored_values(source, plan):
            writer.put(name, values)
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


def _stored_values(source: Checkpoint, plan: dict[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, info in source.infos().items():
        weight = torch.empty(info.shape, dtype=torch.float32)
        source.read(name, weight)
        if not weight.isfinite().all():
            hint = "the training run diverged or the file is damaged; fetch it again"
            raise CheckpointCorrupt("holds infinities or NaNs", hint=hint, file=source.path, tensor=name)
        if _is_quantised(name, info):
            values, scale = quantise_rows(weight)
            yield name, values
            yield name + "_scale", scale
        else:
            yield name, weight.to(TORCH_DTYPES[plan[name].dtype])


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m tripool.checkpoints.bundle SOURCE_FOLDER TARGET_FOLDER\n")
        return 2
    source_path, target = (Path(argument) for argument in arguments)
    with FolderCheckpoint(source_path) as source:
        bundle_int8(source, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
