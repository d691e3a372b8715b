"""Weight stores over a weight image: one that fills it, one that reads it.

An image returns its tensors byte for byte at another address, so the same kernels give the same bits.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from tripool.cache.weight_image import Tensor, WeightImage, WeightImageDamaged, WeightImageWriter
from tripool.checkpoints import Checkpoint
from tripool.models.decoder import Model
from tripool.models.load import Target, arch_of, read_arch
from tripool.models.loader import Source
from tripool.text.files import TextFiles

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32,
        torch.complex64,
    )
}  # fmt: skip


class Facts(msgspec.Struct, frozen=True):
    """What a model needs from its checkpoint besides tensors, so that none of its files has to be opened."""

    name: str
    config: Mapping[str, Any]
    text: TextFiles
    has: Mapping[str, bool]
    """Results of `Source.has` while loading."""


class ImageFilling:
    """Writes tensors into an image. If they no longer fit, the rest stays in this process's own memory.

    `make_room` is called when shared memory is full; False: nothing can be evicted.
    """

    def __init__(self, writer: WeightImageWriter, make_room: Callable[[], bool]) -> None:
        self._writer, self._make_room = writer, make_room
        self.whole = True

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make().contiguous()
        placed = self._place(label, made) if self.whole else None
        return made if placed is None else _over(placed, made.dtype, made.shape)

    def _place(self, label: str, made: torch.Tensor) -> memoryview | None:
        data = made.reshape(-1).view(torch.uint8).numpy().data
        placed = None
        try:
            placed = self._try(label, made, data)
            while placed is None and self._make_room():
                placed = self._try(label, made, data)
        finally:
            if placed is None:
                self.whole = False
                self._writer.abandon()
        return placed

    def _try(self, label: str, made: torch.Tensor, data: memoryview) -> memoryview | None:
        try:
            return self._writer.place(label, str(made.dtype).removeprefix("torch."), made.shape, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return None


class MappedWeights:
    """Returns the tensors of an image in their order."""

    def __init__(self, image: WeightImage) -> None:
        self._image = image
        self._tensors: Iterator[Tensor] = iter(image.tensors)

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        stored = next(self._tensors, None)
        if stored is None or stored.label != label or stored.dtype not in _DTYPES:
            found = "nothing" if stored is None else f"'{stored.label}' ({stored.dtype})"
            raise WeightImageDamaged(f"the network asks for '{label}', the image has {found}")
        dtype = _DTYPES[stored.dtype]
        if min(stored.shape, default=0) < 0 or math.prod(stored.shape) * dtype.itemsize != stored.num_bytes:
            raise WeightImageDamaged(f"'{label}' has another size than its shape says")
        return _over(self._image.view(stored), dtype, stored.shape)


def _over(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor keeps the view alive, and the view the mapping."""
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


class _RecordingSource:
    """A source that records the results of `has`."""

    def __init__(self, source: Source) -> None:
        self._source, self.device = source, source.device
        self.expect, self.read, self.scales = source.expect, source.read, source.scales
        self.answers: dict[str, bool] = {}

    def has(self, name: str) -> bool:
        self.answers[name] = self._source.has(name)
        return self.answers[name]


class _MetaSource:
    """Tensors with shapes but no bytes (device `meta`): the weight store has the packed result, so they are
    never read.
    """

    device = "meta"

    def __init__(self, has: Mapping[str, bool]) -> None:
        self._has = has

    def has(self, name: str) -> bool:
        return self._has.get(name, False)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read(self, name: str, out: torch.Tensor) -> None:
        pass

    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        return None


@torch.inference_mode()
def fill_weight_image(
    checkpoint: Checkpoint, target: Target, store: ImageFilling, progress: Callable[[str], None] | None = None
) -> tuple[Model, bytes]:
    """Load the network from files, and into an image; also returns the facts to store with it."""
    source = _RecordingSource(target.source(checkpoint, progress))
    model = Model(read_arch(checkpoint), target.loader(source, store))
    facts = Facts(checkpoint.name, dict(checkpoint.config), checkpoint.text, source.answers)
    return model, msgspec.msgpack.encode(facts)


@torch.inference_mode()
def model_of_weight_image(image: WeightImage, target: Target) -> tuple[Model, Facts]:
    """The network over the image's memory, or a copy of it on a device: opens no file and packs nothing."""
    try:
        facts = msgspec.msgpack.decode(image.facts, type=Facts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightImageDamaged(f"its facts cannot be read: {error}") from error
    loader = target.loader(_MetaSource(facts.has), MappedWeights(image))
    return Model(arch_of(facts.config, facts.name), loader), facts
