"""Ranks that die while they serve, and experts that move: how long answers stall, how soon a rank is there again, how
level the load is.

    python bench/experts_ranks.py [--quick] [--json FILE]

A server of the bundled model with one decode instance of two ranks, as `tripool serve --decode 1x2` starts it. Two
streams run, one on each rank.

- First nothing is killed, and in turns moves are held or experts move after the load, as the supervisor, which runs in
  this process, has it. A gap between two pieces of a stream counts as one while experts move if a replica was copied
  within half a second of it; the others are calm.
- In the second half of the turns in which experts move it is counted how many rows each expert is routed and how many
  each rank is sent, by layer. The busiest rank over the mean, by the rows sent, stands beside `least_imbalance` of the
  rows routed: below that no placement in those slots comes, also one that had known them.
- Then one rank is killed in the middle, in turns. A stall is the longest gap of a stream that begins within 300 ms of
  the kill, client and gateway included. Which stream was on which rank is not asked: the shorter of the two stalls is
  taken for the survivor's, so that row is a lower bound where a stream of the killed rank resumes sooner. Re-entry is
  the time from the kill until the expert map names the rank again, mostly by a standby process; gaps from the end of
  the stall until half a second after re-entry are those while a rank comes back.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import numpy.typing as npt

from harness import Origin, Row, print_table, write_json
from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.control.instance import Instance, slabs_file
from tripool.experts import least_imbalance
from tripool.experts.exchange import SharedView
from tripool.experts.slabs import attach_slabs
from tripool.serving import AccessConfig, build_split
from tripool.serving.split import SplitConfig

STALL_MS, REENTRY_S, UNDISTURBED, NEAR_BEST = 150.0, 2.0, 1.2, 1.03
WITHIN_S, LOOK_S = 120.0, 0.02
MAX_TOKENS, KILL_AT, STALL_S, AROUND_S = 900, 60, 0.3, 0.5
RANKS, SLOTS = 2, 18
"""Of a rank: 16 experts and, as `experts/balancer.py` has it, one spare slot for every eight."""
CALM_S = 11.0
"""Between two kills: a rank that dies sooner again is started later, and the next standby needs some seconds."""


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

    def gaps(self) -> list[tuple[float, float]]:
        """(when it began, seconds) of each."""
        return [(a, b - a) for a, b in pairwise(self.arrived)]

    def longest_gap_s(self, since_s: float) -> float:
        return max(
            (gap for began, gap in self.gaps() if since_s <= began + gap and began <= since_s + STALL_S), default=0
        )


class Bench:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=WITHIN_S)
        self._url = url
        self._killed_s = 0.0
        self.calm: list[float] = []
        """Gaps while nothing happens, in seconds."""
        self.moving: list[float] = []
        self.returning: list[float] = []
        self.kills: list[tuple[float, float, float]] = []
        """Seconds: gap of the survivor's stream, gap of the other, re-entry."""

    def pools(self) -> dict[str, Any]:
        return self._http.get("/v1/pools").raise_for_status().json()

    def wait(self, what: Any) -> float:
        deadline_s = time.monotonic() + WITHIN_S
        while not what(self.pools()):
            assert time.monotonic() < deadline_s
            time.sleep(LOOK_S)
        return time.monotonic()

    def streams(self, number: int) -> list[Stream]:
        started = [Stream(self._url, 2 * number + i) for i in range(RANKS)]
        for stream in started:
            stream.start()
        return started

    def move(self, rounds: int) -> tuple[npt.NDArray[np.float64], int]:
        """Streams after streams. In the second half of them, by layer: busiest rank over mean, over the bound; and how
        many rows that was measured by."""
        folder = Path(self.pools()["join"].removeprefix("ipc://")).parent
        view = SharedView(*attach_slabs(slabs_file(folder, "decode-0")))
        self.watch(view, 1000)  # nobody is slow because it is the first
        self.moving.clear()
        self.calm.clear()
        sums = [np.zeros_like(rows) for rows in counted(view)]
        for number in range(rounds):
            with moves_held():
                self.watch(view, 1001 + 2 * number)
            before = counted(view)
            self.watch(view, 1002 + 2 * number)
            if number >= rounds // 2:
                for total, now, early in zip(sums, counted(view), before, strict=True):
                    total += now - early
        routed, sent = sums
        busiest = sent.max(axis=1) / sent.mean(axis=1)
        return busiest / least_imbalance(routed, [SLOTS] * RANKS), int(routed[0].sum())

    def watch(self, view: SharedView, number: int) -> None:
        """Both streams; their gaps."""
        copied, streams, copies = list[float](), self.streams(number), int(view.copies[0])
        while any(stream.is_alive() for stream in streams):
            if int(view.copies[0]) != copies:
                copied.append(time.monotonic())
                copies = int(view.copies[0])
            time.sleep(0.005)
        for began, gap in (one for stream in streams for one in stream.gaps()):
            near = any(began - AROUND_S <= at <= began + gap + AROUND_S for at in copied)
            (self.moving if near else self.calm).append(gap)

    def kill(self, number: int) -> None:
        rank = number % RANKS
        time.sleep(max(0.0, self._killed_s + CALM_S - time.monotonic()))
        streams = self.streams(number)
        while min(len(stream.arrived) for stream in streams) < KILL_AT:
            time.sleep(0.001)
        pid = next(w["pid"] for w in self.pools()["workers"] if w["worker"] == f"decode-0-r{rank}")
        os.kill(pid, signal.SIGKILL)
        self._killed_s = killed_s = time.monotonic()
        self.wait(lambda pools: not pools["instances"][0]["ranks"][rank]["present"])
        there_s = self.wait(lambda pools: pools["instances"][0]["ranks"][rank]["present"])
        for stream in streams:
            stream.join(WITHIN_S)
            assert len(stream.arrived) >= KILL_AT
        survivor_s, lost_s = sorted(stream.longest_gap_s(killed_s) for stream in streams)
        self.kills.append((survivor_s, lost_s, there_s - killed_s))
        for began, gap in (one for stream in streams for one in stream.gaps()):
            if killed_s + STALL_S < began < there_s + AROUND_S:
                self.returning.append(gap)


@contextmanager
def moves_held() -> Iterator[None]:
    with patch.object(Instance, "balance", lambda instance: False):
        yield


def counted(view: SharedView) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows so far: routed to each expert, sent to each rank; by layer."""
    routed = sum(view.routed(rank).astype(np.int64) for rank in range(RANKS))
    return np.asarray(routed), np.stack([view.assigned(layer) for layer in range(view.layout.layers)])


def p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else float("nan")


def limit(name: str, ours: float, most: float | None, unit: str, note: str) -> Row:
    target = None if most is None else 1.0
    return Row(name=name, ours=ours, peer=most or ours, unit=unit, target=target, lower_is_better=True, note=note)


def disturbed(when: str, gaps: Sequence[float], calm: Sequence[float]) -> Row:
    """p99 of the gaps, over that of calm ones; without enough of either there is no verdict."""
    few = min(len(gaps), len(calm)) < 100
    note = f"p99 {1e3 * p99(gaps):.1f} ms of {len(gaps)}, calm {1e3 * p99(calm):.1f} ms of {len(calm)}"
    ratio = float("nan") if few else p99(gaps) / p99(calm)
    return limit(f"p99 of a stream's gaps {when}, over calm ones", ratio, None if few else UNDISTURBED, "x", note)


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
            level, num_rows = bench.move(4 if options.quick else 16)
            for number in range(count):
                bench.kill(number)
    survivors, lost, reentry = (sorted(column) for column in zip(*bench.kills, strict=True))
    stall = survivors[min(count - 1, round(0.99 * (count - 1)))]
    longest = ", ".join(f"{1e3 * gap_s:.0f}" for gap_s in reversed(survivors[-4:]))
    note = f"{count} kills; median {1e3 * statistics.median(survivors):.0f} ms, longest {longest}"
    rows = [
        limit("longest gap of a stream on the rank that is left, p99", 1e3 * stall, STALL_MS, "ms", note),
        limit("longest gap of a stream whose rank died, median", 1e3 * statistics.median(lost), None, "ms", ""),
        limit("the rank is in the map again, median", statistics.median(reentry), REENTRY_S, "s", "mostly a standby"),
        disturbed("while experts move", bench.moving, bench.calm),
        disturbed("while a rank comes back", bench.returning, bench.calm),
        limit(
            "busiest rank / mean in serving, over the bound",
            float(level.mean()),
            NEAR_BEST,
            "x",
            f"mean of {len(level)} layers, worst {level.max():.3f}; {num_rows} rows a layer",
        ),
    ]
    print_table(rows, origin, "ranks that die, tiny, 1 prefill and 1x2 decode")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
