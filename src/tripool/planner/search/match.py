"""Pools to a deployment: how many instances of each, so that prefill, decode and transfer carry the same rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tripool.planner.cost import DecodeModel
from tripool.planner.search.ask import Ask
from tripool.planner.search.found import DecodePool, Deployment, PrefillPool
from tripool.planner.search.pools import decode_pool

_PARTS = 24


def match(ask: Ask, prefill: PrefillPool, decode: DecodePool) -> Deployment | None:
    """The split of the chips that carries most. None: the chips do not hold one instance of each."""
    best: tuple[float, int, int] | None = None
    for decodes in range(1, (ask.chips - prefill.chips) // decode.chips + 1):
        prefills = (ask.chips - decodes * decode.chips) // prefill.chips
        rate = min(_prefill_rate(ask, prefill, prefills), _decode_rate(ask, decode, decodes))
        if best is None or rate > best[0]:
            best = (rate, prefills, decodes)
    if best is None:
        return None
    _, prefills, decodes = best
    # Of whichever pool has more than the other asks for, a part stays spare.
    prefills = _no_more(prefills, lambda count: _prefill_rate(ask, prefill, count), best[0])
    rates = {
        "prefill": _prefill_rate(ask, prefill, prefills),
        "decode": _decode_rate(ask, decode, decodes),
        "transfer": _transfer_rate(ask, min(prefills * prefill.chips, decodes * decode.chips)),
    }
    bound = min(rates, key=lambda name: rates[name])
    return _deployment(ask, prefill, decode, prefills, decodes, bound, rates[bound], rates["transfer"])


def share(ask: Ask, prefill: PrefillPool, decode: DecodePool) -> Deployment | None:
    """One pool that does both in turn, for few chips: decoding stands still meanwhile, so its batch is smaller."""
    instances = ask.chips // decode.chips
    mine, other = prefill.setup, decode.setup
    if not instances or (mine.ep, mine.tp, mine.precision) != (other.ep, other.tp, other.precision):
        return None
    model = DecodeModel(ask.hardware, ask.model, decode.setup)
    best: Deployment | None = None
    for batch in sorted({max(1, round(decode.batch * part / _PARTS)) for part in range(1, _PARTS + 1)}):
        pool = decode_pool(ask, model, batch, "tpot")
        prefill_s, decode_s = (
            ask.input_tokens / prefill.tokens_per_s_per_chip,
            ask.output_tokens / pool.tokens_per_s_per_chip,
        )
        rate = instances * pool.chips / (prefill_s + decode_s)
        tpot_s = pool.tpot_s * (prefill_s + decode_s) / decode_s
        if tpot_s > ask.tpot_s or (best is not None and rate <= best.requests_per_s):
            continue
        bound = "prefill" if prefill_s > decode_s else "decode"
        found = _deployment(ask, prefill, pool, instances, instances, bound, rate, rate)
        best = replace(
            found, shared=True, tpot_s=tpot_s, spare_chips=ask.chips - instances * pool.chips, transfer_share=0.0
        )
    return best


def best_matches(
    ask: Ask, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool], keep: int
) -> Iterator[Deployment]:
    """The best of each decode option, highest rate first; at most `keep`."""
    found: list[Deployment] = []
    for decode in decodes:
        same = (prefill for prefill in prefills if prefill.setup.precision == decode.setup.precision)
        matched = [each for each in (match(ask, prefill, decode) for prefill in same) if each is not None]
        if matched:
            found.append(max(matched, key=_rank))
    if not found:
        shared = (share(ask, prefill, decode) for prefill in prefills for decode in decodes)
        found = [each for each in shared if each is not None]
    shown: set[tuple[int, int, str]] = set()
    for each in sorted(found, key=_rank, reverse=True):
        # Of one parallelism the best batch and options only: the others differ in nothing that a reader would choose.
        kind = (each.decode.setup.ep, each.decode.setup.tp, each.decode.setup.precision)
        if kind not in shown and len(shown) < keep:
            shown.add(kind)
            yield each


def _rank(deployment: Deployment) -> tuple[float, int]:
    return deployment.requests_per_s, deployment.spare_chips


def _prefill_rate(ask: Ask, pool: PrefillPool, instances: int) -> float:
    return instances * pool.chips * pool.tokens_per_s_per_chip / ask.input_tokens


def _decode_rate(ask: Ask, pool: DecodePool, instances: int) -> float:
    return instances * pool.chips * pool.tokens_per_s_per_chip / ask.output_tokens


def _transfer_rate(ask: Ask, chips: int) -> float:
    """Requests whose KV crosses, when the smaller side's links are full."""
    return chips * ask.hardware.plane("transfer").bytes_per_s / ask.kv_bytes()


def _no_more(most: int, rate: Callable[[int], float], needed: float) -> int:
    while most > 1 and rate(most - 1) >= needed:
        most -= 1
    return most


def _deployment(
    ask: Ask, prefill: PrefillPool, decode: DecodePool, prefills: int, decodes: int, bound: str, rate: float,
    transfer_rate: float,
) -> Deployment:  # fmt: skip
    used = prefills * prefill.chips + decodes * decode.chips
    kept = rate * ask.keep_s * (ask.input_tokens + ask.output_tokens) * ask.model.kv_bytes_per_token()
    return Deployment(
        prefill=prefill, decode=decode, prefill_instances=prefills, decode_instances=decodes, shared=False,
        spare_chips=ask.chips - used, requests_per_s=rate, bound=bound, transfer_share=rate / transfer_rate,
        tpot_s=decode.tpot_s, ttft_s=prefill.ttft_s, watts=ask.chips * ask.hardware.watts, cache_bytes=kept,
        cost_per_million=ask.price * ask.chips / (rate * ask.output_tokens * 3600.0) * 1e6,
    )  # fmt: skip
