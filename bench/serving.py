"""The engine's speed as clients see it: SmolLM2 over HTTP, streamed, against the engine alone and the peers' servers.

    python bench/serving.py [--quick] [--json FILE]

| row | promise |
|---|---|
| colocated server / engine without HTTP, 32 at once | at least 0.92 |
| split server (prefill, decode and cache as processes) / colocated, 32 at once | at least 0.8 |
| colocated server / best peer's server, 8 and 32 at once | at least 1.6 |

Every side gets the same token ids, 256 in and 64 out, new ones each time, and takes its turn while the others idle.
The client runs on the same cores. llama.cpp is driven over its own HTTP, vLLM by `vllm serve`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from harness import Measured, Origin, Row, WorkerFailed, print_table, take_turns, write_json
from sides import INSTALL, LOGS, MODELS, PEERS_ENV, SIDES, load, peer_settings

PROMPT_TOKENS, ANSWER_TOKENS = 256, 64
START_WITHIN_S, ANSWER_WITHIN_S, STOP_WITHIN_S = 300.0, 300.0, 20.0
COLOCATED, SPLIT, OFFLINE = "colocated", "split", "offline"
SERVE = {COLOCATED: (), SPLIT: ("--prefill", "1", "--decode", "1")}
VLLM = "vllm serve"
TARGETS = {"http": 0.92, "split": 0.8, "peer": 1.6}


def prompts_of(concurrency: int, repetition: int) -> list[list[int]]:
    random = Random(f"serving {concurrency} {repetition}")
    return [[random.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)] for _ in range(concurrency)]


class HttpSide:
    """A server that is up, asked for streamed completions."""

    def __init__(self, url: str, model: str) -> None:
        self._address, self._model = urlsplit(url), model

    def rate(self, prompts: Sequence[list[int]]) -> float:
        """Output tokens over the whole wall, all prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            began_s = time.perf_counter()
            counts = list(pool.map(self._complete, prompts))
            wall_s = time.perf_counter() - began_s
        if set(counts) != {ANSWER_TOKENS}:
            raise WorkerFailed(f"answers of {sorted(set(counts))} tokens, asked for {ANSWER_TOKENS}")
        return sum(counts) / wall_s

    def _complete(self, prompt: list[int]) -> int:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert self._address.hostname is not None
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=ANSWER_WITHIN_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            told = response.read().decode()
        finally:
            connection.close()
        events = [line[6:] for line in told.splitlines() if line.startswith("data: ") and "[DONE]" not in line]
        if response.status != 200 or not events:
            raise WorkerFailed(f"answered {response.status}: {told[:200]}")
        return int(json.loads(events[-1])["usage"]["completion_tokens"])


@contextmanager
def ours(name: str, threads: int) -> Iterator[HttpSide]:
    command = [sys.executable, "-m", "tripool", "serve", "smollm2", "--port", "0", "--threads", str(threads)]
    with _process([*command, *SERVE[name]], name) as process:
        watchdog = threading.Timer(START_WITHIN_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        banner = ""
        while (found := re.search(r"at (http\S+)/v1", banner)) is None:
            line = process.stdout.readline()
            if not line:
                raise WorkerFailed("the server did not start")
            banner += line
        watchdog.cancel()
        yield HttpSide(found[1], "smollm2")


@contextmanager
def vllm(threads: int) -> Iterator[HttpSide]:
    program = PEERS_ENV / "bin" / "vllm"
    if not program.exists():
        raise WorkerFailed(f"not installed (run: {INSTALL})")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [f"{name}={value}" for name, value in peer_settings("vllm", threads).items()]
    model = ["serve", str(MODELS / "smollm2"), "--served-model-name", "smollm2", "--port", str(port)]
    how = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "64"]
    how += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(2 * 2**30), "--disable-uvicorn-access-log"]
    with _process(["env", *settings, str(program), *model, *how], VLLM) as process:
        deadline_s = time.monotonic() + START_WITHIN_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise WorkerFailed("vllm serve did not start")
            time.sleep(0.5)
        yield HttpSide(f"http://127.0.0.1:{port}", "smollm2")


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def _process(command: Sequence[str], name: str) -> Iterator[subprocess.Popen[str]]:
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"serving {name}.log").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        if name == VLLM:  # it talks a lot: somebody must listen
            threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_all(stack: ExitStack, threads: int, failed: dict[str, str]) -> dict[str, Callable[[int, int], float]]:
    """Name -> (concurrency, repetition) -> output tokens per second."""
    sides: dict[str, Callable[[int, int], float]] = {}

    def over_http(name: str, side: Callable[[], object]) -> None:
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            running = stack.enter_context(side())
        except WorkerFailed as failure:
            failed[name] = str(failure)
            return
        sides[name] = lambda concurrency, repetition: running.rate(prompts_of(concurrency, repetition))

    def by_worker(name: str, side) -> None:
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            loaded = load(side, threads)
        except WorkerFailed as failure:
            failed[name] = str(failure)
            return
        stack.callback(loaded.worker.close)

        def rate(concurrency: int, repetition: int) -> float:
            if repetition < 0:
                loaded.prepare(prompts_of(2, repetition), concurrency, PROMPT_TOKENS + ANSWER_TOKENS)
            wall_s = loaded.wall_s(prompts_of(concurrency, repetition), ANSWER_TOKENS)
            return concurrency * ANSWER_TOKENS / wall_s

        sides[name] = rate

    for side in SIDES["smollm2"]:
        if side.peer is None and side.precision == "int8":
            by_worker(OFFLINE, side)
        if side.peer == "llama.cpp":
            by_worker(side.name, side)
    for name in SERVE:
        over_http(name, lambda name=name: ours(name, threads))
    over_http(VLLM, lambda: vllm(threads))
    return sides


def measure(sides, failed: dict[str, str], concurrency: int, repetitions: int) -> Measured:
    print(f"{concurrency} at once", file=sys.stderr, flush=True)
    for name in list(sides):
        try:
            sides[name](concurrency, -1)  # warm-up
        except WorkerFailed as failure:
            failed[name] = str(failure)
            del sides[name]
    turns = {name: (lambda i, side=side: side(concurrency, i)) for name, side in sides.items()}
    measured = take_turns(turns, repetitions)
    failed.update(measured.failed)
    return measured


def row(name: str, measured: Measured, ours_: str, peer: str | None, target: float, failed: dict[str, str]) -> Row:
    told = "; ".join(f"{side}: {why}" for side, why in failed.items() if side in (ours_, peer) or peer is None)
    samples = {side: measured.samples.get(side, []) for side in (ours_, peer) if side}
    return Row(
        name=name,
        ours=measured.median(ours_),
        peer=measured.median(peer) if peer else None,
        unit="tok/s",
        target=target,
        note=told,
        details={"samples": samples},
    )


def rows_of(measured: Measured, concurrency: int, failed: dict[str, str]) -> list[Row]:
    peers = (VLLM, *(side.name for side in SIDES["smollm2"] if side.peer == "llama.cpp"))
    medians = {peer: measured.median(peer) for peer in peers}
    # With one peer missing nobody knows which is best: the row has failed.
    best = None if None in medians.values() else max(peers, key=lambda peer: medians[peer] or 0.0)
    rows = [
        row(f"x{concurrency}: colocated / {best or 'best peer'}", measured, COLOCATED, best, TARGETS["peer"], failed)
    ]
    if concurrency == 32:
        rows.append(row("x32: colocated over HTTP / offline", measured, COLOCATED, OFFLINE, TARGETS["http"], failed))
        rows.append(row("x32: split / colocated", measured, SPLIT, COLOCATED, TARGETS["split"], failed))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each side once")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin, repetitions = Origin.now(), 1 if options.quick else 3
    rows: list[Row] = []
    with ExitStack() as stack:
        failed: dict[str, str] = {}
        sides = start_all(stack, options.threads, failed)
        for concurrency in (8, 32):
            rows += rows_of(measure(sides, failed, concurrency, repetitions), concurrency, failed)
    print_table(rows, origin, f"SmolLM2 over HTTP: {options.threads} threads, medians of {repetitions}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
