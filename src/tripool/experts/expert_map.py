"""The expert map: for every layer, the ranks and slots that hold each expert, valid for one epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from tripool.errors import ExpertMapError
from tripool.experts.placement import EMPTY, Counts, Loads, Table, expert_ranks, put, rank_loads, replica_counts

_DTYPE = "<i4"
_NEAR = 1e-9  # of the mean load: breaks ties, changes nothing else


class _Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    epoch: int
    experts: int
    shape: tuple[int, int, int]
    gone: list[int]
    table: bytes


@dataclass(frozen=True, eq=False)
class ExpertMap:
    """Immutable; every change is a new map with a higher epoch. Ranks without experts are allowed.

    A slot's number is an address on its rank: an expert keeps its slot until it is dropped there.
    """

    epoch: int
    experts: int
    table: Table
    """(layers, ranks, slots): the expert in each slot, -1 where the slot is free."""
    gone: frozenset[int] = frozenset()
    """Dead ranks: they hold nothing and take nothing over."""

    def __post_init__(self) -> None:
        table = np.array(self.table, np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "table", table)
        self.check()

    @classmethod
    def contiguous(cls, layers: int, experts: int, ranks: int, *, attention_only: Iterable[int] = ()) -> ExpertMap:
        """One replica of each expert, in order, spread as evenly as whole experts allow; epoch 0."""
        holders = [rank for rank in range(ranks) if rank not in set(attention_only)]
        if not holders:
            raise ExpertMapError("no rank may hold experts", hint="leave at least one rank for them")
        bounds = [experts * index // len(holders) for index in range(len(holders) + 1)]
        table = np.full((layers, ranks, -(-experts // len(holders))), EMPTY, np.int32)
        for rank, begin, end in zip(holders, bounds, bounds[1:], strict=False):
            table[:, rank, : end - begin] = np.arange(begin, end)
        return cls(0, experts, table)

    @property
    def layers(self) -> int:
        return len(self.table)

    @property
    def ranks(self) -> int:
        return int(self.table.shape[1])

    @cached_property
    def counts(self) -> Counts:
        """(layers, experts): the number of replicas."""
        return replica_counts(self.table, self.experts)

    @cached_property
    def _by_expert(self) -> tuple[Counts, Counts]:
        """Per layer: flat indexes of (rank, slot), ordered by expert, then rank; and where those of an expert begin."""
        flat = self.table.reshape(self.layers, -1)
        order = np.argsort(flat, axis=1, kind="stable")
        free = (flat == EMPTY).sum(axis=1)[:, None]
        return order, np.concatenate([free, free + self.counts.cumsum(axis=1)], axis=1)

    def replicas(self, layer: int, expert: int) -> tuple[tuple[int, int], ...]:
        """(rank, slot) of each replica, in order of rank."""
        order, begins = self._by_expert
        places = order[layer, begins[layer, expert] : begins[layer, expert + 1]]
        width = self.table.shape[2]
        return tuple((int(place) // width, int(place) % width) for place in places)

    @property
    def holders(self) -> Table:
        """(layers, experts, most replicas): the ranks with a replica of each expert in ascending order, -1 after the
        last. A source chooses among them row by row (`experts/levels.py`)."""
        order, begins = self._by_expert
        turn = np.arange(int(self.counts.max()))
        places = np.minimum(begins[:, :-1, None] + turn, order.shape[1] - 1)
        ranks = order[np.arange(self.layers)[:, None, None], places] // self.table.shape[2]
        return np.where(turn < self.counts[:, :, None], ranks, EMPTY).astype(np.int32)

    def without(self, rank: int, loads: Loads | None = None) -> ExpertMap:
        """The map after this rank's death, one epoch later.

        Remaining replicas answer for its experts. An expert without any goes to the rank with the least load in that
        layer, which maps it from the shared weight cache, beyond its usual slots if need be. Ranks that hold no
        experts take some only when no other rank is left.
        """
        gone = self.gone | {rank}
        table = self.table.copy()
        table[:, rank] = EMPTY
        takers = expert_ranks(table)
        if not takers.any():
            takers = ~np.isin(np.arange(self.ranks), list(gone))
        if not takers.any():
            raise ExpertMapError("no rank is left to hold experts", hint="start the instance again")
        weights = np.ones(self.counts.shape) if loads is None else np.asarray(loads, np.float64)
        orphaned = replica_counts(table, self.experts) == 0
        load = rank_loads(table, np.where(orphaned, 0.0, weights))
        load[:, ~takers] = np.inf
        # Equal loads: another rank for each layer.
        near = weights.mean(axis=1, keepdims=True) * _NEAR + _NEAR**2
        load += near * ((np.arange(self.ranks) + np.arange(self.layers)[:, None]) % self.ranks)
        heaviest_first = np.argsort(np.where(orphaned, -weights, np.inf), axis=1, kind="stable")
        for turn in range(int(orphaned.sum(axis=1).max())):
            (layers,) = np.nonzero(orphaned.sum(axis=1) > turn)
            adopted = heaviest_first[layers, turn]
            ranks = load[layers].argmin(axis=1)
            table = put(table, layers, ranks, adopted)
            load[layers, ranks] += weights[layers, adopted]
        return ExpertMap(self.epoch + 1, self.experts, table, gone)

    def returned(self, rank: int) -> ExpertMap:
        """The map after a dead rank has come back, one epoch later: it holds nothing yet, and moves may go there."""
        return ExpertMap(self.epoch + 1, self.experts, self.table, self.gone - {rank})

    def replaced(self, table: Table) -> ExpertMap:
        """The next epoch's map with another placement, for instance a result of `balance`."""
        return ExpertMap(self.epoch + 1, self.experts, table, self.gone)

    def check(self) -> None:
        """Raise ExpertMapError unless every expert of every layer has a replica, none has two on one rank, and no dead
        rank has any."""
        table = self.table
        if self.epoch < 0 or self.experts < 1 or table.ndim != 3 or not table.size:
            raise ExpertMapError(f"an expert map of shape {table.shape} with {self.experts} experts is impossible")
        if int(table.min()) < EMPTY or int(table.max()) >= self.experts:
            raise ExpertMapError("an expert map names an expert that the model lacks")
        missing = np.argwhere(self.counts == 0)
        if len(missing):
            layer, expert = missing[0].tolist()
            raise ExpertMapError(f"layer {layer} has no replica of expert {expert}", hint="every expert needs a slot")
        ordered = np.sort(table, axis=2)
        if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)).any():
            raise ExpertMapError("a rank holds an expert twice in one layer")
        if not all(0 <= rank < self.ranks for rank in self.gone) or (table[:, sorted(self.gone)] != EMPTY).any():
            raise ExpertMapError("an expert map names experts on a dead rank")

    def encode(self) -> bytes:
        table = self.table.astype(_DTYPE).tobytes()
        shape = (self.layers, self.ranks, self.table.shape[2])
        return msgspec.msgpack.encode(_Wire(self.epoch, self.experts, shape, sorted(self.gone), table))

    @classmethod
    def decode(cls, data: bytes) -> ExpertMap:
        """The map in these bytes, checked; anything else is an ExpertMapError."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except msgspec.DecodeError as error:
            raise ExpertMapError(f"these bytes are no expert map: {error}") from None
        layers, ranks, slots = wire.shape
        size = layers * ranks * slots * np.dtype(_DTYPE).itemsize
        if min(wire.shape) < 1 or len(wire.table) != size:
            raise ExpertMapError(f"an expert map of shape {wire.shape} has {size} bytes, not {len(wire.table)}")
        # Every expert has a slot: this bounds what a few bytes may make the checks allocate.
        if not 1 <= wire.experts <= ranks * slots:
            raise ExpertMapError(f"{ranks} ranks of {slots} slots cannot hold {wire.experts} experts")
        table = np.frombuffer(wire.table, _DTYPE).reshape(wire.shape)
        return cls(wire.epoch, wire.experts, table.astype(np.int32), frozenset(wire.gone))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertMap) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())
