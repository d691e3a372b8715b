"""What a process of its own gives to an engine that launches kernels from Python, over HTTP: thread against process.

    python bench/engine_process.py [--quick] [--json FILE]

The engine (`launching_engine.py`) holds the interpreter's lock in 80 pieces of a step and gives it up between them, as
launches do; these take 12 of the 15 ms that its device takes for a step. What is above 15 ms between two tokens is
what the server costs. The last rows have an engine that takes no time and launches nothing, one chat at a time: what a
message to another process costs a first token. Client, gateway and engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from gateway import START_WITHIN_S, load, summary_of
from harness import Origin, Row, print_table, write_json

STEP_MS = 15
LAUNCHING, INSTANT = ("80", "150", str(STEP_MS)), ("0", "0", "0")
"""Launches of a step, the lock held for each in microseconds, milliseconds of the device."""
PROGRAM = Path(__file__).parent / "launching_engine.py"


@contextmanager
def serving(step: tuple[str, str, str], mode: str) -> Iterator[str]:
    command = [sys.executable, str(PROGRAM), *step, mode]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        watchdog = threading.Timer(START_WITHIN_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            found = re.search(r"at (http\S+)/v1", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')[-2000:]}")
            watchdog.cancel()
            yield found[1]
        finally:
            watchdog.cancel()
            process.kill()


def loaded(mode: str, streams: int, rounds: int, output_tokens: int) -> dict[str, float]:
    with serving(LAUNCHING, mode) as url:
        uvloop.run(load(url, concurrency=streams, requests=streams, output_tokens=4))
        shape = {"concurrency": streams, "requests": rounds * streams, "output_tokens": output_tokens}
        found = summary_of(uvloop.run(load(url, **shape)))
    assert found.itl_ms is not None and found.ttft_ms is not None
    rate = found.output_tokens_per_s
    return {"rate": rate, "gap": found.itl_ms.p50, "gap_p99": found.itl_ms.p99, "ttft": found.ttft_ms.p50}


def alone(mode: str, repetitions: int) -> dict[str, float]:
    with serving(INSTANT, mode) as url:
        uvloop.run(load(url, concurrency=1, requests=repetitions // 4, output_tokens=4))
        found = summary_of(uvloop.run(load(url, concurrency=1, requests=repetitions, output_tokens=4)))
    assert found.ttft_ms is not None
    return {"ttft": found.ttft_ms.p50, "ttft_p99": found.ttft_ms.p99}


def rows_of(title: str, process: dict[str, float], thread: dict[str, float]) -> list[Row]:
    names = {
        "rate": "streamed tokens",
        "gap": "between tokens, p50",
        "gap_p99": "between tokens, p99",
        "ttft": "first token, p50",
    }
    names["ttft_p99"] = "first token, p99"
    return [
        Row(
            name=f"{title}: {names[name]}",
            ours=process[name],
            peer=thread[name],
            unit="tokens/s" if name == "rate" else "ms",
            target=None,
            lower_is_better=name != "rate",
        )
        for name in process
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 and 256 streams, fewer tokens")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin, rows = Origin.now(), list[Row]()
    for streams in (128, 256) if options.quick else (16, 64, 128, 256):
        sides = {mode: loaded(mode, streams, 1 if options.quick else 2, 150) for mode in ("process", "thread")}
        rows += rows_of(f"{streams} streams, steps of {STEP_MS} ms", **sides)
    sides = {mode: alone(mode, 100 if options.quick else 400) for mode in ("process", "thread")}
    rows += rows_of("no launches, one chat at a time", **sides)
    print_table(rows, origin, "An engine's own process (ours) beside a thread of the server (peer)")
    if options.json:
        write_json(rows, origin, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
