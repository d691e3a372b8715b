"""A rank's part in the exchange of its instance: attaches layers to shared memory and runs the expert thread.

`kernels/native/exchange.h` runs inside a step; this module only starts it and hands it maps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import addressof, c_void_p

import numpy as np
import numpy.typing as npt

from tripool.errors import ExchangeError
from tripool.experts.layout import Layout, Memory
from tripool.experts.memory import exchange_memory
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.prompts import NativePrompts
from tripool.kernels.cpu8.sublayers import Moe8

_DEADLINE_S = 30.0
MICROBATCH_ROWS = 32
"""A step is computed as two microbatches if each has so many rows (`native/microbatch.h`)."""


class NativeExchange:
    """From its creation to `close` the rank answers other ranks. Its own steps use the exchange after the first
    `install`."""

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        rank: int,
        layers: Sequence[Moe8],
        deadline_s: float = _DEADLINE_S,
        prompts: NativePrompts | None = None,
        microbatch_rows: int = MICROBATCH_ROWS,
    ) -> None:
        """`layers`: all that have experts, in the same order on every rank; `prompts`: closed with the exchange."""
        _check(layout, layers)
        self._prompts = prompts
        self.rank, self._layout, self._layers = rank, layout, layers
        moe = (c_void_p * len(layers))(*(layer.at for layer in layers))
        struct = exchange_memory(layout, memory, rank, moe, int(deadline_s * 1e9), microbatch_rows)
        self._keep, self._attached = (memory, moe), False
        self._library = library.library()
        self._at = self._library.tripool_exchange_open(addressof(struct)) if sys.platform == "linux" else None
        if not self._at:
            raise ExchangeError("the expert thread cannot be started", hint="ranks need Linux and a thread each")

    def install(self, epoch: int, table: npt.NDArray[np.int32], alive: Sequence[bool]) -> None:
        """A new map: `table` [layers, experts] has the rank of each expert; or [layers, experts, most replicas] all its
        ranks, -1 after the last. Any thread may call this, also during a step: requests that lost ranks have not
        answered are then sent again."""
        layout = self._layout
        assert table.shape[:2] == (layout.layers, layout.experts) and len(alive) == layout.ranks
        table = np.ascontiguousarray(table, np.int32).reshape(layout.layers, layout.experts, -1)
        living = np.array(alive, np.uint8)
        assert (table[:, :, 0] >= 0).all() and living[table[table >= 0]].all(), "an expert of a lost rank"
        width = table.shape[2]
        self._library.tripool_exchange_map(self._at, epoch, table.ctypes.data, width, living.ctypes.data)
        if not self._attached:  # a step may be running later on
            for number, layer in enumerate(self._layers):
                layer.struct.layer, layer.struct.exchange = number, self._at
            self._attached = True

    def fence(self, rank: int, epoch: int) -> None:
        """Requests of this rank count only from this epoch on."""
        self._library.tripool_exchange_fence(self._at, rank, epoch)

    def silence_s(self) -> list[float]:
        """For how long each rank has left requests of this one unanswered."""
        silence = np.zeros(self._layout.ranks, np.int64)
        self._library.tripool_exchange_silence(self._at, silence.ctypes.data)
        return [ns / 1e9 for ns in silence.tolist()]

    def close(self) -> None:
        """No step may be running. Afterwards the layers compute with their own experts again."""
        if self._prompts is not None:
            self._prompts.close()
        for layer in self._layers:
            layer.struct.exchange = None
        at, self._at = self._at, None
        if at:
            self._library.tripool_exchange_close(at)


def _check(layout: Layout, layers: Sequence[Moe8]) -> None:
    shape = (layout.layers, layout.experts, layout.top_k, layout.hidden)
    for moe in (layer.struct for layer in layers):
        if (len(layers), moe.experts, moe.top_k, moe.norm.width) != shape:
            raise ExchangeError("the exchange was made for another model", hint="start all ranks with one model")
