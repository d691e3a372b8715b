"""Loads a network from the weight cache if possible, else from files, filling the cache on the way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from tripool.cache.weight_cache import WeightCache
from tripool.cache.weight_image import WeightImageDamaged
from tripool.checkpoints import Checkpoint, locate, open_checkpoint
from tripool.kernels import CPU8, KernelTable
from tripool.kernels.weight_store import FRESH, LargePages
from tripool.models.cached_weights import ImageFilling, fill_weight_image, model_of_weight_image
from tripool.models.decoder import Model
from tripool.models.load import Target, load_to
from tripool.text.files import TextFiles

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


_CODE = ("models", "kernels", "checkpoints")
"""Packages whose code determines the packed tensors."""


@dataclass(frozen=True, slots=True)
class Loaded:
    name: str
    text: TextFiles
    network: Model
    from_memory: bool


def load_warm(
    model: str,
    target: Target | KernelTable,
    weight_cache: WeightCache | None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    target = target if isinstance(target, Target) else Target(target)
    key = image_key(model, target.kernels) if weight_cache is not None and target.kernels.over is not None else None
    if weight_cache is None or key is None:
        return _from_files(model, target, None, "", progress)
    found = _from_weight_image(weight_cache, key, target)
    if found is not None:
        return found
    with weight_cache.exclusive(key) as locked:
        if locked:  # another process may have written it meanwhile
            found = _from_weight_image(weight_cache, key, target)
        return found or _from_files(model, target, weight_cache if locked else None, key, progress)


def image_key(model: str, kernels: KernelTable) -> str | None:
    """Key of an image: these files, packed by this code. None for a model that is not on this machine."""
    path = locate(model)
    if path is None:
        return None
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    parts = [str(path.resolve()), kernels.name, _code(), *(_stamp(one) for one in files)]
    return _digest(parts)


def _from_weight_image(weight_cache: WeightCache, key: str, target: Target) -> Loaded | None:
    image = weight_cache.find(key)
    if image is None:
        return None
    try:
        network, facts = model_of_weight_image(image, target)
    except WeightImageDamaged:
        weight_cache.discard(key)
        return None
    return Loaded(facts.name, facts.text, network, True)


def _from_files(
    model: str, target: Target, weight_cache: WeightCache | None, key: str, progress: Callable[[str], None] | None
) -> Loaded:
    with _checkpoint(model, progress) as checkpoint:
        most_bytes = _most_bytes(checkpoint, target.kernels)
        writer = weight_cache.writer(key, most_bytes) if weight_cache is not None else None
        if weight_cache is None or writer is None:
            host = FRESH if target.device is not None else LargePages()
            network = load_to(target, checkpoint, host, progress)
        else:
            store = ImageFilling(writer, weight_cache.make_room)
            try:
                network, facts = fill_weight_image(checkpoint, target, store, progress)
            except BaseException:
                writer.abandon()
                raise
            if store.whole:
                weight_cache.publish(key, writer, facts)
            else:
                weight_cache.counters.refused += 1
        return Loaded(checkpoint.name, checkpoint.text, network, False)


def _most_bytes(checkpoint: Checkpoint, kernels: KernelTable) -> int:
    """Generous upper bound with padding, tables, the draft head and text: the room is only reserved."""
    return 2 * weight_bytes(checkpoint, kernels) + 2**28


@contextlib.contextmanager
def _checkpoint(model: str, progress: Callable[[str], None] | None) -> Iterator[Checkpoint]:
    with open_checkpoint(model, progress=progress) as checkpoint:
        checkpoint.text  # noqa: B018 (first: cheap, and fails before gigabytes are read)
        if progress:
            progress(f"loading {checkpoint.name}")
        yield checkpoint


@cache
def _code() -> str:
    """Digest of the code, so that no version number has to be raised when packing changes."""
    root = Path(__file__).parents[1]
    return _digest(_stamp(one) for room in _CODE for one in sorted((root / room).rglob("*.py")))


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{path.name} {found.st_size} {found.st_mtime_ns} {found.st_ino}"


def _digest(parts: Iterable[str]) -> str:
    return xxh3_128_hexdigest("\0".join(parts).encode())
