"""Overload and floods over real HTTP: who is refused, how soon, and what the others notice.

    python bench/admission.py [--quick] [--json FILE] [--only overload|fairness]

Server and client are processes on the same cores. There is no peer: every row stands against its promised limit.

- overload: the fake engine with a device's step times. Poisson arrivals at 200 % of what it was measured to serve, each
  with a longest time to its first token.
- fairness: the real tiny model. Four tenants that together ask for 40 % of what it was measured to serve, alone, and
  beside a fifth that sends ten times as much as each of them.

Refusal times are the client's, from sending to the whole 429. Before either measurement the door learns for some
seconds under the same load: a server that was just started knows nothing of its speed yet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from gateway import serving
from harness import Origin, Row, print_table, write_json
from tripool.bench import random_shots
from tripool.bench.endpoint import BodyMaker, find_model, make_prompts
from tripool.bench.run import Measured, Run
from tripool.bench.samples import Sample
from tripool.bench.wire import Address, HttpClient
from tripool.bench.workload import at_times, poisson_arrivals
from tripool.router.fair_queue import jain, max_min
from tripool.tenants.key_store import KeyStore

REFUSED_P99_MS, KEPT, TTFT_RATIO, JAIN = 50.0, 0.99, 1.5, 0.95
OVERLOAD, TTFT_MS = 2.0, 1000.0
OTHERS_SHARE, NUM_OTHERS, FLOOD = 0.4, 4, 10.0
ANSWER_WITHIN_S = 120.0
WARM_S = 4.0

FAKE = "fake:step_ms=4,row_ms=0.1,prompt_ms=0.1,running=32,blocks=4096"
"""About forty prompts of 256 tokens a second."""
FAKE_SERVER = """
import sys
from tripool.serving.worker import load_pool_engine
from tripool.cli.main import main
main(sys.argv[2:], lambda model, config: load_pool_engine(sys.argv[1], config))
"""
REAL_SERVER = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"


class Bodies(BodyMaker):
    """With a promise in each."""

    def __init__(self, *arguments: Any, slo: Mapping[str, float] | None = None) -> None:
        super().__init__(*arguments)
        self._common |= {"slo": dict(slo)} if slo else {}


class Tenant:
    """One client: its key, its connections, its prompts."""

    def __init__(self, url: str, key: str | None, seed: int, slo: Mapping[str, float] | None = None) -> None:
        self._address = Address.parse(url)
        self._client = HttpClient(self._address, api_key=key)
        self._seed, self._slo = seed, slo
        self._runs = 0

    async def send(
        self, *, input_tokens: int, output_tokens: int, rate: float = 0.0, span_s: float = 0.0, closed: int = 0
    ) -> Measured:
        """An open loop at `rate` for `span_s`, or a closed one of `closed` streams for as long."""
        self._runs += 1
        seed = self._seed * 1000 + self._runs  # no two runs share a prompt
        model = await find_model(self._client, self._address, None)
        prompts = await make_prompts(self._client, "completions", model, seed)
        bodies = Bodies("completions", model, prompts, seed, True, slo=self._slo)
        run = Run(self._client, bodies, timeout_s=ANSWER_WITHIN_S)
        if closed:
            shots = random_shots(100_000, input_tokens=input_tokens, output_tokens=output_tokens)
            asyncio.get_running_loop().call_later(span_s, run.stop)
            return await run.go(shots, concurrency=closed)
        count = max(1, round(rate * span_s))
        shots = random_shots(count, input_tokens=input_tokens, output_tokens=output_tokens)
        return await run.go(at_times(shots, poisson_arrivals(count, rate=rate, seed=seed)))

    def close(self) -> None:
        self._client.close()


async def capacity_of(tenant: Tenant, *, closed: int, **sizes: int) -> float:
    """Requests a second with so many open all the time: those that end after the first half, when all is under way."""
    run = await tenant.send(**sizes, closed=closed, span_s=4 * WARM_S)
    half_s = run.duration_s / 2
    return sum(sample.end_s > half_s for sample in fine(run.samples)) / half_s


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def limit(name: str, ours: float, bound: float, unit: str, note: str, *, upper: bool = True, **details: Any) -> Row:
    return Row(
        name=name, ours=ours, peer=bound, unit=unit, target=1.0, lower_is_better=upper, note=note, details=details
    )


def told(name: str, ours: float, unit: str, note: str, **details: Any) -> Row:
    return Row(name=name, ours=ours, peer=ours, unit=unit, target=None, note=note, details=details)


def fine(samples: Sequence[Sample]) -> list[Sample]:
    """Those that were answered; anything but an answer or a 429 is a failure of this benchmark."""
    strange = {sample.error for sample in samples if not sample.ok and not sample.error.startswith("http 429")}
    if strange:
        raise SystemExit(f"requests failed: {strange}")
    return [sample for sample in samples if sample.ok]


# ---- overload -------------------------------------------------------------------------------------------------------


async def overload(url: str, span_s: float) -> tuple[float, list[Sample], float]:
    """Served requests a second at full load; the samples at twice that; the client's own lag."""
    sizes = {"input_tokens": 256, "output_tokens": 16}
    plain, strict = Tenant(url, None, 1), Tenant(url, None, 2, {"ttft_ms": TTFT_MS})
    try:
        capacity = await capacity_of(plain, closed=32, **sizes)
        await strict.send(**sizes, rate=OVERLOAD * capacity, span_s=WARM_S)
        found = await strict.send(**sizes, rate=OVERLOAD * capacity, span_s=span_s)
        return capacity, found.samples, quantile(found.client_lags_s, 0.99)
    finally:
        plain.close()
        strict.close()


def overload_rows(span_s: float) -> list[Row]:
    with TemporaryDirectory() as folder:
        key_store = ["--keys", f"{folder}/keys.db", "--open"]
        with serving(FAKE_SERVER, FAKE, "serve", "fake", "--port", "0", "--max-running", "32", *key_store) as server:
            capacity, samples, lag_s = uvloop.run(overload(server.url, span_s))
    answered = fine(samples)
    refused_ms = [sample.e2e_s * 1e3 for sample in samples if not sample.ok]
    kept = sum((sample.ttft_s or 0.0) * 1e3 <= TTFT_MS for sample in answered) / len(answered)
    load = f"{OVERLOAD:.0%} of {capacity:.0f} requests/s for {span_s:g} s; {len(refused_ms)} of {len(samples)} refused"
    lag = f"the client's own timers were up to {lag_s * 1e3:.1f} ms late (p99)"
    ttft_ms = [(sample.ttft_s or 0.0) * 1e3 for sample in answered]
    served = len(answered) / span_s / capacity
    return [
        limit("refusals, p99", quantile(refused_ms, 0.99), REFUSED_P99_MS, "ms", f"{load}; {lag}"),
        limit("admitted within their time", kept, KEPT, "share", f"first token in {TTFT_MS:g} ms", upper=False),
        told("refusals, p50", quantile(refused_ms, 0.5), "ms", ""),
        told("admitted: time to first token, p95", quantile(ttft_ms, 0.95), "ms", f"of {TTFT_MS:g} allowed"),
        told("served, of capacity", served, "share", "refusing costs no throughput"),
    ]


# ---- fairness -------------------------------------------------------------------------------------------------------


async def flood(url: str, keys: Sequence[str], span_s: float) -> tuple[float, list[Measured], list[Measured]]:
    """Capacity; the others alone; the others and, last, the tenant that floods."""
    sizes = {"input_tokens": 768, "output_tokens": 4}  # a chat with some turns behind it
    *others, flooding = (Tenant(url, key, seed) for seed, key in enumerate(keys))
    try:
        capacity = await capacity_of(flooding, closed=8, **sizes)
        rate = OTHERS_SHARE * capacity / NUM_OTHERS
        await asyncio.gather(*(other.send(**sizes, rate=rate, span_s=WARM_S) for other in others))
        alone = await asyncio.gather(*(other.send(**sizes, rate=rate, span_s=span_s) for other in others))
        beside = [other.send(**sizes, rate=rate, span_s=span_s) for other in others]
        flooded = await asyncio.gather(*beside, flooding.send(**sizes, rate=FLOOD * rate, span_s=span_s))
        return capacity, alone, flooded
    finally:
        for tenant in (*others, flooding):
            tenant.close()


def fairness_rows(span_s: float, model: str) -> list[Row]:
    names = [*(f"other-{n}" for n in range(NUM_OTHERS)), "flood"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "keys.db"
        with KeyStore(path, create=True) as key_store:
            keys = [key_store.add_key(name, now_s=time.time(), settings={}) for name in names]
        with serving(REAL_SERVER, "serve", model, "--port", "0", "--keys", str(path)) as server:
            capacity, alone, flooded = uvloop.run(flood(server.url, keys, span_s))
    before = quantile([s.ttft_s for run in alone for s in fine(run.samples) if s.ttft_s], 0.95)
    after = quantile([s.ttft_s for run in flooded[:-1] for s in fine(run.samples) if s.ttft_s], 0.95)
    refused = sum(len(run.samples) - len(fine(run.samples)) for run in flooded[:-1])
    asked = [float(len(run.samples)) for run in flooded]
    # What came while all of them were sending: the flood's backlog is served afterwards, to nobody's cost.
    served = [float(sum(s.sent_s + (s.ttft_s or 0.0) <= span_s for s in fine(run.samples))) for run in flooded]
    entitled = max_min(asked, [1.0] * len(asked), sum(served))
    index = jain([got / due for got, due in zip(served, entitled, strict=True) if due])
    load = f"capacity {capacity:.1f} requests/s; others {OTHERS_SHARE:.0%} of it, the flood {FLOOD:g} x one of them"
    counts = dict(zip(names, map(int, served), strict=True))
    return [
        limit("others' time to first token, p95, beside a flood", after / before, TTFT_RATIO, "x alone", load),
        limit(
            "Jain's index", index, JAIN, "index", "of what each got of its max-min share", upper=False, served=counts
        ),
        told("others alone: time to first token, p95", before * 1e3, "ms", ""),
        told("others beside a flood: p95", after * 1e3, "ms", f"{refused} of theirs refused"),
        told("the flood: p50", _median_ms(flooded[-1]), "ms", "waits behind its own"),
    ]


def _median_ms(run: Measured) -> float:
    return quantile([(sample.ttft_s or 0.0) * 1e3 for sample in fine(run.samples)], 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", choices=["overload", "fairness"])
    parser.add_argument("--model", default="tiny", help="of the fairness rows")
    options = parser.parse_args()
    origin = Origin.now()
    span_s = 10.0 if options.quick else 60.0
    rows: list[Row] = []
    if options.only in (None, "overload"):
        rows += overload_rows(span_s)
    if options.only in (None, "fairness"):
        rows += fairness_rows(2 * span_s, options.model)  # its requests are few: a p95 needs some of them
    print_table(rows, origin, "At the door: overload and floods")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
