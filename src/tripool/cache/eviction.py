"""Which block goes first when room is needed: orders over the slots that nobody uses. Pure.

Knows slots, tenants and positions in a chain; neither keys nor bytes. `LeastRecent` is the plain order and stays for
comparison; `CostAware` is what members use, because it keeps more on every trace that was replayed (`bench/tiers.py`).

Both keep heads longer than tails. What is used together is named together, the tail first, and no block goes before
one that follows it in its chain: a prefix without its head is useless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from tripool.cache.records import Record

ATTENTION_BLOCKS = 256
"""Position at which a block's attention costs about as much to compute as the rest of it: 16 K tokens, in blocks of 64.
Between the 15 K of DeepSeek V3 and the 50 K of Llama 70B, by counting their multiplications."""
_WEIGHT = 0.1
_MOST_USES = 16


_Entry = tuple[float, int, int]
"""Until when, when it came, slot."""


class Eviction(Protocol):
    def enter(self, tail_first: Iterable[tuple[int, Record]]) -> None:
        """Used together, and by nobody from now on."""

    def leave(self, slot: int) -> None:
        """In use again."""

    def forget(self, slot: int) -> None:
        """Its block is gone; what comes there next has no past. Not while it is here."""

    def first(self, namespace: bytes | None = None) -> int | None:
        """The next one to go: of all, or of one namespace."""

    def __contains__(self, slot: int) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """Every slot that is here, in no order."""

    def check(self, idle: dict[int, Record]) -> None: ...


class LeastRecent:
    """Used longest ago goes first."""

    def __init__(self) -> None:
        self._all: OrderedDict[int, bytes] = OrderedDict()
        self._of: dict[bytes, OrderedDict[int, None]] = {}

    def enter(self, tail_first: Iterable[tuple[int, Record]]) -> None:
        for slot, record in tail_first:
            self._all[slot] = record.namespace
            self._of.setdefault(record.namespace, OrderedDict())[slot] = None

    def leave(self, slot: int) -> None:
        namespace = self._all.pop(slot)
        del self._of[namespace][slot]
        if not self._of[namespace]:
            del self._of[namespace]

    def forget(self, slot: int) -> None:
        assert slot not in self._all

    def first(self, namespace: bytes | None = None) -> int | None:
        slots = self._all if namespace is None else self._of.get(namespace)
        return next(iter(slots), None) if slots else None

    def __contains__(self, slot: int) -> bool:
        return slot in self._all

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def check(self, idle: dict[int, Record]) -> None:
        assert self._all.keys() == idle.keys(), "idle slots are miscounted"
        by_namespace: dict[bytes, list[int]] = {}
        for slot in self._all:
            by_namespace.setdefault(idle[slot].namespace, []).append(slot)
        assert {name: list(slots) for name, slots in self._of.items()} == by_namespace, "namespaces disagree"


class CostAware:
    """Each use buys a block a while to live; the one whose time is over first goes first.

    The clock counts uses. A while is longer for what would cost more to compute again (later in its chain: more
    attention) and for what was used more often: `_WEIGHT * num_slots * cost * sqrt(uses)`. Slots are all of one size,
    so cost per slot is cost per byte. With a weight of 0 this is `LeastRecent`; a tenth of the pool is what gained on
    both traces and at every size of memory that was tried. Greedy-dual's own clock (the price of what was last evicted)
    is not used: it stands still while the pool fills up, and then moves in steps of a whole pool.
    """

    def __init__(self, num_slots: int, *, attention_blocks: float = ATTENTION_BLOCKS) -> None:
        self._whiles = tuple(_WEIGHT * num_slots * uses**0.5 for uses in range(_MOST_USES + 1))
        self._attention_blocks = attention_blocks
        self._clock = 0
        self._past: dict[int, tuple[int, float]] = {}
        """Uses of every slot that was ever here and not forgotten, and until when it lives: that never shrinks."""
        self._here: dict[int, _Entry] = {}
        """Entries of the heaps that are not void."""
        self._spaces: dict[int, bytes] = {}
        self._all: list[_Entry] = []
        self._of: dict[bytes, list[_Entry]] = {}
        """Of those namespaces that were ever asked about: few have quotas."""
        self._num_entered = 0

    def enter(self, tail_first: Iterable[tuple[int, Record]]) -> None:
        chain = list(tail_first)
        self._clock += len(chain)
        at_least = 0.0
        for slot, record in chain:
            uses, until = self._past.get(slot, (0, 0.0))
            uses = min(uses + 1, _MOST_USES)
            keep_until = self._clock + self._whiles[uses] * (1 + record.position / self._attention_blocks)
            at_least = max(keep_until, at_least, until)
            self._past[slot] = uses, at_least
            self._num_entered += 1
            entry = self._here[slot] = (at_least, self._num_entered, slot)
            self._spaces[slot] = record.namespace
            heappush(self._all, entry)
            if record.namespace in self._of:
                heappush(self._of[record.namespace], entry)

    def leave(self, slot: int) -> None:
        del self._here[slot]
        namespace = self._spaces.pop(slot)
        most = 2 * len(self._here) + 64
        if len(self._all) > most:
            self._sweep(self._all)
        if namespace in self._of and len(self._of[namespace]) > most:
            self._sweep(self._of[namespace])

    def forget(self, slot: int) -> None:
        assert slot not in self._here
        self._past.pop(slot, None)

    def first(self, namespace: bytes | None = None) -> int | None:
        heap = self._all if namespace is None else self._heap_of(namespace)
        while heap and self._here.get(heap[0][2]) != heap[0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def __contains__(self, slot: int) -> bool:
        return slot in self._here

    def __iter__(self) -> Iterator[int]:
        return iter(self._here)

    def _heap_of(self, namespace: bytes) -> list[_Entry]:
        if namespace not in self._of:
            self._of[namespace] = [self._here[slot] for slot, name in self._spaces.items() if name == namespace]
            heapify(self._of[namespace])
        return self._of[namespace]

    def _sweep(self, heap: list[_Entry]) -> None:
        """Void entries would pile up; sweeping at twice the size costs each of them a constant."""
        heap[:] = [entry for entry in heap if self._here.get(entry[2]) == entry]
        heapify(heap)

    def check(self, idle: dict[int, Record]) -> None:
        assert self._here.keys() == idle.keys(), "idle slots are miscounted"
        assert {slot: record.namespace for slot, record in idle.items()} == self._spaces, "namespaces disagree"
        entries = set(self._here.values())
        assert entries <= set(self._all), "a slot is not in the heap"
        for namespace, heap in self._of.items():
            own = {self._here[slot] for slot, name in self._spaces.items() if name == namespace}
            assert own == entries & set(heap), "a namespace's heap is not its own"
        for slot, (until, _, _) in self._here.items():
            assert self._past[slot][1] == until, f"slot {slot} has two times"
