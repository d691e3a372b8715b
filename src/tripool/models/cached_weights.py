"""A network's final tensors in and out of an image of the model cache: one shelf that fills it, one that reads it.

What comes out of an image is what went in, byte for byte, at another address: the same kernels give the same bits.
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
from tripool.kernels import KernelTable
from tripool.models.decoder import Model
from tripool.models.load import arch_of, read_arch
from tripool.models.loader import FromCheckpoint, Loader, Source
from tripool.text.files import TextFiles

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int32, torch.complex64)
}


class Facts(msgspec.Struct, frozen=True):
    """What is needed of a checkpoint besides its tensors: with it, none of its files is opened."""

    name: str
    config: Mapping[str, Any]
    text: TextFiles
    has: Mapping[str, bool]
    """Questions that were asked about tensors while loading, and the answers."""


class ImageFilling:
    """Writes down what is kept. When it no longer fits, the rest stays in this process's own memory.

    `make_room` is asked when the shared memory is full; False: there is none to be made.
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
    """Hands out what was kept, in its order."""

    def __init__(self, image: WeightImage) -> None:
        self._image = image
        self._tensors: Iterator[Tensor] = iter(image.tensors)

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        kept = next(self._tensors, None)
        if kept is None or kept.label != label or kept.dtype not in _DTYPES:
            found = "nothing" if kept is None else f"'{kept.label}' ({kept.dtype})"
            raise WeightImageDamaged(f"the network asks for '{label}', the image has {found}")
        dtype = _DTYPES[kept.dtype]
        if min(kept.shape, default=0) < 0 or math.prod(kept.shape) * dtype.itemsize != kept.num_bytes:
            raise WeightImageDamaged(f"'{label}' has another size than its shape says")
        return _over(self._image.view(kept), dtype, kept.shape)


def _over(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor pins the view, and the view the mapping."""
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


class _Asked:
    """A source, and what it was asked."""

    def __init__(self, source: Source) -> None:
        self._source, self.device = source, source.device
        self.expect, self.read, self.scales = source.expect, source.read, source.scales
        self.answers: dict[str, bool] = {}

    def has(self, name: str) -> bool:
        self.answers[name] = self._source.has(name)
        return self.answers[name]


class _Nobody:
    """Tensors with shapes and without bytes: they are never looked into, as the shelf has what would come of them."""

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
def fill_weight_image(checkpoint: Checkpoint, kernels: KernelTable, store: ImageFilling) -> tuple[Model, bytes]:
    """The network, from files, and the facts that its image needs."""
    source = _Asked(FromCheckpoint(checkpoint))
    model = Model(read_arch(checkpoint), Loader(source, kernels, torch.float32, store))
    facts = Facts(checkpoint.name, dict(checkpoint.config), checkpoint.text, source.answers)
    return model, msgspec.msgpack.encode(facts)


@torch.inference_mode()
def model_of_weight_image(image: WeightImage, kernels: KernelTable) -> tuple[Model, Facts]:
    """The network over the image's memory: no file is opened, nothing is packed or copied."""
    try:
        facts = msgspec.msgpack.decode(image.facts, type=Facts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightImageDamaged(f"its facts cannot be read: {error}") from error
    loader = Loader(_Nobody(facts.has), kernels, torch.float32, MappedWeights(image))
    return Model(arch_of(facts.config, facts.name), loader), facts
