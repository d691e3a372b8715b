"""A rank's part in its instance: installs the maps that the supervisor writes, and reports ranks that are silent.

In a thread of its own: a step may be waiting for the answer of a rank that has just died.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tripool.errors import EngineStopped
from tripool.experts import ExpertMap
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import AnyMessage, Ready, SilentRank, WorkerId

_LOG = logging.getLogger("tripool.worker")
SILENCE_S = 0.02
"""A rank that leaves a request unanswered for so long is reported: the supervisor knows whether it is dying or slow."""
_LOOK_S = 0.02
"""Between two looks at the map and at silent ranks, besides messages."""
_ALONE_S = 5.0
"""Without a supervisor, each rank by itself gives up one that is silent for so long. Their maps may differ: any rank
computes any expert."""
_FIRST_MAP_S = 60.0
_EPOCHS = 2**14
"""Epochs are compared in 16 bits: a fence must not fall further behind than half of them."""


class Exchange(Protocol):
    """See `kernels/cpu8/exchange.py`."""

    rank: int

    def install(self, epoch: int, table: npt.NDArray[np.int32], alive: Sequence[bool]) -> None: ...

    def fence(self, rank: int, epoch: int) -> None: ...

    def silence_s(self) -> list[float]: ...

    def close(self) -> None: ...


class Rank:
    """Reads the supervisor channel in place of the worker's loop."""

    def __init__(
        self,
        exchange: Exchange,
        file: Path,
        worker_id: WorkerId,
        channel: SupervisorChannel,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._exchange, self._file, self._worker_id, self._channel = exchange, file, worker_id, channel
        self._end_process = end_process
        self._map: ExpertMap | None = None
        self._seen = b""
        """The file as it was read last. Not its inode and time: a file system gives both again within a moment."""
        self._has_map, self._leaving = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tripool-rank", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The supervisor is gone."""
        return self._channel.ended

    def receive(self) -> Sequence[AnyMessage]:
        """Nothing: the messages of the supervisor are this object's."""
        return ()

    def ready(self, block_bytes: int = 0) -> None:
        """Report that this rank answers, and wait until the first map is installed; no step may run before."""
        self._channel.send(Ready(self._worker_id, block_bytes))
        if not self._has_map.wait(_FIRST_MAP_S):
            raise EngineStopped("this rank was given no expert map", hint="the supervisor's log says more")

    def close(self) -> None:
        """No step may be running."""
        self._leaving.set()
        self._thread.join()
        self._exchange.close()

    def _watch(self) -> None:
        try:
            while not self._leaving.is_set():
                self._look()
        finally:
            if not self._leaving.is_set():
                # Without new maps a step would wait for ranks that are gone. The others hold this rank's experts.
                _LOG.exception("this rank cannot follow the expert map, and ends")
                self._end_process(1)

    def _look(self) -> None:
        if self._channel.ended:
            self._leaving.wait(_LOOK_S)
        else:
            select.select([self._channel], [], [], _LOOK_S)
            for _ in self._channel.receive():
                pass  # it only says that the map has changed
        self._install()
        self._report_silence()

    def _install(self) -> None:
        """The newest map, if it is another one and, the first time, if it names this rank."""
        try:
            found = self._file.read_bytes()
        except FileNotFoundError:
            return  # no rank is there yet, or the run is over
        if found == self._seen:
            return
        new, self._seen = ExpertMap.decode(found), found
        if self._map is not None or self._exchange.rank not in new.gone:
            self._use(new)

    def _use(self, new: ExpertMap) -> None:
        for rank in new.gone:
            self._exchange.fence(rank, new.epoch)
        self._exchange.fence(self._exchange.rank, max(0, new.epoch - _EPOCHS))
        self._exchange.install(new.epoch, new.holders, [rank not in new.gone for rank in range(new.ranks)])
        if self._map is None or self._map.gone != new.gone:  # else experts were moved, which is no news
            _LOG.info("expert map", extra={"map_epoch": new.epoch, "ranks_gone": sorted(new.gone)})
        self._map = new
        self._has_map.set()

    def _report_silence(self) -> None:
        if self._map is None:
            return
        for rank, silence_s in enumerate(self._exchange.silence_s()):
            if silence_s > SILENCE_S and rank not in self._map.gone:
                self._channel.send(SilentRank(self._worker_id, rank, self._map.epoch, silence_s))
                if self._channel.ended and silence_s > _ALONE_S:
                    self._use(self._map.without(rank))
