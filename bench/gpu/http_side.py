"""One side of `http_beside.py`: starts a server with random weights and measures it as an HTTP client.

    python3 bench/gpu/http_side.py SIDE SHAPE KIND --folder FOLDER [--batches 1,8,64,256] [--mixed [RATE]] [--json FILE]

SIDE: ours (`tripool serve`) or vllm (its OpenAI server). Requests are streamed completions with token ids as prompts.
`--mixed RATE`: loads are shares of this rate in requests per second; of the server's own closed-loop rate without it.
The client is one process with uvloop. Every row has its processor time and how late its timers were.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from beside_load import (
    AGREE,
    ANSWER_TOKENS,
    DRAIN_S,
    LOADS,
    PROMPT_TOKENS,
    Arrival,
    Report,
    Sizes,
    Stamps,
    endless,
    latencies,
    percentile,
    poisson,
)
from beside_shapes import SHAPES, settings_of, write_tokenizer
from beside_stages import HERE, Place
from beside_vllm import engine_options

from tripool.bench.endpoint import PATHS, ask
from tripool.bench.prompts import Piece
from tripool.bench.run import Measured, Run
from tripool.bench.samples import Sample
from tripool.bench.wire import Address, ExchangeFailed, HttpClient
from tripool.bench.workload import Shot

MODEL = "random"
START_S, STOP_S, LOOK_S = 300.0, 20.0, 0.25
ANSWER_S = 120.0
"""Longest wait for one answer."""
MOST_RATE = 200
"""Requests per second that a closed loop may reach."""


# ---- servers --------------------------------------------------------------------------------------------------------


def ours_command(asked: argparse.Namespace, port: int) -> list[str]:
    sizes = ["--max-running", str(max(asked.in_flight, 4))] + ["--small"] * asked.small
    budget = [] if asked.step_tokens is None else ["--step-tokens", str(asked.step_tokens)]
    return [sys.executable, str(HERE / "http_ours.py"), asked.shape, asked.kind, "--port", str(port), *sizes, *budget]


def vllm_command(asked: argparse.Namespace, port: int, context_tokens: int) -> list[str]:
    """Its defaults, except for the longest context, the number of sequences and the weights."""
    settings = settings_of(asked.shape)
    options = engine_options(settings, asked.kind, asked.in_flight, context_tokens + 64)
    write_tokenizer(Path(options["model"]), settings)
    # Prompts never repeat, so prefix caching stays as it is on both sides.
    del options["skip_tokenizer_init"], options["enable_prefix_caching"]
    options |= {"host": "127.0.0.1", "port": port, "served_model_name": MODEL}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return command


@contextmanager
def serving(command: Sequence[str], environment: dict[str, str], log: Path, port: int) -> Iterator[str]:
    """The server's URL once it answers. It stays in this process's group, which ends with the stage."""
    url, began_s = f"http://127.0.0.1:{port}", time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while not asyncio.run(_answers(url)):
            if process.poll() is not None or time.monotonic() - began_s > START_S:
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                raise SystemExit("\n".join(["the server did not start:", *lines[-25:]]))
            time.sleep(LOOK_S)
        print(f"ready after {time.monotonic() - began_s:.1f} s", flush=True)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait(STOP_S)


async def _answers(url: str) -> bool:
    client = HttpClient(Address.parse(url))
    try:
        status, _ = await ask(client, "GET", "/v1/models")
    except ExchangeFailed:
        return False
    finally:
        client.close()
    return status == 200


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- client ---------------------------------------------------------------------------------------------------------


class Bodies:
    """Bodies of streamed completions, in the place of `tripool.bench`'s own."""

    path = PATHS["completions"]

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    def body(self, shot: Shot) -> bytes:
        arrival = self._arrivals[shot.index]
        return msgspec.json.encode({
            "model": MODEL, "prompt": arrival.prompt, "max_tokens": arrival.num_tokens, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        })  # fmt: skip


class Client:
    """Sends requests and keeps what one run measured, with the client's own cost."""

    def __init__(self, url: str) -> None:
        self._address = Address.parse(url)

    def run(
        self, arrivals: Sequence[Arrival], *, at_once: int | None = None, end_s: float | None = None
    ) -> tuple[Measured, dict[str, Any]]:
        """A closed loop of `at_once` requests, or each one at its time; requests still open at `end_s` are given up."""
        gc.collect()
        gc.disable()  # a pause would be measured as the server's
        try:
            cpu_s = time.process_time()
            measured = uvloop.run(self._run(arrivals, at_once, end_s))
            cpu_s = time.process_time() - cpu_s
        finally:
            gc.enable()
        good = [sample for sample in measured.samples if sample.ok]
        tokens, events = sum(sample.tokens for sample in good), sum(len(sample.events_s) for sample in good)
        return measured, {
            "client_cpu_share": cpu_s / max(measured.duration_s, 1e-9),
            "client_lag_p99_ms": percentile(measured.client_lags_s, 0.99) * 1e3 if measured.client_lags_s else 0.0,
            "tokens_per_event": tokens / max(events, 1),
            "errors": dict(Counter(_kind(one) for one in measured.samples if not one.ok)),
        }

    async def _run(self, arrivals: Sequence[Arrival], at_once: int | None, end_s: float | None) -> Measured:
        client = HttpClient(self._address)
        run = Run(client, Bodies(arrivals), timeout_s=ANSWER_S)  # type: ignore[arg-type, unused-ignore]
        shots = [
            Shot(i, None if at_once else one.at_s, (Piece(one.id, len(one.prompt)),), one.num_tokens)
            for i, one in enumerate(arrivals)
        ]
        if end_s is not None:
            asyncio.get_running_loop().call_later(end_s, run.stop)
        try:
            return await run.go(shots, concurrency=at_once)
        finally:
            client.close()


def _kind(failed: Sample) -> str:
    """What it failed with, without the figures in which one refusal differs from the next."""
    return f"{failed.error}: {re.sub(r'[0-9]+', 'N', failed.detail)}"[:200]


def stamps_of(samples: Sequence[Sample], arrivals: Sequence[Arrival]) -> Stamps:
    stamps = Stamps()
    for sample in samples:
        name = arrivals[sample.index].id
        if sample.events_s:
            stamps.first_s[name], stamps.last_s[name] = sample.events_s[0], sample.events_s[-1]
        stamps.num_tokens[name] = sample.tokens if sample.ok else 0
    return stamps


def batch_row(client: Client, vocab: int, sequences: int, *, small: bool, most: int) -> dict[str, Any]:
    """Equal requests, all sent at once, until two runs take the same time; the fastest run counts."""
    prompt_len, count = (16, 24) if small else (PROMPT_TOKENS, ANSWER_TOKENS)
    generator, rows, spans = random.Random(sequences), list[dict[str, Any]](), list[float]()
    for repetition in range(most + 1):  # the first one warms up
        prompts = (generator.choices(range(vocab), k=prompt_len) for _ in range(sequences))  # never the same twice
        arrivals = [Arrival(str(i), 0.0, prompt, count) for i, prompt in enumerate(prompts)]
        measured, cost = client.run(arrivals, at_once=sequences)
        samples = measured.samples
        assert [sample.tokens for sample in samples] == [count] * sequences, cost["errors"]
        if not repetition:
            continue
        # From the first request sent to the last token received, not to the last connection closed.
        spans.append(max(s.events_s[-1] for s in samples) - min(s.sent_s for s in samples))
        firsts = [sample.events_s[0] - sample.sent_s for sample in samples]
        gaps = [(sample.events_s[-1] - sample.events_s[0]) / (count - 1) for sample in samples]
        rows.append({"tok_s": sequences * count / spans[-1]} | latencies(firsts, gaps) | cost)
        if len(spans) > 1 and abs(spans[-1] / spans[-2] - 1) < AGREE:
            break
    agreed = len(spans) > 1 and abs(spans[-1] / spans[-2] - 1) < AGREE
    best = rows[spans.index(min(spans))]
    return {"work": f"x{sequences}", "sequences": sequences} | best | {"whole_s": spans, "agreed": agreed}


def mixed_rows(client: Client, vocab: int, sizes: Sizes, peer_rate: float | None, report: Report) -> None:
    for seed, seconds in ((0, sizes.warm_s), (1, sizes.closed_s)):
        arrivals = list(itertools.islice(endless(vocab, sizes, seed), round(MOST_RATE * seconds)))
        measured, cost = client.run(arrivals, at_once=sizes.in_flight, end_s=seconds)
    complete = [arrivals[sample.index].id for sample in measured.samples if sample.ok]
    closed = stamps_of(measured.samples, arrivals).closed_row(complete, sizes)
    report.add(closed | cost)
    for seed, load in enumerate(LOADS, 2):
        rate = load * (peer_rate or closed["rate"])
        arrivals = poisson(vocab, sizes, rate, seed)
        measured, cost = client.run(arrivals, end_s=sizes.load_s + DRAIN_S)
        late_ms = percentile([sample.late_s for sample in measured.samples], 0.99) * 1e3
        row = stamps_of(measured.samples, arrivals).open_row(arrivals, load, rate)
        report.add(row | cost | {"client_late_p99_ms": late_ms})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "vllm"))
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=("bf16", "fp8", "int8"))
    parser.add_argument("--folder", type=Path, required=True, help="has vLLM and the logs")
    parser.add_argument("--packages", type=Path, help="packages that our server imports")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--mixed", type=float, nargs="?", const=0.0, metavar="RATE")
    parser.add_argument("--step-tokens", type=int, help="of our server")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes = Sizes.of(quick=asked.quick, small=asked.small)
    asked.in_flight = max([sizes.in_flight, *asked.batches])
    vocab = settings_of(asked.shape, small=asked.small)["vocab_size"]
    report = Report(asked.json, side=asked.side, shape=asked.shape, kind=asked.kind)
    place, port = Place(asked.folder, None, asked.packages), free_port()
    command = ours_command(asked, port) if asked.side == "ours" else vllm_command(asked, port, sizes.context_tokens)
    log = asked.folder / "logs" / f"server-{asked.side}-{asked.shape}-{asked.kind}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with serving(command, place.environment(asked.side), log, port) as url:
        client = Client(url)
        for sequences in asked.batches:
            report.add(batch_row(client, vocab, sequences, small=asked.small, most=2 if asked.quick else 4))
        if asked.mixed is not None:
            mixed_rows(client, vocab, sizes, asked.mixed or None, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
