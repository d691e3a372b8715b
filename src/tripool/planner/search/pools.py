"""Options of one pool: every parallelism that fits, each with the largest batch that keeps its promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tripool.planner.cost import DecodeModel, Footprint, PrefillModel, Setup, footprint
from tripool.planner.search.ask import Ask
from tripool.planner.search.found import DecodePool, PrefillPool

MAX_BATCH = 1024
_TP = (1, 2, 4, 8)
_PREFILL_RANKS = 64
_PREFILL_TOKENS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_WAIT_BATCHES = 1.5  # at full load a prompt finds a batch half done, then runs in one


def ep_choices(ask: Ask, most: int) -> list[int]:
    """Powers of two and three times those, all there are, and what published systems use: one expert per rank, with and
    without copies of the shared one."""
    most = min(most, ask.ranks)
    found = {scale * 2**power for power in range(most.bit_length()) for scale in (1, 3)} | {most}
    moe = ask.model.moe
    if moe is not None:
        spare = moe.experts // 8
        found |= {moe.experts + spare, moe.experts + 2 * spare, (moe.experts + spare) // 2, (moe.experts + spare) // 4}
    step = ask.hardware.ranks
    return sorted(ep for ep in found if 1 <= ep <= most and (ep % step == 0 or ep < step))


def setups(ask: Ask, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """All that hold their weights."""
    yield from ((setup, room) for setup, room in all_setups(ask, most, drafts=drafts) if room.kv > 0)


def all_setups(ask: Ask, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """Whether they hold their weights or not."""
    moe = ask.model.moe
    accept = ask.model.mtp_accept if ask.accept is None else ask.accept
    for precision in ask.precisions:
        for ep in ep_choices(ask, most):
            for tp in _TP if moe is not None else (ep,):
                if ep % tp or tp > ask.model.attention.heads or tp > ask.hardware.domain_ranks:
                    continue
                for num_drafts in drafts:
                    rate = accept if num_drafts else 0.0
                    setup = Setup(ep=ep, tp=tp, precision=precision, drafts=num_drafts, accept=rate)
                    yield setup, footprint(ask.hardware, ask.model, setup)


def decode_pools(ask: Ask) -> Iterator[DecodePool]:
    drafts = (0, 1) if ask.model.mtp_layers else (0,)
    for setup, room in setups(ask, ask.ranks, drafts=drafts):
        most = min(MAX_BATCH, int(room.max_requests(ask.input_tokens + ask.output_tokens)))
        one = DecodeModel(ask.hardware, ask.model, setup)
        pairs = (one, one.with_microbatches(2)) if ask.model.moe is not None and setup.ep > 1 else (one,)
        for model in pairs:
            batch = _largest(most, model, ask)
            if batch:
                yield decode_pool(ask, model, batch, "memory" if batch == most < MAX_BATCH else "tpot")


def decode_pool(ask: Ask, model: DecodeModel, batch: int, stopped_by: str) -> DecodePool:
    step = model.step(batch, ask.mean_context)
    tpot_s = step.seconds / model.setup.tokens_per_step
    return DecodePool(
        setup=model.setup, batch=batch, tpot_s=tpot_s, step=step, stopped_by=stopped_by,
        tokens_per_s_per_chip=batch * ask.hardware.ranks / tpot_s, chips=_chips(ask, model.setup.ep),
    )  # fmt: skip


def prefill_pools(ask: Ask, first_token_s: float) -> Iterator[PrefillPool]:
    """`first_token_s`: what a first token waits for besides prefill (the decode pool's step)."""
    fresh = ask.input_tokens - ask.cached_tokens
    move_s = ask.kv_bytes() / ask.hardware.plane("transfer").flow_bytes_per_s
    for setup, room in setups(ask, _PREFILL_RANKS, drafts=(0,)):
        one = PrefillModel(ask.hardware, ask.model, setup)
        pairs = [one]
        if ask.model.moe is not None and setup.ep > 1:
            pairs.append(PrefillModel(ask.hardware, ask.model, _two(setup)))
        # Ranks of one fast domain share a long prompt; others keep a prompt whole.
        least = fresh / setup.ep if setup.ep <= ask.hardware.domain_ranks else fresh / setup.tp
        sizes = sorted({ceil(least), *(size for size in _PREFILL_TOKENS if size > least)})
        sizes = [size for size in sizes if size * ask.input_tokens / fresh * room.kv_per_token <= room.kv]
        for model in pairs:
            yield from _prefill_pool(ask, model, sizes, first_token_s + move_s)


def _prefill_pool(ask: Ask, model: PrefillModel, sizes: list[int], other_s: float) -> Iterator[PrefillPool]:
    """The size with the highest rate of those that keep the promise."""
    best: PrefillPool | None = None
    for size in sizes:
        step = model.step(size, ask.input_tokens, ask.cached_tokens)
        ttft_s = _WAIT_BATCHES * step.seconds + other_s
        if ttft_s > ask.ttft_s:
            break
        prompts = size / (ask.input_tokens - ask.cached_tokens)
        rate = prompts * ask.input_tokens * ask.hardware.ranks / step.seconds
        if best is None or rate > best.tokens_per_s_per_chip:
            best = PrefillPool(
                setup=model.setup, tokens=size, batch_s=step.seconds, ttft_s=ttft_s, tokens_per_s_per_chip=rate,
                chips=_chips(ask, model.setup.ep), stopped_by="ttft" if size != sizes[-1] else "memory", step=step,
            )  # fmt: skip
    if best is not None:
        yield best


def fastest_decode(ask: Ask) -> tuple[float, Setup] | None:
    """The least time per token of anything that fits, with one request per rank."""
    drafts = (0, 1) if ask.model.mtp_layers else (0,)
    found = (
        (DecodeModel(ask.hardware, ask.model, setup).tpot_s(1, ask.mean_context), setup)
        for setup, room in setups(ask, ask.ranks, drafts=drafts)
        if room.max_requests(ask.input_tokens + ask.output_tokens) >= 1
    )
    return min(found, key=lambda pair: pair[0], default=None)


def _two(setup: Setup) -> Setup:
    return replace(setup, microbatches=2)


def _chips(ask: Ask, ep: int) -> int:
    return max(1, ceil(ep / ask.hardware.ranks))


def _largest(most: int, model: DecodeModel, ask: Ask) -> int:
    """The largest batch up to `most` that keeps the TPOT, 0 if none does; time grows with the batch."""
    if most < 1 or model.tpot_s(1, ask.mean_context) > ask.tpot_s:
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        keeps = model.tpot_s(middle, ask.mean_context) <= ask.tpot_s
        low, high = (middle, high) if keeps else (low, middle - 1)
    return low
