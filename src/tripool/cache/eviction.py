"""Eviction order over the unused slots of the cache pool. Pure.

Uses slots, namespaces and positions in a chain, neither keys nor bytes. Tails are evicted before heads: slots used
together enter together, tail first, and no block is evicted before one that follows it in its chain, because a prefix
is useless without its head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from tripool.cache.records import Record

ATTENTION_BLOCKS = 256
"""Position at which a block's attention costs about as much to compute as the rest of it: 16 K tokens, in blocks of 64.
Counting multiplications, it is 15 K for DeepSeek V3 and 50 K for Llama 70B.
"""
_WEIGHT = 0.1
_MOST_USES = 16

_Entry = tuple[float, int, int]
"""(priority, order of entry, slot)."""


class CostAware:
    """Evicts the slot with the lowest priority, which every use raises: a variant of GreedyDual.

    The clock counts uses. A use sets the priority to the clock plus `weight * num_slots * cost * sqrt(uses)`, so that
    blocks that cost more to recompute (later in their chain: more attention) and blocks used more often stay longer.
    Slots are all of one size, so cost per slot is cost per byte. With a weight of 0 this is LRU; a tenth of the pool
    hits more on every trace replayed, at every memory size tried (`bench/tiers.py`). GreedyDual's own clock (the
    priority of the last eviction) is not used: it stands still while the pool fills up, and then moves in steps of a
    whole pool.
    """

    def __init__(self, num_slots: int, *, weight: float = _WEIGHT, attention_blocks: float = ATTENTION_BLOCKS) -> None:
        self._bonus = tuple(weight * num_slots * uses**0.5 for uses in range(_MOST_USES + 1))
        self._attention_blocks = attention_blocks
        self._clock = 0
        self._history: dict[int, tuple[int, float]] = {}
        """(uses, priority) of every slot since its block was stored; the priority never falls."""
        self._entries: dict[int, _Entry] = {}
        """The valid heap entry of each slot."""
        self._spaces: dict[int, bytes] = {}
        self._all: list[_Entry] = []
        self._of: dict[bytes, list[_Entry]] = {}
        """One heap per namespace for which `first` was called: few have quotas."""
        self._num_entered = 0

    def enter(self, tail_first: Iterable[tuple[int, Record]]) -> None:
        """Add slots that were used together and are unused from now on."""
        chain = list(tail_first)
        self._clock += len(chain)
        priority = 0.0
        for slot, record in chain:
            uses, earlier = self._history.get(slot, (0, 0.0))
            uses = min(uses + 1, _MOST_USES)
            own_priority = self._clock + self._bonus[uses] * (1 + record.position / self._attention_blocks)
            priority = max(own_priority, priority, earlier)
            self._history[slot] = uses, priority
            self._num_entered += 1
            entry = self._entries[slot] = (priority, self._num_entered, slot)
            self._spaces[slot] = record.namespace
            heappush(self._all, entry)
            if record.namespace in self._of:
                heappush(self._of[record.namespace], entry)

    def leave(self, slot: int) -> None:
        """Remove a slot that is in use again."""
        del self._entries[slot]
        namespace = self._spaces.pop(slot)
        most = 2 * len(self._entries) + 64
        if len(self._all) > most:
            self._sweep(self._all)
        if namespace in self._of and len(self._of[namespace]) > most:
            self._sweep(self._of[namespace])

    def forget(self, slot: int) -> None:
        """Drop the history of a slot whose block is gone. The slot must not be in the order."""
        assert slot not in self._entries
        self._history.pop(slot, None)

    def first(self, namespace: bytes | None = None) -> int | None:
        """The next slot to evict: of all, or of one namespace."""
        heap = self._all if namespace is None else self._heap_of(namespace)
        while heap and self._entries.get(heap[0][2]) != heap[0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def __iter__(self) -> Iterator[int]:
        """Every slot in the order, unsorted."""
        return iter(self._entries)

    def _heap_of(self, namespace: bytes) -> list[_Entry]:
        if namespace not in self._of:
            self._of[namespace] = [self._entries[slot] for slot, name in self._spaces.items() if name == namespace]
            heapify(self._of[namespace])
        return self._of[namespace]

    def _sweep(self, heap: list[_Entry]) -> None:
        """Drop void entries. Sweeping at twice the size costs a constant per entry."""
        heap[:] = [entry for entry in heap if self._entries.get(entry[2]) == entry]
        heapify(heap)

    def check(self, idle: dict[int, Record]) -> None:
        assert self._entries.keys() == idle.keys(), "idle slots are miscounted"
        assert {slot: record.namespace for slot, record in idle.items()} == self._spaces, "namespaces disagree"
        entries = set(self._entries.values())
        assert entries <= set(self._all), "a slot is not in the heap"
        for namespace, heap in self._of.items():
            own = {self._entries[slot] for slot, name in self._spaces.items() if name == namespace}
            assert own == entries & set(heap), "a namespace's heap is not its own"
        for slot, (priority, _, _) in self._entries.items():
            assert self._history[slot][1] == priority, f"slot {slot} has two priorities"
