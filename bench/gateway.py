"""What the gateway adds to an engine that costs nothing, and how much it carries: the fake engine behind real HTTP.

    python bench/gateway.py [--quick] [--json FILE]

Server and client are two processes on the same two cores. There is no peer: every row stands against its promised
limit. Three rows tell the floor beneath them: a bare HTTP exchange on this machine, the client's own share of a core,
and the memory of a server that has not served yet.

| row | load |
|---|---|
| added time to first token | one chat at a time, less what the engine itself took |
| streamed tokens | 64 chats at once as fast as it goes, one event per token |
| flat memory | 1,000 streams of an engine that makes 4 tokens a second for each; answers end and begin all the while |
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from harness import Origin, Row, print_table, write_json
from instant_engine import InstantEngine
from tripool.bench import Summary, random_shots, summarise
from tripool.bench.endpoint import BodyMaker, ask, find_model, make_prompts
from tripool.bench.run import Measured, Run
from tripool.bench.wire import Address, HttpClient
from tripool.core import Request, SamplingParams
from tripool.engine.fake import fake_text

ADDED_TTFT_MS, TOKENS_PER_S, GOAL_TOKENS_PER_S, GROWTH = 3.0, 6000.0, 8000.0, 1.05
INPUT_TOKENS, SHORT_TOKENS = 128, 32
STEP_S = 0.25
"""Of the paced engine: each stream gets four tokens a second, as a reader would."""
START_WITHIN_S = 120.0

BENCH = str(Path(__file__).parent)
SERVER = """
import sys, time
from tripool.cli.main import main
from tripool.engine.fake import fake_text

sys.path.insert(0, sys.argv[2])
from instant_engine import InstantEngine

class Paced(InstantEngine):
    "Steps at fixed times, as a device would; 0 is as fast as it goes."
    due_s = 0.0
    def step(self):
        now_s = time.monotonic()
        if step_s and self.due_s > now_s:
            time.sleep(self.due_s - now_s)
        self.due_s = max(self.due_s, now_s) + step_s
        return super().step()

step_s = float(sys.argv[1])
engine = Paced(fake_text(), context_tokens=10**6, max_running=4096)
main(["serve", "fake", "--port", "0"], lambda model, config: engine)
"""


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def rss_mb(self) -> float:
        told = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", told)[1]) / 1024

    def cpu_s(self) -> float:
        """Of all its threads, in user and kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(program: str, *arguments: str) -> Iterator[Server]:
    """A server in a process of its own, that prints `tripool serve`'s banner."""
    command = [sys.executable, "-c", program, *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        watchdog = threading.Timer(START_WITHIN_S, process.kill)
        watchdog.start()
        try:
            banner = ""
            while (found := re.search(r"at (http\S+)/v1", banner)) is None:
                line = process.stdout.readline()
                if not line:
                    log.seek(0)
                    raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')[-2000:]}")
                banner += line
            watchdog.cancel()
            yield Server(found[1], process.pid)
        finally:
            watchdog.cancel()
            process.kill()


async def load(
    url: str, *, concurrency: int, requests: int, output_tokens: int, input_tokens: int = INPUT_TOKENS, key_watcher=None
) -> Measured:
    """A closed loop of chats; `key_watcher` runs beside it and ends it when it returns."""
    address = Address.parse(url)
    client = HttpClient(address)
    try:
        model = await find_model(client, address, None)
        prompts = await make_prompts(client, "chat", model, 0)
        run = Run(client, BodyMaker("chat", model, prompts, 0, True), timeout_s=300)
        shots = random_shots(requests, input_tokens=input_tokens, output_tokens=output_tokens)
        going = asyncio.ensure_future(run.go(shots, concurrency=concurrency))
        if key_watcher is not None:
            await key_watcher()
            run.stop()
        return await going
    finally:
        client.close()


def summary_of(measured: Measured) -> Summary:
    found = summarise(measured.samples, measured.duration_s, cancelled=measured.cancelled)
    if found.failed or not found.completed:
        raise SystemExit(f"requests failed: {found.errors}")
    return found


def engine_ttft_ms(repetitions: int) -> float:
    """The fake's own: a request added and stepped once, without any HTTP around it."""
    engine, times_ms = InstantEngine(fake_text()), []
    for number in range(repetitions):
        prompt = tuple(32 + (number * 7 + position) % 190 for position in range(INPUT_TOKENS))
        request = Request(id=str(number), prompt_ids=prompt, params=SamplingParams(max_tokens=4), seed=number)
        began = time.perf_counter()
        engine.add(request)
        engine.step()
        times_ms.append((time.perf_counter() - began) * 1e3)
        engine.cancel(request.id)
    return statistics.median(times_ms)


async def bare_exchange_ms(url: str, repetitions: int) -> float:
    client, times_ms = HttpClient(Address.parse(url)), []
    for _ in range(repetitions):
        began = time.perf_counter()
        await ask(client, "GET", "/health")
        times_ms.append((time.perf_counter() - began) * 1e3)
    client.close()
    return statistics.median(times_ms)


def first_token_rows(repetitions: int) -> list[Row]:
    with serving(SERVER, "0.0", BENCH) as server:
        uvloop.run(load(server.url, concurrency=1, requests=repetitions // 4, output_tokens=4))  # warms both sides
        bare_ms = uvloop.run(bare_exchange_ms(server.url, repetitions))
        found = summary_of(uvloop.run(load(server.url, concurrency=1, requests=repetitions, output_tokens=4)))
    engine_ms = engine_ttft_ms(repetitions)
    assert found.ttft_ms is not None
    details = {"p50_ms": found.ttft_ms.p50, "p99_ms": found.ttft_ms.p99, "engine_ms": engine_ms}
    note = f"p99 {found.ttft_ms.p99:.2f}; the engine's own {engine_ms:.2f} is taken off"
    return [
        limit("added time to first token, p50", found.ttft_ms.p50 - engine_ms, ADDED_TTFT_MS, "ms", 1.0, note, details),
        limit("floor: a bare HTTP exchange, p50", bare_ms, ADDED_TTFT_MS, "ms", None, "GET /health, kept connection"),
    ]


def throughput_rows(requests: int, output_tokens: int, repetitions: int) -> list[Row]:
    rates, shares, costs_us = [], [], []
    with serving(SERVER, "0.0", BENCH) as server:
        for _ in range(repetitions):
            began_s, server_began_s = time.process_time(), server.cpu_s()
            found = summary_of(
                uvloop.run(load(server.url, concurrency=64, requests=requests, output_tokens=output_tokens))
            )
            assert found.events == found.output_tokens == requests * output_tokens, "one event per token"
            rates.append(found.output_tokens_per_s)
            shares.append((time.process_time() - began_s) / found.duration_s)
            costs_us.append((server.cpu_s() - server_began_s) / found.output_tokens * 1e6)
    details = {"runs": rates, "client_core": shares, "server_us": costs_us, "goal": GOAL_TOKENS_PER_S}
    rate, share = statistics.median(rates), statistics.median(shares)
    told = "reached" if rate >= GOAL_TOKENS_PER_S else "not reached"
    note = f"64 streams, one event per token; goal {GOAL_TOKENS_PER_S:,.0f} {told}; runs from {min(rates):,.0f}"
    return [
        Row(
            name="streamed tokens",
            ours=rate,
            peer=TOKENS_PER_S,
            unit="tokens/s",
            target=1.0,
            note=note,
            details=details,
        ),
        limit(
            "server's processor time per token",
            statistics.median(costs_us),
            1e6 / TOKENS_PER_S,
            "µs",
            None,
            "engine and requests' beginnings included; less shaken by a busy machine than the rate",
        ),
        limit("floor: the client's share of a core", share, 1.0, "cores", None, "while it reads those tokens"),
    ]


def memory_rows(streams: int, first_s: float, end_s: float) -> list[Row]:
    sizes_mb: list[float] = []

    with serving(SERVER, str(STEP_S), BENCH) as server:
        idle_mb = server.rss_mb()

        async def key_watcher() -> None:
            for _ in range(round(end_s / first_s)):
                await asyncio.sleep(first_s)
                sizes_mb.append(server.rss_mb())

        # Answers of a twelfth of the time: before the first look some of every place have ended, so that what is kept
        # of ended requests, on purpose and within bounds, is there already. Prompts are shorter than a block, because
        # the fake engine remembers every block for ever.
        shape = {"concurrency": streams, "requests": streams * 40, "output_tokens": int(end_s / 12 / STEP_S)}
        found = summary_of(uvloop.run(load(server.url, **shape, input_tokens=SHORT_TOKENS, key_watcher=key_watcher)))
    early_mb, late_mb = sizes_mb[0], sizes_mb[-1]
    details = {"sizes_mb": sizes_mb, "idle_mb": idle_mb, "served": found.completed}
    itl = found.itl_ms
    note = f"{found.completed:,} answers ended, {found.cancelled:,} open at the end, none failed"
    if itl is not None:
        details["gap_p99_ms"] = itl.p99
        note += f"; gap between tokens p50 {itl.p50:.0f}, p99 {itl.p99:.0f} ms (made every {STEP_S * 1e3:.0f})"
    name = f"{streams:,} streams: memory at {end_s:g} s against {first_s:g} s"
    return [
        limit(name, late_mb, early_mb, "MB", GROWTH, note, details),
        limit("floor: memory before the first request", idle_mb, early_mb, "MB", None, ""),
    ]


def limit(
    name: str, ours: float, most: float, unit: str, target: float | None, note: str, details: dict | None = None
) -> Row:
    return Row(
        name=name,
        ours=ours,
        peer=most,
        unit=unit,
        target=target,
        lower_is_better=True,
        note=note,
        details=details or {},
    )


def on_two_cores() -> None:
    """The promise is about two cores, for server and client together; children inherit them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute less: fewer requests, 200 streams for 12 s")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin = Origin.now()
    on_two_cores()
    rows = first_token_rows(100 if options.quick else 400)
    rows += throughput_rows(128, 100, 1) if options.quick else throughput_rows(512, 200, 3)
    rows += memory_rows(200, 4.0, 12.0) if options.quick else memory_rows(1000, 30.0, 120.0)
    print_table(rows, origin, "The gateway over an engine that costs nothing")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
