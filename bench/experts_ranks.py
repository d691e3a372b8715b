"""Ranks that die while they serve: how long the other ranks' answers stall, and how soon the rank is there again.

    python bench/experts_ranks.py [--quick] [--json FILE]

A server of the bundled model with one decode instance of two ranks, as `tripool serve --decode 1x2` starts it. Two
streams run, one on each rank; one rank is killed in the middle, in turns. A stall is the longest gap between two tokens
of a stream after the kill, client and gateway included. Which stream was on which rank is not asked: the shorter of the
two stalls is taken for the survivor's, so that row is a lower bound where a stream of the killed rank resumes sooner.
Re-entry is the time from the kill until the expert map names the rank again, mostly by a standby process.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from harness import Origin, Row, print_table, write_json
from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.serving import AccessConfig, build_split
from tripool.serving.split import SplitConfig

STALL_MS, REENTRY_S = 150.0, 2.0
WITHIN_S, LOOK_S = 120.0, 0.02
MAX_TOKENS, KILL_AT = 400, 60
CALM_S = 11.0
"""Between two kills of one rank: a rank that dies sooner again is started later."""


class Stream(threading.Thread):
    """One client: notes when each token came."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._seed = url, seed
        self.arrived: list[float] = []

    def run(self) -> None:
        body = {"prompt": f"Story {self._seed}", "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": self._seed}
        body |= {"stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=WITHIN_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and '"token_ids":[' in line.replace(" ", ""):
                    self.arrived.append(time.monotonic())

    def longest_gap_s(self, since_s: float) -> float:
        times = [t for t in self.arrived if t < since_s][-1:] + [t for t in self.arrived if t >= since_s]
        return max(b - a for a, b in pairwise(times))


class Bench:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=WITHIN_S)
        self._url = url
        self._killed_s = [0.0, 0.0]

    def pools(self) -> dict[str, Any]:
        return self._http.get("/v1/pools").raise_for_status().json()

    def wait(self, what: Any) -> float:
        deadline_s = time.monotonic() + WITHIN_S
        while not what(self.pools()):
            assert time.monotonic() < deadline_s
            time.sleep(LOOK_S)
        return time.monotonic()

    def kill(self, number: int) -> tuple[float, float, float]:
        """Seconds: gap of the survivor's stream, gap of the other, re-entry."""
        rank = number % 2
        time.sleep(max(0.0, self._killed_s[rank] + CALM_S - time.monotonic()))
        streams = [Stream(self._url, 2 * number + i) for i in range(2)]
        for stream in streams:
            stream.start()
        while min(len(stream.arrived) for stream in streams) < KILL_AT:
            time.sleep(0.001)
        pid = next(w["pid"] for w in self.pools()["workers"] if w["worker"] == f"decode-0-r{rank}")
        os.kill(pid, signal.SIGKILL)
        self._killed_s[rank] = killed_s = time.monotonic()
        self.wait(lambda pools: not pools["instances"][0]["ranks"][rank]["present"])
        there_s = self.wait(lambda pools: pools["instances"][0]["ranks"][rank]["present"])
        for stream in streams:
            stream.join(WITHIN_S)
            assert len(stream.arrived) >= KILL_AT
        survivor_s, lost_s = sorted(stream.longest_gap_s(killed_s) for stream in streams)
        return survivor_s, lost_s, there_s - killed_s


def limit(name: str, ours: float, most: float | None, unit: str, note: str) -> Row:
    target = None if most is None else 1.0
    return Row(name=name, ours=ours, peer=most or ours, unit=unit, target=target, lower_is_better=True, note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 kills instead of 50")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin, count = Origin.now(), 6 if options.quick else 50
    config, pools = EngineConfig(threads=1, kv_gb=0.05), SplitConfig(decode=PoolSize.parse("1x2"))
    with tempfile.TemporaryDirectory() as folder:
        access = AccessConfig(Path(folder) / "keys", open=True)
        built = build_split(["tiny"], config, GatewayConfig(port=0), pools=pools, access=access)
        with built as server, server.running():
            bench = Bench(server.url)
            bench.wait(lambda found: len(found["workers"]) == 3)
            kills = [bench.kill(number) for number in range(count)]
    survivors, lost, reentry = (sorted(column) for column in zip(*kills, strict=True))
    p99 = survivors[min(count - 1, round(0.99 * (count - 1)))]
    note = f"{count} kills; median {1e3 * statistics.median(survivors):.0f} ms"
    rows = [
        limit("longest gap of a stream on the rank that is left, p99", 1e3 * p99, STALL_MS, "ms", note),
        limit("longest gap of a stream whose rank died, median", 1e3 * statistics.median(lost), None, "ms", ""),
        limit("the rank is in the map again, median", statistics.median(reentry), REENTRY_S, "s", "mostly a standby"),
    ]
    print_table(rows, origin, "ranks that die, tiny, 1 prefill and 1x2 decode")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
