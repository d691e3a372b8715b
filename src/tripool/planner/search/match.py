"""Combines pools into cells of equal prefill, decode and transfer rates, and cells into deployments.

All meet the SLO, so only rates and sizes count. More chips never carry less, and parts of the chips never carry more
than the whole: every set of cells that fits is considered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.results import Cell, DecodePool, Deployment, PrefillPool
from tripool.planner.search.setups import part_sizes

PoolT = TypeVar("PoolT", PrefillPool, DecodePool)

_EXACT_CHIPS = 1024
"""More chips are filled in equal parts of about so many."""
_SLACK = 1e-9
"""Of a quotient of rates that is a whole number but for rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """So many instances of two pools, or of one shared pool (`decode` is None)."""

    requests_per_s: float
    chips: int
    prefill: PrefillPool | Cell
    decode: DecodePool | None
    prefills: int
    decodes: int


def best_mix(
    goal: PlanGoal, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool], shared: Sequence[Cell]
) -> Deployment | None:
    """The cells with the highest rate together. None: the chips hold no cell."""
    node = goal.hardware.node_chips
    exact = max(node, _EXACT_CHIPS // node * node)
    times, rest = divmod(goal.chips, exact) if goal.chips > exact else (0, goal.chips)
    items = list(_items(goal, min(goal.chips, exact), _best_of_size(prefills), _best_of_size(decodes), shared))
    counts: dict[_Item, int] = {}
    for chips, repeats in ((exact, times), (rest, 1)):
        if repeats:
            for item in _fill(chips, items, part_sizes(node)):
                counts[item] = counts.get(item, 0) + repeats
    cells = _merged(goal, counts)
    return deployment(goal, cells) if cells else None


def uniform(
    goal: PlanGoal, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool], shared: Sequence[Cell]
) -> Iterator[Deployment]:
    """The best single cell of each parallelism of decode, and of each shared pool."""
    best: dict[tuple[bool, int, int, int, str], Cell] = {}
    for decode in decodes:
        setup = decode.setup
        for prefill in _best_of_size(prefills):
            if prefill.setup.precision == setup.precision:
                found = _match(goal, prefill, decode)
                kind = (False, setup.ep, setup.tp, setup.expert_ranks, setup.precision)
                if found is not None and (kind not in best or found.requests_per_s > best[kind].requests_per_s):
                    best[kind] = found
    for cell in shared:
        setup, instances = cell.decode.setup, _usable(goal, goal.chips, cell.chips) // cell.chips
        kind = (True, setup.ep, setup.tp, 0, setup.precision)
        if instances and (kind not in best or instances * cell.requests_per_s > best[kind].requests_per_s):
            best[kind] = _times(cell, instances)
    yield from (deployment(goal, [cell]) for cell in best.values())


def mixed(goal: PlanGoal, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool]) -> Iterator[Deployment]:
    """The best cell of each parallelism of decode, with prefill on other hardware: whole nodes of both kinds."""
    nodes = [hardware.node_chips for hardware in goal.kinds]
    best: dict[tuple[int, int, int, str], Cell] = {}
    for decode in decodes:
        setup = decode.setup
        kind = (setup.ep, setup.tp, setup.expert_ranks, setup.precision)
        for prefill in _best_of_size(prefills):
            if prefill.setup.precision != setup.precision:
                continue
            rates = (_prefill_rate(goal, prefill), _decode_rate(goal, decode))
            counts = _nodes_of_each(goal.chips, nodes, (prefill.chips, decode.chips), rates)
            rate = min(count * rate for count, rate in zip(counts, rates, strict=True))
            if rate:
                needed = [min(n, ceil(rate / each - _SLACK)) for n, each in zip(counts, rates, strict=True)]
                found = _split_cell(goal, prefill, decode, *needed)
                if kind not in best or found.requests_per_s > best[kind].requests_per_s:
                    best[kind] = found
    yield from (deployment(goal, [cell]) for cell in best.values())


def _nodes_of_each(
    chips: int, nodes: Sequence[int], sizes: tuple[int, int], rates: tuple[float, float]
) -> tuple[int, int]:
    """Instances of prefill and of decode on so many chips, in whole nodes of each kind, with the highest rate."""

    def counts(prefill_nodes: int) -> tuple[int, int]:
        used = prefill_nodes * nodes[0]
        return used // sizes[0], (chips - used) // nodes[1] * nodes[1] // sizes[1]

    def rate(prefill_nodes: int) -> float:
        return min(count * each for count, each in zip(counts(prefill_nodes), rates, strict=True))

    low, high = 0, chips // nodes[0]
    while low < high:  # the fewest nodes of prefill that are not the slower pool
        middle = (low + high) // 2
        prefills, decodes = counts(middle)
        low, high = (middle + 1, high) if prefills * rates[0] < decodes * rates[1] else (low, middle)
    return counts(max((low, max(0, low - 1)), key=rate))


def _match(goal: PlanGoal, prefill: PrefillPool, decode: DecodePool) -> Cell | None:
    """The numbers of instances with the highest rate."""
    chips = _usable(goal, goal.chips, max(prefill.chips, decode.chips))
    prefill_rate, decode_rate = _prefill_rate(goal, prefill), _decode_rate(goal, decode)

    def rate_of(decodes: int) -> tuple[float, int, int]:
        prefills = (chips - decodes * decode.chips) // prefill.chips
        return min(prefills * prefill_rate, decodes * decode_rate), prefills, decodes

    low, high = 1, (chips - prefill.chips) // decode.chips
    if high < 1:
        return None
    while low < high:  # the fewest decode instances that are not the slower pool
        middle = (low + high) // 2
        rate, _, _ = rate_of(middle)
        low, high = (low, middle) if rate < middle * decode_rate else (middle + 1, high)
    best = max(rate_of(low), rate_of(max(1, low - 1)))
    # Instances that the slower pool cannot use stay spare.
    rate, prefills, decodes = best
    needed = (ceil(rate / prefill_rate - _SLACK), ceil(rate / decode_rate - _SLACK))
    return _split_cell(goal, prefill, decode, min(prefills, needed[0]), min(decodes, needed[1]))


def _items(
    goal: PlanGoal, chips: int, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool], shared: Sequence[Cell]
) -> Iterator[_Item]:
    """Every cell within so many chips that is not slower than a smaller one of the same pools."""
    for cell in shared:
        yield _Item(cell.requests_per_s, cell.chips, cell, None, 1, 1)
    for decode in decodes:
        decode_rate = _decode_rate(goal, decode)
        for prefill in prefills:
            if prefill.setup.precision != decode.setup.precision:
                continue
            ratio = decode_rate / _prefill_rate(goal, prefill)
            pairs = {(ceil(count * ratio - _SLACK), count) for count in range(1, chips // decode.chips + 1)}
            pairs |= {(count, ceil(count / ratio - _SLACK)) for count in range(1, chips // prefill.chips + 1)}
            for x, y in pairs:
                size = x * prefill.chips + y * decode.chips
                if size <= chips:
                    rate = min(x * _prefill_rate(goal, prefill), y * decode_rate)
                    yield _Item(rate, size, prefill, decode, x, y)


def _fill(chips: int, items: Sequence[_Item], parts: Sequence[int]) -> list[_Item]:
    """The items, repeated at will, with the highest sum of rates on so many chips, of which whole nodes come first.

    An item takes a multiple of its unit: the largest part of a node that one of its instances needs, a node for
    instances of several. Those of larger units are laid first; what they leave are whole smaller units.
    """
    best: list[tuple[float, tuple[_Item, object] | None]] = [(0.0, None)] * (chips + 1)
    before = chips + 1
    for unit in parts:
        sizes: dict[int, _Item] = {}
        for item in items:
            if _unit(item, parts) == unit:
                size = ceil(item.chips / unit) * unit
                if size not in sizes or item.requests_per_s > sizes[size].requests_per_s:
                    sizes[size] = item
        useful, most = [], 0.0
        for size, item in sorted(sizes.items()):
            if item.requests_per_s > most:
                most = item.requests_per_s
                useful.append((size, item))
        for at in range(unit, chips + 1, unit):
            found = max(best[at - at % before], best[at - unit], key=lambda each: each[0])
            for size, item in useful:
                if size > at:
                    break
                rate, chosen = best[at - size]
                if rate + item.requests_per_s > found[0]:
                    found = (rate + item.requests_per_s, (item, chosen))
            best[at] = found
        before = unit
    return _unrolled(best[chips][1])


def _unrolled(chosen: object) -> list[_Item]:
    """Items of a chain of (item, those before it)."""
    items = []
    while isinstance(chosen, tuple):
        item, chosen = chosen
        items.append(item)
    return items


def _unit(item: _Item, parts: Sequence[int]) -> int:
    largest = item.chips if item.decode is None else max(item.prefill.chips, item.decode.chips)
    return min((part for part in parts if part >= largest), default=parts[0])


def _usable(goal: PlanGoal, chips: int, largest: int) -> int:
    """Chips in whole units of an instance of that size."""
    unit = min((part for part in part_sizes(goal.hardware.node_chips) if part >= largest), default=0)
    unit = unit or goal.hardware.node_chips
    return chips // unit * unit


def _merged(goal: PlanGoal, counts: dict[_Item, int]) -> list[Cell]:
    """Items of the same pools become one cell, which is not slower than they are apart."""
    pools: dict[tuple[int, int], list[tuple[_Item, int]]] = {}
    for item, count in counts.items():
        pools.setdefault((id(item.prefill), id(item.decode)), []).append((item, count))
    cells = []
    for group in pools.values():
        item, prefills = group[0][0], sum(each.prefills * count for each, count in group)
        if isinstance(item.prefill, Cell):
            cells.append(_times(item.prefill, prefills))
        else:
            assert item.decode is not None
            decodes = sum(each.decodes * count for each, count in group)
            cells.append(_split_cell(goal, item.prefill, item.decode, prefills, decodes))
    return cells


def _best_of_size(pools: Sequence[PoolT]) -> list[PoolT]:
    """Of equally many chips and the same precision, the one with the highest rate."""
    best: dict[tuple[int, str], PoolT] = {}
    for pool in pools:
        kind = (pool.chips, pool.setup.precision)
        if kind not in best or pool.tokens_per_s_per_chip > best[kind].tokens_per_s_per_chip:
            best[kind] = pool
    return list(best.values())


def _times(cell: Cell, instances: int) -> Cell:
    rate = instances * cell.requests_per_s
    return replace(cell, prefill_instances=instances, decode_instances=instances, requests_per_s=rate)


def _prefill_rate(goal: PlanGoal, pool: PrefillPool) -> float:
    """Of one instance, as far as its links carry the KV away."""
    return min(pool.chips * pool.tokens_per_s_per_chip / goal.input_tokens, _transfer_rate(goal, pool.chips))


def _decode_rate(goal: PlanGoal, pool: DecodePool) -> float:
    return min(pool.chips * pool.tokens_per_s_per_chip / goal.output_tokens, _transfer_rate(goal, pool.chips))


def _transfer_rate(goal: PlanGoal, chips: int) -> float:
    """Rate of KV transfers when the links of so many chips are full."""
    bytes_per_s = min(hardware.plane("transfer").bytes_per_s for hardware in goal.kinds)
    return chips * bytes_per_s / goal.kv_bytes()


def _split_cell(goal: PlanGoal, prefill: PrefillPool, decode: DecodePool, prefills: int, decodes: int) -> Cell:
    rates = {
        "transfer": _transfer_rate(goal, min(prefills * prefill.chips, decodes * decode.chips)),
        "prefill": prefills * prefill.chips * prefill.tokens_per_s_per_chip / goal.input_tokens,
        "decode": decodes * decode.chips * decode.tokens_per_s_per_chip / goal.output_tokens,
    }
    bound = min(rates, key=lambda name: rates[name])
    return Cell(
        prefill=prefill, decode=decode, prefill_instances=prefills, decode_instances=decodes, shared=False,
        requests_per_s=rates[bound], bound=bound, transfer_share=rates[bound] / rates["transfer"],
        tpot_s=decode.tpot_s, ttft_s=prefill.ttft_s,
    )  # fmt: skip


def deployment(goal: PlanGoal, cells: Sequence[Cell]) -> Deployment:
    used, rate = sum(cell.chips for cell in cells), sum(cell.requests_per_s for cell in cells)
    millions_per_hour = rate * goal.output_tokens * 3600.0 / 1e6
    decode_chips = sum(cell.decode_instances * cell.decode.chips for cell in cells)
    price, watts = goal.hourly(used - decode_chips, decode_chips)
    return Deployment(
        cells=tuple(sorted(cells, key=lambda cell: -cell.requests_per_s)), spare_chips=goal.chips - used,
        cost_per_million=None if price is None else price / millions_per_hour,
        kwh_per_million=None if watts is None else watts / 1e3 / millions_per_hour, watts=watts,
        cache_bytes=rate * goal.keep_s * (goal.input_tokens + goal.output_tokens) * goal.model.kv_bytes_per_token(),
    )  # fmt: skip
