"""Combines pools into a deployment: numbers of instances such that prefill, decode and transfer have equal rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tripool.planner.cost import DecodeModel
from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.pools import decode_pool
from tripool.planner.search.results import DecodePool, Deployment, PrefillPool

_PARTS = 24


def match(goal: PlanGoal, prefill: PrefillPool, decode: DecodePool) -> Deployment | None:
    """The split of the chips with the highest rate. None: the chips do not hold one instance of each."""
    best: tuple[float, int, int] | None = None
    for decodes in range(1, (goal.chips - prefill.chips) // decode.chips + 1):
        prefills = (goal.chips - decodes * decode.chips) // prefill.chips
        rate = min(_prefill_rate(goal, prefill, prefills), _decode_rate(goal, decode, decodes))
        if best is None or rate > best[0]:
            best = (rate, prefills, decodes)
    if best is None:
        return None
    _, prefills, decodes = best
    # Excess instances of the faster pool stay spare.
    prefills = _no_more(prefills, lambda count: _prefill_rate(goal, prefill, count), best[0])
    rates = {
        "prefill": _prefill_rate(goal, prefill, prefills),
        "decode": _decode_rate(goal, decode, decodes),
        "transfer": _transfer_rate(goal, min(prefills * prefill.chips, decodes * decode.chips)),
    }
    bound = min(rates, key=lambda name: rates[name])
    return _deployment(goal, prefill, decode, prefills, decodes, bound, rates[bound], rates["transfer"])


def share(goal: PlanGoal, prefill: PrefillPool, decode: DecodePool) -> Deployment | None:
    """One pool that alternates, for few chips: decoding stops during prefill, so its batch is smaller."""
    instances = goal.chips // decode.chips
    mine, other = prefill.setup, decode.setup
    if not instances or (mine.ep, mine.tp, mine.precision) != (other.ep, other.tp, other.precision):
        return None
    model = DecodeModel(goal.hardware, goal.model, decode.setup)
    best: Deployment | None = None
    for batch in sorted({max(1, round(decode.batch * part / _PARTS)) for part in range(1, _PARTS + 1)}):
        pool = decode_pool(goal, model, batch, "tpot")
        prefill_s, decode_s = (
            goal.input_tokens / prefill.tokens_per_s_per_chip,
            goal.output_tokens / pool.tokens_per_s_per_chip,
        )
        rate = instances * pool.chips / (prefill_s + decode_s)
        tpot_s = pool.tpot_s * (prefill_s + decode_s) / decode_s
        if tpot_s > goal.tpot_s or (best is not None and rate <= best.requests_per_s):
            continue
        bound = "prefill" if prefill_s > decode_s else "decode"
        found = _deployment(goal, prefill, pool, instances, instances, bound, rate, rate)
        best = replace(
            found, shared=True, tpot_s=tpot_s, spare_chips=goal.chips - instances * pool.chips, transfer_share=0.0
        )
    return best


def best_matches(
    goal: PlanGoal, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool], keep: int
) -> Iterator[Deployment]:
    """The best of each decode option, highest rate first; at most `keep`."""
    found: list[Deployment] = []
    for decode in decodes:
        same = (prefill for prefill in prefills if prefill.setup.precision == decode.setup.precision)
        matched = [each for each in (match(goal, prefill, decode) for prefill in same) if each is not None]
        if matched:
            found.append(max(matched, key=_rank))
    if not found:
        shared = (share(goal, prefill, decode) for prefill in prefills for decode in decodes)
        found = [each for each in shared if each is not None]
    shown: set[tuple[int, int, str]] = set()
    for each in sorted(found, key=_rank, reverse=True):
        # Only the best batch and options of each parallelism: the others are not interesting choices.
        kind = (each.decode.setup.ep, each.decode.setup.tp, each.decode.setup.precision)
        if kind not in shown and len(shown) < keep:
            shown.add(kind)
            yield each


def _rank(deployment: Deployment) -> tuple[float, int]:
    return deployment.requests_per_s, deployment.spare_chips


def _prefill_rate(goal: PlanGoal, pool: PrefillPool, instances: int) -> float:
    return instances * pool.chips * pool.tokens_per_s_per_chip / goal.input_tokens


def _decode_rate(goal: PlanGoal, pool: DecodePool, instances: int) -> float:
    return instances * pool.chips * pool.tokens_per_s_per_chip / goal.output_tokens


def _transfer_rate(goal: PlanGoal, chips: int) -> float:
    """Rate of KV transfers when the links of the smaller pool are full."""
    return chips * goal.hardware.plane("transfer").bytes_per_s / goal.kv_bytes()


def _no_more(most: int, rate: Callable[[int], float], needed: float) -> int:
    while most > 1 and rate(most - 1) >= needed:
        most -= 1
    return most


def _deployment(
    goal: PlanGoal, prefill: PrefillPool, decode: DecodePool, prefills: int, decodes: int, bound: str, rate: float,
    transfer_rate: float,
) -> Deployment:  # fmt: skip
    used = prefills * prefill.chips + decodes * decode.chips
    cache_bytes = rate * goal.keep_s * (goal.input_tokens + goal.output_tokens) * goal.model.kv_bytes_per_token()
    return Deployment(
        prefill=prefill, decode=decode, prefill_instances=prefills, decode_instances=decodes, shared=False,
        spare_chips=goal.chips - used, requests_per_s=rate, bound=bound, transfer_share=rate / transfer_rate,
        tpot_s=decode.tpot_s, ttft_s=prefill.ttft_s, watts=goal.chips * goal.hardware.watts, cache_bytes=cache_bytes,
        cost_per_million=goal.price * goal.chips / (rate * goal.output_tokens * 3600.0) * 1e6,
    )  # fmt: skip
