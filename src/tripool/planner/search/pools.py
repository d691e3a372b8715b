"""Options of one pool: every parallelism that fits, each with the largest batch that meets the SLO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import sqrt

from tripool.planner.cost import DecodeModel, Footprint, PrefillModel, Setup, StepCost
from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.results import Cell, DecodePool, PrefillPool
from tripool.planner.search.setups import instance_chips, parted_setups, setups

MAX_BATCH = 1024
_PREFILL_RANKS = 64
_PREFILL_TOKENS = 16384
"""New tokens per rank of the largest batch."""
_FINE, _COARSE = 8, 4
"""Prefill sizes per doubling; every fourth is tried first."""
_WAIT_BATCHES = 0.5
"""At full load a prompt finds a batch half done, then runs in one."""
POOL_WAIT_S = 0.25
"""Longest wait for the link to the cache pool, as that of `tripool.cache.client.PoolClient`."""
_GOLDEN, _ROUNDS, _LITTLE = (sqrt(5) - 1) / 2, 16, 1e-3


def decode_models(goal: PlanGoal) -> Iterator[tuple[DecodeModel, int]]:
    """Every setup that fits, with one and two microbatches, and with experts on ranks of their own; and the largest
    batch whose KV fits.
    """
    for setup, room in setups(goal, goal.ranks, drafts=_drafts(goal)):
        most = _most_requests(goal, setup, room, room.kv)
        for each in _microbatched(goal, setup):
            yield DecodeModel(goal.hardware, goal.model, each), most
    for setup, room in parted_setups(goal, drafts=_drafts(goal)):
        yield DecodeModel(goal.hardware, goal.model, setup), _most_requests(goal, setup, room, room.kv)


def decode_pools(goal: PlanGoal) -> Iterator[DecodePool]:
    extra_s = goal.second_token_s()
    for model, most in decode_models(goal):
        times = _Tpot(goal, model)
        batch = _largest(most, lambda size, times=times: times(size) + extra_s <= goal.tpot_s)  # type: ignore[misc]
        if batch:
            yield decode_pool(goal, model, batch, "memory" if batch == most < MAX_BATCH else "tpot", extra_s)


def decode_pool(goal: PlanGoal, model: DecodeModel, batch: int, stopped_by: str, extra_s: float) -> DecodePool:
    step = model.step(batch, goal.mean_context)
    tpot_s = step.seconds / model.setup.tokens_per_step
    return DecodePool(
        setup=model.setup, batch=batch, tpot_s=tpot_s + extra_s, step=step, stopped_by=stopped_by,
        tokens_per_s_per_chip=model.tokens_per_s_per_chip(batch, goal.mean_context),
        chips=instance_chips(goal, model.setup.ep),
    )  # fmt: skip


def prefill_pools(goal: PlanGoal) -> Iterator[PrefillPool]:
    for setup, room in setups(goal, _PREFILL_RANKS, drafts=(0,)):
        sizes = _prefill_sizes(goal, setup, room)
        for each in _microbatched(goal, setup):
            found = _prefill_pool(goal, Batches(goal, PrefillModel(goal.hardware, goal.model, each)), sizes)
            if found is not None:
                yield found


class Batches:
    """Time of a prefill batch by the prompt tokens of a rank (cached ones included), remembered."""

    def __init__(self, goal: PlanGoal, model: PrefillModel) -> None:
        self.goal, self.model = goal, model
        self._steps: dict[float, tuple[StepCost, float]] = {}

    def step(self, size: float) -> tuple[StepCost, float]:
        """The shortest, and the share of hits that it reads: with a slow cache pool, computing is faster."""
        if size not in self._steps:
            self._steps[size] = self._shortest(size)
        return self._steps[size]

    def seconds(self, size: float) -> float:
        return self.step(size)[0].seconds

    def _shortest(self, size: float) -> tuple[StepCost, float]:
        plain = (self._read(size, 0.0), 0.0)
        most = self._readable(size) if self.goal.cached_tokens * (1.0 - self.goal.popular) else 0.0
        if not most:
            return plain
        found = self._read(size, most)
        best = min(((found, most), plain), key=lambda pair: pair[0].seconds)
        # Reading a little less costs nothing where the host's launches take longer than computing.
        if self._read(size, most * (1.0 - _LITTLE)).seconds < found.seconds:
            share = most * _lowest(lambda part: self._read(size, most * part).seconds)
            best = min((best, (self._read(size, share), share)), key=lambda pair: pair[0].seconds)
        return best

    def _readable(self, size: float) -> float:
        """Share of the hits in the pool that a batch reads: what finds the link to it busy for longer than a worker
        waits is computed.
        """
        goal = self.goal
        pooled = goal.cached_tokens * (1.0 - goal.popular)
        one_s = pooled * self._token_s / self.model.setup.ep
        hits_s = size * pooled / goal.input_tokens * self._token_s
        return min(1.0, (POOL_WAIT_S + one_s) / hits_s)

    @property
    def _token_s(self) -> float:
        """Time of the link for one token of each rank."""
        model, hardware = self.model.model, self.goal.hardware
        kv_bytes = model.kv_bytes_per_token(self.model.setup.kv_element_bytes)
        return kv_bytes * hardware.ranks / hardware.cache_bytes_per_s["memory"]

    def _known(self, share: float) -> float:
        """Share of the hits that is not computed, if that share of those in the pool is read."""
        return self.goal.popular + (1.0 - self.goal.popular) * share

    def new_tokens(self, size: float, share: float) -> float:
        return size * self.goal.prompts(self._known(share))[0] / self.goal.input_tokens

    def pool(self, size: float, *, stopped_by: str) -> PrefillPool:
        goal, setup = self.goal, self.model.setup
        step, read_share = self.step(size)
        return PrefillPool(
            setup=setup, tokens=max(1, round(self.new_tokens(size, read_share))), batch_s=step.seconds,
            ttft_s=(1.0 + _WAIT_BATCHES) * step.seconds, step=step, read_share=read_share,
            tokens_per_s_per_chip=size * goal.hardware.ranks / step.seconds,
            chips=instance_chips(goal, setup.ep), stopped_by=stopped_by,
        )  # fmt: skip

    def _read(self, size: float, share: float) -> StepCost:
        known = self._known(share)
        _, prompt, cached = self.goal.prompts(known)
        own = self.goal.popular / known if known else 0.0
        return self.model.step(self.new_tokens(size, share), prompt, cached, own=own)


def _prefill_sizes(goal: PlanGoal, setup: Setup, room: Footprint) -> list[float]:
    """Prompt tokens per rank: from one prompt on, whatever the objectives and hits are, as far as KV fits."""
    # Ranks of one fast domain share a long prompt; others keep a prompt on one rank.
    sharing = setup.ep if setup.ep <= goal.hardware.domain_ranks else setup.tp
    kv_tokens = room.kv / room.kv_per_token
    if goal.longest[0] > kv_tokens * sharing:
        return []
    least = goal.input_tokens / sharing
    most = min(kv_tokens, max(least, _PREFILL_TOKENS * goal.input_tokens / goal.prompts(1.0)[0]))
    sizes: list[float] = []
    while not sizes or sizes[-1] <= most:
        sizes.append(least * 2 ** (len(sizes) / _FINE))
    return sizes[:-1] if sizes[-1] > most else sizes


def _prefill_pool(goal: PlanGoal, batches: Batches, sizes: list[float]) -> PrefillPool | None:
    """The size with the highest rate among those that meet the SLO."""

    def meets(count: int) -> bool:
        return (1.0 + _WAIT_BATCHES) * batches.seconds(sizes[count - 1]) <= goal.ttft_s

    count = _largest(len(sizes), meets)
    if not count:
        return None

    def rate(index: int) -> float:
        return sizes[index] / batches.seconds(sizes[index])

    # Larger batches read a smaller share of their hits, so the best may lie anywhere: around the best of every fourth,
    # all are tried. Otherwise a looser objective could hide the one that a tighter one had found.
    best = max({*range(0, count, _COARSE), count - 1}, key=rate)
    best = max(range(max(0, best - _COARSE + 1), min(count, best + _COARSE)), key=rate)
    return batches.pool(sizes[best], stopped_by="ttft" if count < len(sizes) else "memory")


def shared_cells(goal: PlanGoal) -> Iterator[Cell]:
    """One instance of every setup that does both: decoding stops during prefill, and both batches' KV must fit."""
    for setup, room in setups(goal, goal.ranks, drafts=_drafts(goal)):
        sizes = _prefill_sizes(goal, setup, room)[::_COARSE]
        plain = replace(setup, drafts=0, accept=0.0)
        both = [Batches(goal, PrefillModel(goal.hardware, goal.model, each)) for each in _microbatched(goal, plain)]
        decodes = [_Tpot(goal, DecodeModel(goal.hardware, goal.model, each)) for each in _microbatched(goal, setup)]
        best: _InTurn | None = None
        for size in sizes:
            most = _most_requests(goal, setup, room, room.kv - size * room.kv_per_token)
            batches = both[0] if both[0].seconds(size) <= both[-1].seconds(size) else both[-1]
            if not most or batches.seconds(size) > goal.ttft_s:
                break
            for times in decodes:
                found = _InTurn(goal, batches, size, times, most)
                if found.batch and found.ttft_s <= goal.ttft_s and (best is None or found.rate > best.rate):
                    best = found
        if best is not None:
            yield best.cell()


class _InTurn:
    """A shared instance: a request takes its share of a prefill batch, then of its decode steps."""

    def __init__(self, goal: PlanGoal, batches: Batches, size: float, times: _Tpot, most: int) -> None:
        self._goal, self._batches, self._size, self._times, self._most = goal, batches, size, times, most
        ep = batches.model.setup.ep
        prompts = size * ep / goal.input_tokens
        self._prefill_s = batches.seconds(size) / prompts
        self._wait_s = self._prefill_s * ep / goal.output_tokens
        self.batch = _largest(most, lambda batch: self._tpot_s(batch) <= goal.tpot_s)
        if self.batch:
            self._decode_s = goal.output_tokens * times(self.batch) / (self.batch * ep)
            self.rate = 1.0 / (self._prefill_s + self._decode_s)
            # A batch of prompts comes together while others are computed and decoded.
            self.ttft_s = prompts * (self._prefill_s + _WAIT_BATCHES / self.rate)

    def _tpot_s(self, batch: int) -> float:
        """A token also waits for the prompts that are computed while its batch advances."""
        return self._times(batch) + self._wait_s * batch

    def cell(self) -> Cell:
        stopped_by = "memory" if self.batch == self._most < MAX_BATCH else "tpot"
        return Cell(
            prefill=self._batches.pool(self._size, stopped_by=stopped_by),
            decode=decode_pool(self._goal, self._times.model, self.batch, stopped_by, 0.0),
            prefill_instances=1, decode_instances=1, shared=True, requests_per_s=self.rate, transfer_share=0.0,
            bound="prefill" if self._prefill_s > self._decode_s else "decode", tpot_s=self._tpot_s(self.batch),
            ttft_s=self.ttft_s,
        )  # fmt: skip


def fastest_decode(goal: PlanGoal) -> tuple[float, Setup] | None:
    """The lowest TPOT of any setup that fits, with one request per rank."""
    extra_s = goal.second_token_s()
    found = (
        (model.tpot_s(1, goal.mean_context) + extra_s, model.setup)
        for model, most in decode_models(goal)
        if most >= 1 and model.setup.microbatches == 1
    )
    return min(found, key=lambda pair: pair[0], default=None)


class _Tpot:
    """Time per output token by batch, remembered."""

    def __init__(self, goal: PlanGoal, model: DecodeModel) -> None:
        self.model, self._context = model, goal.mean_context
        self._known: dict[int, float] = {}

    def __call__(self, batch: int) -> float:
        if batch not in self._known:
            self._known[batch] = self.model.tpot_s(batch, self._context)
        return self._known[batch]


def _drafts(goal: PlanGoal) -> tuple[int, ...]:
    return (0, 1) if goal.model.mtp_layers else (0,)


def _most_requests(goal: PlanGoal, setup: Setup, room: Footprint, kv_bytes: float) -> int:
    """Per rank with so much room for KV; a tensor-parallel group puts its own together."""
    kv_tokens, state_tokens = kv_bytes / room.kv_per_token * setup.tp, room.state / room.kv_per_token
    return min(MAX_BATCH, int(goal.fitting_requests(kv_tokens, state_tokens) / setup.tp))


def _microbatched(goal: PlanGoal, setup: Setup) -> tuple[Setup, ...]:
    """One microbatch, and two where there is an exchange to hide."""
    return (setup, replace(setup, microbatches=2)) if goal.model.moe is not None and setup.ep > 1 else (setup,)


def _largest(most: int, meets: Callable[[int], bool]) -> int:
    """The largest count up to `most` that meets the objective, 0 if none; time grows with the count. By bits, so that
    searches with different `most` ask for the same counts.
    """
    found = 0
    for bit in reversed(range(max(0, most).bit_length())):
        if found + (1 << bit) <= most and meets(found + (1 << bit)):
            found += 1 << bit
    return found


def _lowest(value: Callable[[float], float]) -> float:
    """Where a function of a share is lowest, by golden section."""
    low, high = 0.0, 1.0
    left, right = high - _GOLDEN, low + _GOLDEN
    at_left, at_right = value(left), value(right)
    for _ in range(_ROUNDS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return (low + high) / 2
