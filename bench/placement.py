"""What a coordinator with a standby costs, and what its death costs: a split server of real processes, fake engine.

    python bench/placement.py [--quick] [--json FILE]

| row | promise |
|---|---|
| coordinator killed: the longest pause of any of 16 streams | at most 1.5 s |
| coordinator killed or stopped: streams that were reset, or whose tokens are not those of an undisturbed run | 0 |
| coordinator stopped: the longest pause of any stream | told |
| tokens per second of 32 streams, with a standby / without | at least 0.97 |
| first token of one request at a time, with a standby less without | at most 0.5 ms |

A pause is the time between two tokens of a stream, measured by its client on the same cores. The two servers of a
comparison take turns, each measured while the other idles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Origin, Row, WorkerFailed, print_table, take_turns, write_json

PAUSE_S, LOG_SHARE, LOG_MS = 1.5, 0.97, 0.5
START_S, ANSWER_S, STOP_S = 180.0, 120.0, 20.0
STREAMS, RATE_STREAMS = 16, 32
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}

SERVER = """
import signal, sys
from tripool.config import GatewayConfig
from tripool.serving.split import SplitConfig, build_split
pools, options = SplitConfig(standby=sys.argv[2] == "standby", cache_gb=0), ("--log-level", "error")
with build_split([sys.argv[1]], gateway=GatewayConfig(port=0), pools=pools, child_options=options) as server:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    server.run(lambda: print("ready", server.url, flush=True))
"""


@dataclass
class Stream:
    """What one client had."""

    tokens: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    whole: bool = False

    def pause_s(self, since_s: float) -> float:
        """The longest one that ended after this time."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - max(before, since_s) for before, after in pairs if after > since_s), default=0.0)


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        found = re.match(r"http://([\d.]+):(\d+)", url)
        assert found
        self._address = found[1], int(found[2])

    def pools(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/v1/pools", timeout=ANSWER_S) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def until(self, standbys: int) -> None:
        """All is there: else the next measurement is one of a start."""
        deadline_s = time.monotonic() + START_S
        while (pools := self.pools())["standbys"] != standbys or len(pools["workers"]) != 2 or pools["requests"]:
            if time.monotonic() > deadline_s:
                raise WorkerFailed("a process did not come back")
            time.sleep(0.1)

    async def stream(self, number: int, max_tokens: int) -> Stream:
        """One streamed completion over a connection of its own."""
        one = Stream()
        asked = {"prompt": [5 + number, 6, 7], "stream": True, "ignore_eos": True, "max_tokens": max_tokens, "seed": 1}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    one.whole = True
                elif line.startswith(b"data: {"):
                    one.times_s.append(time.monotonic())
                    one.tokens.append(line.partition(b'"text":')[2].partition(b',"logprobs"')[0].decode())
        except ConnectionError:
            pass
        finally:
            writer.close()
        return one

    async def streams(self, count: int, max_tokens: int) -> list[Stream]:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.gather(*(self.stream(number, max_tokens) for number in range(count)))


@contextmanager
def server(model: str, standby: str) -> Iterator[Server]:
    with subprocess.Popen([sys.executable, "-c", SERVER, model, standby], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready"):
                raise WorkerFailed("the server did not start")
            yield Server(line.split()[1])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- takeovers ------------------------------------------------------------------------------------------------------


async def strike(one: Server, number: signal.Signals, max_tokens: int) -> tuple[list[Stream], float]:
    """Streams, and when their coordinator was struck."""
    leader = one.pools()["coordinator_pid"]
    running = asyncio.ensure_future(one.streams(STREAMS, max_tokens))
    await asyncio.sleep(0.8)
    struck_s = time.monotonic()
    os.kill(leader, number)
    return await running, struck_s


def takeover_rows(repetitions: int) -> Iterator[Row]:
    max_tokens = 150
    with server("fake:step_ms=20", "standby") as one:
        right = asyncio.run(one.streams(STREAMS, max_tokens))
        for name, number in FAULTS.items():
            pauses_s, wrong = [], 0
            for _ in range(repetitions):
                one.until(standbys=1)
                streams, struck_s = asyncio.run(strike(one, number, max_tokens))
                pauses_s.append(max(stream.pause_s(struck_s) for stream in streams))
                pairs = zip(streams, right, strict=True)
                wrong += sum(not a.whole or "".join(a.tokens) != "".join(b.tokens) for a, b in pairs)
            note = f"worst of {STREAMS} streams, {repetitions} times: {', '.join(f'{s:.2f}' for s in pauses_s)}"
            target = 1.0 if name == "killed" else None
            yield limit(f"coordinator {name}: longest pause", max(pauses_s), PAUSE_S, "s", target, note)
            yield limit(f"coordinator {name}: streams reset or changed", wrong, 1, "streams", 0.0)


# ---- the log --------------------------------------------------------------------------------------------------------


def log_rows(repetitions: int) -> Iterator[Row]:
    with server("fake:step_ms=2", "standby") as followed, server("fake:step_ms=2", "none") as alone:
        sides = {"standby": followed, "none": alone}
        followed.until(standbys=1)
        alone.until(standbys=0)

        def tokens_per_s(one: Server) -> float:
            began_s = time.monotonic()
            streams = asyncio.run(one.streams(RATE_STREAMS, 200))
            return sum(len(stream.tokens) for stream in streams) / (time.monotonic() - began_s)

        def first_ms(one: Server) -> float:
            async def ask() -> float:
                began_s = time.monotonic()
                return 1e3 * ((await one.stream(1, 1)).times_s[0] - began_s)

            return statistics.median(asyncio.run(ask()) for _ in range(30))

        rates = take_turns({name: lambda _, one=one: tokens_per_s(one) for name, one in sides.items()}, repetitions)
        firsts = take_turns({name: lambda _, one=one: first_ms(one) for name, one in sides.items()}, repetitions)
    ours, peer = rates.median("standby"), rates.median("none")
    yield Row(name="the log: tokens with a standby", ours=ours, peer=peer, unit="tokens/s", target=LOG_SHARE)
    with_ms, without_ms = firsts.median("standby"), firsts.median("none")
    if with_ms is not None and without_ms is not None:
        note = f"{with_ms:.2f} ms with a standby, {without_ms:.2f} ms without"
        yield limit("the log: added to the first token", with_ms - without_ms, LOG_MS, "ms", 1.0, note)


def limit(name: str, ours: float, most: float, unit: str, target: float | None, note: str = "") -> Row:
    return Row(name=name, ours=ours, peer=most, unit=unit, target=target, lower_is_better=True, note=note)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once, each comparison in two turns")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.now()
    rows = [*takeover_rows(1 if options.quick else 5), *log_rows(2 if options.quick else 7)]
    print_table(rows, origin, "Placement: a coordinator and its standby")
    if options.json is not None:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
