"""What the processes of a run share: written once into its folder, read by whoever starts or joins later."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tripool.text.files import TextFiles

_FILE = "plan.json"


class RunManifest(msgspec.Struct, frozen=True):
    """So that a gateway can start again without opening a checkpoint, and a worker can join knowing only where."""

    name: str
    text: TextFiles
    cache: tuple[str, ...] = ()
    """Names of the cache pool's members."""
    model_cache: str = ""
    """Folder of the model cache, and how much may lie in it; empty: there is none."""
    model_cache_bytes: int = 0

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_bytes(msgspec.json.encode(self))


def read_manifest(folder: Path) -> RunManifest:
    return msgspec.json.decode((folder / _FILE).read_bytes(), type=RunManifest)
