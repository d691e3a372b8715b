"""Options of one pool: every parallelism that fits, each with the largest batch that meets the SLO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tripool.planner.cost import DecodeModel, Footprint, PrefillModel, Setup, footprint
from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.results import DecodePool, PrefillPool

MAX_BATCH = 1024
_TP = (1, 2, 4, 8)
_PREFILL_RANKS = 64
_PREFILL_TOKENS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_WAIT_BATCHES = 1.5  # at full load a prompt finds a batch half done, then runs in one


def ep_choices(goal: PlanGoal, most: int) -> list[int]:
    """Powers of two and three times those, all ranks, and what published systems use: one expert per rank, with and
    without copies of the shared one.
    """
    most = min(most, goal.ranks)
    found = {scale * 2**power for power in range(most.bit_length()) for scale in (1, 3)} | {most}
    moe = goal.model.moe
    if moe is not None:
        spare = moe.experts // 8
        found |= {moe.experts + spare, moe.experts + 2 * spare, (moe.experts + spare) // 2, (moe.experts + spare) // 4}
    step = goal.hardware.ranks
    return sorted(ep for ep in found if 1 <= ep <= most and (ep % step == 0 or ep < step))


def setups(goal: PlanGoal, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """Setups whose weights fit."""
    yield from ((setup, room) for setup, room in all_setups(goal, most, drafts=drafts) if room.kv > 0)


def all_setups(goal: PlanGoal, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """All setups, whether their weights fit or not."""
    moe = goal.model.moe
    accept = goal.model.mtp_accept if goal.accept is None else goal.accept
    for precision in goal.precisions:
        for ep in ep_choices(goal, most):
            for tp in _TP if moe is not None else (ep,):
                if ep % tp or tp > goal.model.attention.heads or tp > goal.hardware.domain_ranks:
                    continue
                for num_drafts in drafts:
                    rate = accept if num_drafts else 0.0
                    setup = Setup(ep=ep, tp=tp, precision=precision, drafts=num_drafts, accept=rate)
                    yield setup, footprint(goal.hardware, goal.model, setup)


def decode_models(goal: PlanGoal) -> Iterator[tuple[DecodeModel, int]]:
    """Every setup that fits, with one and two microbatches; and the largest batch whose KV fits."""
    for setup, room in setups(goal, goal.ranks, drafts=(0, 1) if goal.model.mtp_layers else (0,)):
        most = min(MAX_BATCH, int(room.max_requests(goal.input_tokens + goal.output_tokens)))
        for each in _microbatched(goal, setup):
            yield DecodeModel(goal.hardware, goal.model, each), most


def decode_pools(goal: PlanGoal) -> Iterator[DecodePool]:
    for model, most in decode_models(goal):
        batch = _largest(most, model, goal)
        if batch:
            yield decode_pool(goal, model, batch, "memory" if batch == most < MAX_BATCH else "tpot")


def decode_pool(goal: PlanGoal, model: DecodeModel, batch: int, stopped_by: str) -> DecodePool:
    step = model.step(batch, goal.mean_context)
    tpot_s = step.seconds / model.setup.tokens_per_step
    return DecodePool(
        setup=model.setup, batch=batch, tpot_s=tpot_s, step=step, stopped_by=stopped_by,
        tokens_per_s_per_chip=batch * goal.hardware.ranks / tpot_s, chips=instance_chips(goal, model.setup.ep),
    )  # fmt: skip


def prefill_pools(goal: PlanGoal, first_token_s: float) -> Iterator[PrefillPool]:
    """`first_token_s`: delay of the first token besides prefill (the decode pool's step)."""
    fresh = goal.input_tokens - goal.cached_tokens
    move_s = goal.kv_bytes() / goal.hardware.plane("transfer").flow_bytes_per_s
    for setup, room in setups(goal, _PREFILL_RANKS, drafts=(0,)):
        # Ranks of one fast domain share a long prompt; others keep a prompt on one rank.
        least = fresh / setup.ep if setup.ep <= goal.hardware.domain_ranks else fresh / setup.tp
        sizes = sorted({ceil(least), *(size for size in _PREFILL_TOKENS if size > least)})
        sizes = [size for size in sizes if size * goal.input_tokens / fresh * room.kv_per_token <= room.kv]
        for each in _microbatched(goal, setup):
            model = PrefillModel(goal.hardware, goal.model, each)
            yield from _prefill_pool(goal, model, sizes, first_token_s + move_s)


def _prefill_pool(goal: PlanGoal, model: PrefillModel, sizes: list[int], other_s: float) -> Iterator[PrefillPool]:
    """The size with the highest rate among those that meet the SLO."""
    best: PrefillPool | None = None
    for size in sizes:
        step = model.step(size, goal.input_tokens, goal.cached_tokens)
        ttft_s = _WAIT_BATCHES * step.seconds + other_s
        if ttft_s > goal.ttft_s:
            break
        prompts = size / (goal.input_tokens - goal.cached_tokens)
        rate = prompts * goal.input_tokens * goal.hardware.ranks / step.seconds
        if best is None or rate > best.tokens_per_s_per_chip:
            best = PrefillPool(
                setup=model.setup, tokens=size, batch_s=step.seconds, ttft_s=ttft_s, tokens_per_s_per_chip=rate,
                chips=instance_chips(goal, model.setup.ep), step=step,
                stopped_by="ttft" if size != sizes[-1] else "memory",
            )  # fmt: skip
    if best is not None:
        yield best


def fastest_decode(goal: PlanGoal) -> tuple[float, Setup] | None:
    """The lowest TPOT of any setup that fits, with one request per rank."""
    found = (
        (model.tpot_s(1, goal.mean_context), model.setup)
        for model, most in decode_models(goal)
        if most >= 1 and model.setup.microbatches == 1
    )
    return min(found, key=lambda pair: pair[0], default=None)


def _microbatched(goal: PlanGoal, setup: Setup) -> tuple[Setup, ...]:
    """One microbatch, and two where there is an exchange to hide."""
    return (setup, replace(setup, microbatches=2)) if goal.model.moe is not None and setup.ep > 1 else (setup,)


def instance_chips(goal: PlanGoal, ep: int) -> int:
    return max(1, ceil(ep / goal.hardware.ranks))


def _largest(most: int, model: DecodeModel, goal: PlanGoal) -> int:
    """The largest batch up to `most` that meets the TPOT, 0 if none; time grows with the batch."""
    if most < 1 or model.tpot_s(1, goal.mean_context) > goal.tpot_s:
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        keeps = model.tpot_s(middle, goal.mean_context) <= goal.tpot_s
        low, high = (middle, high) if keeps else (low, middle - 1)
    return low
