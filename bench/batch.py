"""Batches beside their two limits: the engine's own offline rate, and online requests that must not notice them.

The model is SmolLM2: a token of the bundled one takes half a millisecond, about what the gateway needs for it.

    python bench/batch.py [--quick] [--json FILE]

- offline: the lines of a file through `/v1/batches`, against the same prompts through `LLM.chat` in another process, in
  turns. From the moment a batch is created until its output is there.
- online: Poisson arrivals at 30 % of what it serves, with and without a batch beside them, in turns:
  time per token, answers within their objectives, and how busy the cores are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from gateway import serving
from harness import Origin, Row, print_table, take_turns, write_json

SERVER = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
CHAT, MODEL = "/v1/chat/completions", "smollm2"
MAX_TOKENS = 24
TTFT_MS, TPOT_MS = 500.0, 50.0
WAIT_S = 1800.0
LAST = 200
"""Lines before the end from which a batch is looked at often."""


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    words = ["cat", "river", "bread", "moon", "garden", "train", "winter", "letter", "island", "music"]
    return [
        {
            "messages": [{"role": "user", "content": f"Tell me about {' and '.join(rng.sample(words, 3))} ({n})."}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        for n in range(count)
    ]


def create(client: httpx.Client, asked: list[dict[str, Any]]) -> str:
    rows = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(asked)]
    text = "\n".join(map(json.dumps, rows)).encode()
    made = client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
    body = {"input_file_id": made.raise_for_status().json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


def wait(client: httpx.Client, batch_id: str) -> None:
    """Looks seldom until the end is near: a look costs milliseconds of the cores that are measured here. Answers come
    in groups, of lines that began together, so what the first ones say of the end is wrong by far."""
    began_s = time.monotonic()
    while (spent_s := time.monotonic() - began_s) < WAIT_S:
        batch = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        counts = batch["request_counts"]
        if batch["status"] == "completed":
            assert counts["failed"] == 0, batch
            return
        is_near = counts["completed"] >= counts["total"] - LAST
        left_s = spent_s * (counts["total"] / counts["completed"] - 1) if counts["completed"] and not is_near else 0.0
        time.sleep(max(min(left_s, spent_s) / 4, 0.05))
    raise SystemExit("the batch did not end")


OFFLINE = """
import json, sys, time
from tripool import LLM, SamplingParams
with LLM("smollm2") as llm:
    params = SamplingParams(temperature=0, max_tokens=%d, ignore_eos=True)
    for line in sys.stdin:
        talks = [body["messages"] for body in json.loads(line)]
        began_s = time.perf_counter()
        llm.chat(talks, params)
        print(time.perf_counter() - began_s, flush=True)
"""


def offline_row(url: str, count: int, repetitions: int) -> Row:

    command = [sys.executable, "-c", OFFLINE % MAX_TOKENS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as offline:
        assert offline.stdin is not None and offline.stdout is not None

        def alone(turn: int) -> float:
            offline.stdin.write(json.dumps(questions(count, turn)) + "\n")
            offline.stdin.flush()
            return count / float(offline.stdout.readline())

        def batch(turn: int) -> float:
            asked = questions(count, 1000 + turn)
            with httpx.Client(base_url=url, timeout=60.0) as client:  # made before: it costs tens of milliseconds
                began_s = time.perf_counter()
                wait(client, create(client, asked))
                return count / (time.perf_counter() - began_s)

        measured = take_turns({"ours": batch, "peer": alone}, repetitions)
        offline.stdin.close()
    ours, peer = measured.median("ours"), measured.median("peer")
    return Row(
        name=f"batch of {count:,} lines", ours=ours, peer=peer, unit="lines/s", target=0.95,
        note="peer: LLM.chat offline", details={"samples": measured.samples},
    )  # fmt: skip


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds to the first token, and per token after it."""
    began_s, times = time.perf_counter(), list[float]()
    async with client.stream("POST", CHAT, json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return 1000 * (times[0] - began_s), 1000 * (times[-1] - times[0]) / max(1, len(times) - 1)


async def traffic(url: str, rate: float, span_s: float, seed: int) -> list[tuple[float, float]]:
    rng, began_s, tasks = random.Random(seed), time.perf_counter(), list[asyncio.Task[tuple[float, float]]]()
    asked = iter(questions(100_000, seed))
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < span_s:
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(one(client, next(asked))))
        return list(await asyncio.gather(*tasks))


def busy_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def online_rows(url: str, pid: int, span_s: float, repetitions: int) -> list[Row]:
    began_s = time.perf_counter()
    for n in range(5):
        asyncio.run(traffic(url, 2.0, 1.0, n))
    alone = asyncio.run(traffic(url, 1.0, 4.0, 77))
    served_s = statistics.median(ttft + tpot * MAX_TOKENS for ttft, tpot in alone) / 1000
    rate, samples, used = 0.3 / served_s, {"with": [], "without": []}, list[float]()
    for turn in range(repetitions):
        samples["without"] += asyncio.run(traffic(url, rate, span_s, 100 + turn))
        with httpx.Client(base_url=url, timeout=60.0) as client:
            batch = create(client, questions(100_000 // 4, turn))
            before, began_s = busy_s(pid), time.perf_counter()
            samples["with"] += asyncio.run(traffic(url, rate, span_s, 200 + turn))
            cores = min(2, len(os.sched_getaffinity(0)))
            used.append((busy_s(pid) - before) / (time.perf_counter() - began_s) / cores)
            client.post(f"/v1/batches/{batch}/cancel").raise_for_status()

    def p50(side: str) -> float:
        return statistics.median(tpot for _, tpot in samples[side])

    def kept(side: str) -> float:
        return 100 * statistics.mean(ttft <= TTFT_MS and tpot <= TPOT_MS for ttft, tpot in samples[side])

    return [
        Row(
            name="online p50 TPOT beside a batch",
            ours=p50("with"),
            peer=p50("without"),
            unit="ms",
            target=1.05,
            lower_is_better=True,
            note="peer: without a batch",
        ),
        Row(name="objectives kept beside a batch", ours=kept("with"), peer=kept("without"), unit="%", target=0.99),
        Row(name="cores busy with a batch", ours=100 * statistics.median(used), peer=100.0, unit="%", target=0.90),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="960 lines and 20 s of traffic")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin = Origin.now()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(SERVER, "serve", MODEL, "--port", "0", "--batch-dir", folder) as server,
    ):
        rows = [offline_row(server.url, 960, 2) if options.quick else offline_row(server.url, 10_000, 1)]
        rows += online_rows(server.url, server.pid, *((20.0, 1) if options.quick else (40.0, 2)))
    print_table(rows, origin, "Batches")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
