"""The engine's speed as clients see it: over HTTP, streamed, against the engine alone and the peers' servers.

    python bench/serving.py [--quick] [--json FILE]

| row | promise |
|---|---|
| SmolLM2: colocated server / engine without HTTP, 32 at once | at least 0.92 |
| SmolLM2: split server (prefill, decode and cache as processes) / colocated, 32 at once | at least 0.8 |
| both models, each workload of engine_cpu.py: colocated server / peers' servers | as there |
| 960 of 1,024 tokens known: time to the answer's one token, over HTTP | at most 0.15 of cold |

Workloads and bars are those of engine_cpu.py. Every side gets the same token ids, new ones each time, and takes its
turn while the others idle. The client runs on the same cores. llama.cpp is driven over its own HTTP, vLLM by
`vllm serve`; transformers has no server to compare with.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from engine_cpu import BEST, PREFIX, PREFIX_KNOWN_TOKENS, PREFIX_TARGETS, TARGETS, WARM_UP, WORKLOADS, Workload
from harness import Measured, Origin, Row, WorkerFailed, print_table, take_turns, write_json
from sides import INSTALL, LOGS, MODELS, PEERS_ENV, SIDES, Side, load, peer_settings

START_WITHIN_S, ANSWER_WITHIN_S, STOP_WITHIN_S = 300.0, 300.0, 20.0
COLOCATED, SPLIT, OFFLINE = "colocated", "split", "offline"
SERVE = {COLOCATED: (), SPLIT: ("--prefill", "1", "--decode", "1")}
VLLM = "vllm serve"
HTTP_TARGET, SPLIT_TARGET = 0.92, 0.8
QUICK = ("smollm2 decode", "smollm2 x8", "smollm2 x32")

Rate = Callable[[Workload, int], float]
"""Of one repetition of a workload, in its unit."""


class HttpSide:
    """A server that is up, asked for streamed completions."""

    def __init__(self, url: str, model: str) -> None:
        self._address, self._model = urlsplit(url), model

    def rate(self, workload: Workload, repetition: int) -> float:
        return workload.rate(self.wall_s(workload.prompts(repetition), workload.max_tokens))

    def wall_s(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """All prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            began_s = time.perf_counter()
            counts = list(pool.map(lambda prompt: self._complete(prompt, max_tokens), prompts))
            wall_s = time.perf_counter() - began_s
        if set(counts) != {max_tokens}:
            raise WorkerFailed(f"answers of {sorted(set(counts))} tokens, asked for {max_tokens}")
        return wall_s

    def _complete(self, prompt: list[int], max_tokens: int) -> int:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
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
def ours(name: str, model: str, threads: int) -> Iterator[HttpSide]:
    checkpoint = next(side.model for side in SIDES[model] if side.peer is None)
    command = [sys.executable, "-m", "tripool", "serve", checkpoint, "--port", "0", "--threads", str(threads)]
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
        yield HttpSide(found[1], model)


@contextmanager
def vllm(model: str, threads: int) -> Iterator[HttpSide]:
    program = PEERS_ENV / "bin" / "vllm"
    if not program.exists():
        raise WorkerFailed(f"not installed (run: {INSTALL})")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [f"{name}={value}" for name, value in peer_settings("vllm", threads).items()]
    what = ["serve", str(MODELS / model), "--served-model-name", model, "--port", str(port)]
    how = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "64"]
    how += ["--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(2 * 2**30), "--disable-uvicorn-access-log"]
    with _process(["env", *settings, str(program), *what, *how], VLLM) as process:
        deadline_s = time.monotonic() + START_WITHIN_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise WorkerFailed("vllm serve did not start")
            time.sleep(0.5)
        yield HttpSide(f"http://127.0.0.1:{port}", model)


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


class Bench:
    """One model's servers, all up, measured workload by workload."""

    def __init__(self, model: str, threads: int, stack: ExitStack) -> None:
        self.model, self._threads, self._stack = model, threads, stack
        self.failed: dict[str, str] = {}
        self.sides: dict[str, Rate] = {}
        self.peers = [VLLM, *(side.name for side in SIDES[model] if side.peer == "llama.cpp")]
        self._served: dict[str, HttpSide] = {}
        for side in SIDES[model]:
            if side.peer is None and side.precision == "int8":
                self._start(OFFLINE, lambda side=side: self._worker(side))
            elif side.peer == "llama.cpp":
                self._start(side.name, lambda side=side: self._worker(side))
        for name in SERVE:
            self._start(name, lambda name=name: self._server(name, ours(name, model, threads)))
        self._start(VLLM, lambda: self._server(VLLM, vllm(model, threads)))

    def _start(self, name: str, start: Callable[[], Rate]) -> None:
        tell(f"{self.model}: starting {name}")
        try:
            self.sides[name] = start()
        except WorkerFailed as failure:
            self.failed[name] = str(failure)

    def _server(self, name: str, server: AbstractContextManager[HttpSide]) -> Rate:
        self._served[name] = self._stack.enter_context(server)
        return self._served[name].rate

    def _worker(self, side: Side) -> Rate:
        loaded = load(side, self._threads)
        self._stack.callback(loaded.worker.close)

        def rate(workload: Workload, repetition: int) -> float:
            if repetition == WARM_UP:
                workload.prepare(loaded)
            return workload.measure(loaded, repetition)

        return rate

    def compare(self, workload: Workload, repetitions: int) -> list[Row]:
        tell(f"{self.model}: {workload.name}")
        for name in list(self.sides):
            try:
                self.sides[name](workload, WARM_UP)
            except WorkerFailed as failure:
                self.failed[name] = str(failure)
                del self.sides[name]
        cos_sin = {name: (lambda i, side=side: side(workload, i)) for name, side in self.sides.items()}
        measured = take_turns(cos_sin, repetitions)
        self.failed.update(measured.failed)
        return self._rows(workload, measured)

    def _rows(self, workload: Workload, measured: Measured) -> list[Row]:
        rows = []
        for versus, target in TARGETS["int8", f"{self.model} {workload.name}"].items():
            medians = {peer: measured.median(peer) for peer in self.peers}
            # With one peer missing nobody knows which is best: the row has failed.
            best = None if None in medians.values() else max(self.peers, key=lambda peer: medians[peer] or 0.0)
            rows.append(self._row(workload, measured, COLOCATED, best if versus == BEST else versus, target))
        if (self.model, workload.name) == ("smollm2", "x32"):
            rows.append(self._row(workload, measured, COLOCATED, OFFLINE, HTTP_TARGET))
            rows.append(self._row(workload, measured, SPLIT, COLOCATED, SPLIT_TARGET))
        return rows

    def _row(self, workload: Workload, measured: Measured, ours_: str, peer: str | None, target: float) -> Row:
        told = [f"{side}: {why}" for side, why in self.failed.items() if side in (ours_, peer) or peer is None]
        return Row(
            name=f"{self.model} {workload.name}: {ours_} / {peer or BEST}",
            ours=measured.median(ours_),
            peer=measured.median(peer) if peer else None,
            unit=workload.unit,
            target=target,
            note="; ".join(told),
            details={"samples": {side: measured.samples.get(side, []) for side in measured.samples}},
        )

    def compare_prefix(self, repetitions: int) -> Row:
        """Cold, then the same 960 tokens with another end."""
        server, cold_ms, hit_ms = self._served.get(COLOCATED), [], []
        for repetition in range(repetitions) if server is not None else ():
            (cold,), (other,) = PREFIX.prompts(repetition), PREFIX.prompts(repetition + repetitions)
            cold_ms.append(1e3 * server.wall_s([cold], 1))
            hit_ms.append(1e3 * server.wall_s([cold[:PREFIX_KNOWN_TOKENS] + other[PREFIX_KNOWN_TOKENS:]], 1))
        return Row(
            name=f"{self.model} prefix: colocated, 960 of 1,024 known / cold",
            ours=statistics.median(hit_ms) if hit_ms else None,
            peer=statistics.median(cold_ms) if cold_ms else None,
            unit="ms to first token",
            target=PREFIX_TARGETS["int8"],
            lower_is_better=True,
            note=self.failed.get(COLOCATED, ""),
            details={"samples": {"hit": hit_ms, "cold": cold_ms}},
        )


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="SmolLM2 alone, at 8 and at 32, each side once")
    parser.add_argument("--repetitions", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin, repetitions = Origin.now(), options.repetitions or (1 if options.quick else 3)
    rows: list[Row] = []
    for model in ("smollm2",) if options.quick else SIDES:
        with ExitStack() as stack:
            bench = Bench(model, options.threads, stack)
            for workload in WORKLOADS:
                case = f"{model} {workload.name}"
                if ("int8", case) in TARGETS and (case in QUICK or not options.quick):
                    rows += bench.compare(workload, repetitions)
            if not options.quick and model == "smollm2":
                rows.append(bench.compare_prefix(repetitions + 2))
    print_table(rows, origin, f"Over HTTP: {options.threads} threads, medians of {repetitions}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
