"""What a coordinator with a standby costs, and what deaths of it and of a gateway cost: a split server of real
processes over the fake engine.

    python bench/placement.py [--quick] [--json FILE]

| row | promise |
|---|---|
| coordinator killed: the longest pause of any of 16 streams | at most 1.5 s |
| coordinator killed or stopped: streams that were reset, or whose tokens are not those of an undisturbed run | 0 |
| coordinator stopped: the longest pause of any stream | told |
| one of two gateways killed: from its death to the first token of a stream that its client has resumed | at most 2 s |
| the only gateway killed: the same | told |
| gateway killed: streams without their end, or whose tokens are not those of an undisturbed run | 0 |
| tokens per second of 32 streams, with a standby / without | at least 0.97 |
| the same where every stream has an idempotency key, and its tokens are in the log | at least 0.97 |
| first token of one request at a time, with a standby less without | at most 0.5 ms |
| tokens per second and first token with an idempotency key, beside those without | told |

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from harness import Origin, Row, WorkerFailed, print_table, take_turns, write_json

PAUSE_S, RESUMED_S, LOG_SHARE, LOG_MS = 1.5, 2.0, 0.97, 0.5
AGAIN_S = 0.02
"""Until a client whose stream was cut off asks again."""
START_S, ANSWER_S, STOP_S = 180.0, 120.0, 20.0
STREAMS, RATE_STREAMS = 16, 32
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}

SERVER = """
import signal, sys
from tripool.config import GatewayConfig
from tripool.serving.split import SplitConfig, build_split
options = ("--log-level", "error")
pools = SplitConfig(standby=sys.argv[2] == "standby", cache_gb=0, gateways=int(sys.argv[3]))
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
    resumed_s: list[float] = field(default_factory=list)
    """When it had its first token after each time that it was cut off."""

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

    def gateways(self) -> list[int]:
        """Their processes, the one with most connections first."""
        folder = self.pools()["join"].removeprefix("ipc://").rpartition("/")[0].encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if b"gateway" in words and folder in words:
                    found.append((len(list((entry / "fd").iterdir())), int(entry.name)))
        return [pid for _, pid in sorted(found, reverse=True)]

    def until(self, standbys: int) -> None:
        """All is there: else the next measurement is one of a start."""
        deadline_s = time.monotonic() + START_S
        while (pools := self.pools())["standbys"] != standbys or len(pools["workers"]) != 2 or pools["requests"]:
            if time.monotonic() > deadline_s:
                raise WorkerFailed("a process did not come back")
            time.sleep(0.1)

    async def stream(self, number: int, max_tokens: int, key: str = "") -> Stream:
        """One streamed completion over a connection of its own. With a key it is resumed until it is whole."""
        one, last = Stream(), ""
        asked = {"prompt": [5 + number, 6, 7], "stream": True, "ignore_eos": True, "max_tokens": max_tokens, "seed": 1}
        body = json.dumps(asked).encode()
        while True:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            head += f"idempotency-key: {key}\r\n" if key else ""
            head += f"last-event-id: {last}\r\n" if last else ""
            last = await self._read(one, head.encode() + b"content-type: application/json\r\n", body) or last
            if one.whole or not key:
                return one
            await asyncio.sleep(AGAIN_S)

    async def _read(self, one: Stream, head: bytes, body: bytes) -> str:
        """The id of the last event."""
        last, text, fresh = "", "", bool(one.tokens)
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return last
        try:
            writer.write(head + b"connection: close\r\n\r\n" + body)
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    one.whole = True
                elif line.startswith(b"data: {"):
                    text = line.partition(b'"text":')[2].partition(b',"logprobs"')[0].decode()
                elif line.startswith(b"id: "):
                    event_id = line.removeprefix(b"id: ").strip().decode()
                elif text and line == b"\n":
                    one.times_s.append(time.monotonic())
                    one.tokens.append(text)
                    if fresh:
                        one.resumed_s.append(one.times_s[-1])
                        fresh = False
                    last, text = (event_id if b"idempotency" in head else ""), ""
        except ConnectionError:
            pass
        finally:
            writer.close()
        return last

    async def streams(self, count: int, max_tokens: int, keys: str = "") -> list[Stream]:
        """`keys`: what their idempotency keys begin with."""
        async with asyncio.timeout(ANSWER_S):
            each = (self.stream(n, max_tokens, keys and f"{keys}-{n}") for n in range(count))
            return await asyncio.gather(*each)


@contextmanager
def server(model: str, standby: str, gateways: int = 1) -> Iterator[Server]:
    argv = [sys.executable, "-c", SERVER, model, standby, str(gateways)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
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


# ---- gateways -------------------------------------------------------------------------------------------------------


async def strike_gateway(one: Server, keys: str, max_tokens: int) -> tuple[list[Stream], float]:
    """Streams, and when the gateway of most of them was killed."""
    running = asyncio.ensure_future(one.streams(STREAMS, max_tokens, keys))
    await asyncio.sleep(0.8)
    victim = one.gateways()[0]
    struck_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return await running, struck_s


def gateway_rows(repetitions: int) -> Iterator[Row]:
    max_tokens = 150
    for gateways, name in ((2, "one of two gateways"), (1, "the only gateway")):
        with server("fake:step_ms=20", "standby", gateways) as one:
            right = asyncio.run(one.streams(STREAMS, max_tokens))
            resumed_s, wrong, cut = [], 0, 0
            for number in range(repetitions):
                one.until(standbys=1)
                streams, struck_s = asyncio.run(strike_gateway(one, f"run-{number}", max_tokens))
                times_s = [stream.resumed_s[0] - struck_s for stream in streams if stream.resumed_s]
                cut += len(times_s)
                resumed_s.append(max(times_s))
                pairs = zip(streams, right, strict=True)
                wrong += sum(not a.whole or a.tokens != b.tokens for a, b in pairs)
            note = f"worst of {cut} streams in {repetitions} times: {', '.join(f'{s:.2f}' for s in resumed_s)}"
            target = 1.0 if gateways > 1 else None
            yield limit(f"{name} killed: first token of a resumed stream", max(resumed_s), RESUMED_S, "s", target, note)
            yield limit(f"{name} killed: streams without their end, or changed", wrong, 1, "streams", 0.0)


# ---- the log --------------------------------------------------------------------------------------------------------


def log_rows(repetitions: int) -> Iterator[Row]:
    numbers = count()
    with server("fake:step_ms=2", "standby") as followed, server("fake:step_ms=2", "none") as alone:
        sides = {"standby": followed, "none": alone}
        followed.until(standbys=1)
        alone.until(standbys=0)

        def tokens_per_s(one: Server, keyed: bool = False) -> float:
            keys, began_s = f"rate-{next(numbers)}" if keyed else "", time.monotonic()
            streams = asyncio.run(one.streams(RATE_STREAMS, 200, keys))
            return sum(len(stream.tokens) for stream in streams) / (time.monotonic() - began_s)

        def first_ms(one: Server, keyed: bool = False) -> float:
            async def ask() -> float:
                key, began_s = f"first-{next(numbers)}" if keyed else "", time.monotonic()
                return 1e3 * ((await one.stream(1, 1, key)).times_s[0] - began_s)

            return statistics.median(asyncio.run(ask()) for _ in range(30))

        def turns(measure: Callable[[Server, bool], float]) -> dict[str, float]:
            calls = {
                f"{name}{', keyed' * keyed}": lambda _, one=one, keyed=keyed: measure(one, keyed)
                for name, one in sides.items()
                for keyed in (False, True)
            }
            taken = take_turns(calls, repetitions)
            return {name: taken.median(name) or 0.0 for name in calls}

        rates, firsts = turns(tokens_per_s), turns(first_ms)
    for what in ("", ", keyed"):
        ours, peer = rates[f"standby{what}"], rates[f"none{what}"]
        yield Row(name=f"the log: tokens with a standby{what}", ours=ours, peer=peer, unit="tokens/s", target=LOG_SHARE)
        with_ms, without_ms = firsts[f"standby{what}"], firsts[f"none{what}"]
        note = f"{with_ms:.2f} ms with a standby, {without_ms:.2f} ms without"
        yield limit(f"the log: added to the first token{what}", with_ms - without_ms, LOG_MS, "ms", 1.0, note)
    name, note = (
        "an idempotency key: tokens with / without",
        f"first token {firsts['standby, keyed']:.2f} ms with a key",
    )
    yield Row(name=name, ours=rates["standby, keyed"], peer=rates["standby"], unit="tokens/s", note=note)


def limit(name: str, ours: float, most: float, unit: str, target: float | None, note: str = "") -> Row:
    return Row(name=name, ours=ours, peer=most, unit=unit, target=target, lower_is_better=True, note=note)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each fault once, each comparison in two turns")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.now()
    few = 1 if options.quick else 5
    rows = [*takeover_rows(few), *gateway_rows(few), *log_rows(2 if options.quick else 7)]
    print_table(rows, origin, "Placement: gateways, a coordinator and its standby")
    if options.json is not None:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
