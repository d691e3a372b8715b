"""Exchange of rows between ranks, plain and step by step: the reference for `kernels/native/exchange.h`.

`Owner` dispatches the rows of its tokens and collects the answers, `ExpertServer` answers what has arrived. Neither
waits, reads a clock or takes a lock: the caller says when each looks at the shared memory again, so a simulation can
stop a rank between any two stores. `experts/layout.py` describes the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tripool.experts.layout import ENTRY, GROUP, LANES, LINE_BYTES, SEGMENT, SLAB_HEAD, Bell, Layout, Memory, older
from tripool.experts.levels import Levels

Floats = npt.NDArray[np.float32]
Replicas = Sequence[int] | npt.NDArray[np.int32]
"""[experts]: the rank of each expert; or [experts, most replicas]: all its ranks, -1 after the last."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows in the 8 bits in which experts compute: values [rows, groups * 64], scales and fixes [rows, groups]."""

    values: npt.NDArray[np.int8]
    scales: Floats
    fixes: npt.NDArray[np.int32]

    def __getitem__(self, row: int) -> QuantizedRows:
        some = slice(row, row + 1)
        return QuantizedRows(self.values[some], self.scales[some], self.fixes[some])


Compute = Callable[[int, int, QuantizedRows, float], Floats]
"""(layer, expert, one row, weight) -> float32 [hidden], times the weight."""


class SharedView:
    """The parts of an exchange's memory by name."""

    def __init__(self, layout: Layout, memory: Memory) -> None:
        assert len(memory) == layout.num_bytes
        self.layout, self._memory = layout, memory

    def _array(self, at: int, dtype: Any, *shape: int) -> npt.NDArray[Any]:
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        found: npt.NDArray[Any] = self._memory[at : at + size].view(dtype)
        return found.reshape(shape)

    def dispatch_bell(self, destination: int, source: int, lane: int) -> Doorbell:
        at = self.layout.dispatch_bells
        return self.doorbell(at + LINE_BYTES * ((destination * self.layout.ranks + source) * LANES + lane))

    def combine_bell(self, source: int, destination: int, lane: int) -> Doorbell:
        at = self.layout.combine_bells
        return self.doorbell(at + LINE_BYTES * ((source * self.layout.ranks + destination) * LANES + lane))

    def doorbell(self, at: int) -> Doorbell:
        return Doorbell(self._array(at, np.uint64, 1))

    def fence(self, rank: int) -> npt.NDArray[np.uint32]:
        """The lowest epoch whose requests of this rank count."""
        return self._array(self.layout.control + 3 * LINE_BYTES * rank, np.uint32, 1)

    @property
    def copies(self) -> npt.NDArray[np.uint64]:
        """[1]: replicas that were copied since the start; written by the supervisor."""
        return self._array(LINE_BYTES, np.uint64, 1)

    def routed(self, source: int) -> npt.NDArray[np.uint64]:
        """[layers, experts]: rows that this rank has routed to each expert so far."""
        layout = self.layout
        at = layout.routed + layout.routed_bytes * source
        return self._array(at, np.uint64, layout.layers, layout.experts)

    def assigned(self, layer: int) -> npt.NDArray[np.int64]:
        """[ranks]: rows of this layer that all ranks have sent to each so far, those sent again included."""
        return self._array(self.layout.assigned + self.layout.assigned_bytes * layer, np.int64, self.layout.ranks)

    def slab(self, source: int, lane: int) -> DispatchSlab:
        layout = self.layout
        at = layout.dispatch + layout.dispatch_bytes * (source * LANES + lane)
        rows, groups = layout.slab_rows, layout.groups
        return DispatchSlab(
            self._array(at, SLAB_HEAD, 1),
            self._array(at + layout.segment_list, SEGMENT, layout.ranks),
            self._array(at + layout.entry_list, ENTRY, layout.entries),
            QuantizedRows(
                self._array(at + layout.values, np.int8, rows, groups * GROUP),
                self._array(at + layout.scales, np.float32, rows, groups),
                self._array(at + layout.fixes, np.int32, rows, groups),
            ),
        )

    def answers(self, destination: int, source: int, lane: int) -> Floats:
        layout = self.layout
        number = (destination * layout.ranks + source) * LANES + lane
        return self._array(layout.combine + layout.combine_bytes * number, np.float32, layout.entries, layout.hidden)


class Doorbell:
    def __init__(self, word: npt.NDArray[np.uint64]) -> None:
        self._word = word

    def read(self) -> Bell:
        return Bell.unpack(int(self._word[0]))

    def ring(self, bell: Bell) -> None:
        self._word[0] = bell.pack()


@dataclass(frozen=True, slots=True)
class DispatchSlab:
    head: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    entries: npt.NDArray[Any]
    rows: QuantizedRows


def raise_fence(view: SharedView, rank: int, epoch: int) -> None:
    """From now on requests of this rank count only from this epoch on."""
    fence = view.fence(rank)
    if older(int(fence[0]), epoch):
        fence[0] = epoch & 0xFFFF


# ---- owner --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """Consecutive entries for one rank. `bell`: the request once it is sent."""

    rank: int
    offset: int
    count: int
    bell: Bell | None = None
    answered: bool = False


class Owner:
    """One lane of one source. `dispatch`, then `ring` and `poll` until it is done, then `routed`."""

    def __init__(self, view: SharedView, rank: int, lane: int) -> None:
        self.rank, self._lane, self._view = rank, lane, view
        self._slab = view.slab(rank, lane)
        bells = [view.dispatch_bell(other, rank, lane).read() for other in range(view.layout.ranks)]
        used = [bell.sequence for bell in bells if bell.count]
        # They begin again after 2**32 requests: the newest is the one that none of the others follows.
        self._sequence = max(used, key=lambda one: (one - used[0] + 2**31) % 2**32, default=0)
        self._segments: list[_Segment] = []
        self._levels: dict[int, Levels] = {}
        self._epoch = 0

    @property
    def fenced(self) -> bool:
        """Other ranks have given this one up. It must not go on."""
        return older(self._epoch, int(self._view.fence(self.rank)[0]))

    def dispatch(
        self,
        layer: int,
        rows: QuantizedRows,
        experts: npt.NDArray[np.int32],
        weights: Floats,
        table: Replicas,
        epoch: int,
    ) -> None:
        """Write the payload of an exchange. `experts`, `weights`: [rows, top_k]."""
        assert all(segment.answered for segment in self._segments), "the lane is in use"
        count = len(experts)
        assert count <= self._view.layout.slab_rows
        self._epoch, slab = epoch, self._slab
        slab.head[0] = (layer, count)
        for field in ("values", "scales", "fixes"):
            getattr(slab.rows, field)[:count] = getattr(rows, field)
        entries = np.zeros(experts.size, ENTRY)
        entries["row"], entries["choice"] = np.divmod(np.arange(experts.size), experts.shape[1])
        entries["expert"], entries["weight"] = experts.ravel(), weights.ravel()
        np.add.at(self._view.routed(self.rank)[layer], experts.ravel(), np.uint64(1))
        self._segments = []
        self._place(0, entries, table)

    def _place(self, offset: int, entries: npt.NDArray[Any], table: Replicas) -> None:
        """Write entries from `offset` on, sorted by rank and expert, as segments that are not sent yet."""
        layer, layout = int(self._slab.head[0]["layer"]), self._view.layout
        holders = np.asarray(table, np.int32).reshape(layout.experts, -1)
        assigned = self._view.assigned(layer)
        levels = self._levels.setdefault(layer, Levels(self.rank, layout.ranks))
        taken = levels.choose(np.bincount(entries["expert"], minlength=layout.experts).tolist(), holders, assigned)
        ranks = np.empty(len(entries), np.int64)
        for expert in np.unique(entries["expert"]):
            ranks[entries["expert"] == expert] = np.repeat(holders[expert], taken[expert])
        np.add.at(assigned, ranks, 1)
        order = np.lexsort((entries["expert"], ranks))
        self._slab.entries[offset : offset + len(entries)] = entries[order]
        for rank, count in zip(*np.unique(ranks, return_counts=True), strict=True):
            self._segments.append(_Segment(int(rank), offset, int(count)))
            offset += int(count)

    def ring(self) -> int | None:
        """Send one segment whose rank has no other request in this lane; its rank, or None."""
        busy = {s.rank for s in self._segments if s.bell is not None and not s.answered}
        for segment in self._segments:
            if segment.bell is None and segment.rank not in busy:
                self._sequence = (self._sequence + 1) % 2**32
                segment.bell = Bell(self._epoch, segment.count, self._sequence)
                self._slab.segments[segment.rank] = (segment.offset, segment.count)
                self._view.dispatch_bell(segment.rank, self.rank, self._lane).ring(segment.bell)
                return segment.rank
        return None

    def poll(self) -> bool:
        """Note answers; whether all have come."""
        for segment in self._segments:
            if segment.bell is not None and not segment.answered:
                bell = self._view.combine_bell(self.rank, segment.rank, self._lane).read()
                segment.answered = bell.pack() == segment.bell.pack()
        return all(segment.answered for segment in self._segments)

    def reassign(self, table: Replicas, alive: Sequence[bool], epoch: int) -> None:
        """Under a new map: entries that lost ranks have not answered go to the ranks that now hold the experts."""
        self._epoch = epoch
        lost = [s for s in self._segments if not s.answered and not alive[s.rank]]
        self._segments = [s for s in self._segments if s not in lost]
        for segment in lost:
            stop = segment.offset + segment.count
            self._place(segment.offset, self._slab.entries[segment.offset : stop].copy(), table)

    def routed(self) -> Floats:
        """[rows, top_k, hidden]: what the experts gave for each choice."""
        layout, (_, rows) = self._view.layout, self._slab.head[0]
        routed = np.empty((rows, layout.top_k, layout.hidden), np.float32)
        for segment in self._segments:
            answers = self._view.answers(segment.rank, self.rank, self._lane)
            for j in range(segment.offset, segment.offset + segment.count):
                entry = self._slab.entries[j]
                routed[entry["row"], entry["choice"]] = answers[j]
        return routed


def combine(routed: Floats, shared: Floats | None) -> Floats:
    """The sum in order of choice, then the shared expert: as one process adds."""
    total = np.zeros_like(routed[:, 0])
    for choice in range(routed.shape[1]):
        total = total + routed[:, choice]
    return total if shared is None else total + shared


# ---- expert server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    source: int
    lane: int
    bell: Bell


class ExpertServer:
    """Answers the requests of one rank."""

    def __init__(self, view: SharedView, rank: int, compute: Compute) -> None:
        self.rank, self._view, self._compute = rank, view, compute
        self._seen = {
            (source, lane): view.combine_bell(source, rank, lane).read()
            for source in range(view.layout.ranks)
            for lane in range(LANES)
        }

    def requests(self) -> Iterator[Request]:
        """What has arrived and is not answered, without requests of fenced ranks."""
        for (source, lane), seen in self._seen.items():
            bell = self._view.dispatch_bell(self.rank, source, lane).read()
            if bell != seen and not older(bell.epoch, int(self._view.fence(source)[0])):
                yield Request(source, lane, bell)

    def answer(self, request: Request) -> bool:
        """Compute and write the rows; False if the slab no longer holds this request, which then has no answer."""
        source, lane, bell = request.source, request.lane, request.bell
        self._seen[source, lane] = bell
        slab, layout = self._view.slab(source, lane), self._view.layout
        layer, (offset, count) = int(slab.head[0]["layer"]), slab.segments[self.rank].tolist()
        if count != bell.count or offset + count > layout.entries or layer >= layout.layers:
            return False
        # The source may give this rank up and write the lane again at any time: check a copy, and use the copy.
        entries = slab.entries[offset : offset + count].copy()
        if (entries["row"] >= layout.slab_rows).any() or (entries["expert"] >= layout.experts).any():
            return False
        answers = self._view.answers(self.rank, source, lane)
        for j, entry in enumerate(entries, offset):
            answers[j] = self._compute(layer, int(entry["expert"]), slab.rows[int(entry["row"])], entry["weight"])
        return True

    def ring(self, request: Request) -> None:
        """The answer is complete."""
        self._view.combine_bell(request.source, self.rank, request.lane).ring(request.bell)
