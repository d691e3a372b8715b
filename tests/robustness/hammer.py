"""Sends random requests to a real server, many at once, and says what came of them. Nothing may fall.

    .venv/bin/python tests/robustness/hammer.py --mode split --requests 20000 --grammars 5000 --seed 1

Every answer must be an answer, or a refusal that says why; none may be a 500, in a stream or before it. Afterwards
every process is the one that it was, nothing is held, and a plain question is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx

if __name__ == "__main__":  # run by hand: as pytest would find its own modules
    sys.path.insert(0, str(Path(__file__).parent.parent))

from robustness.random_grammars import random_grammar
from robustness.random_requests import CHAT, MESSAGES, Asked, random_request

Mode = Literal["colocated", "split"]

START = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
START_S = 300.0
ANSWER_S = 300.0
AT_ONCE = 24
_REASONS = {"grammar_trial_failed"}
"""Codes of refusals with 503 that a busy machine may give; all others of 500 and above are harm."""


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why requests were refused, in the server's words."""
    harm: list[str] = field(default_factory=list)

    def render(self) -> str:
        rows = [f"{count:7,}  {what}" for what, count in self.counts.most_common()]
        reasons = [f"{count:7,}      {why}" for why, count in self.reasons.most_common(15)]
        return "\n".join([*rows, *reasons, f"{len(self.harm):7,}  harmful", *self.harm[:20]])


class Server:
    """A server as its user starts it, and all that it says about itself."""

    def __init__(self, process: subprocess.Popen[str], url: str, mode: Mode) -> None:
        self.process, self.url, self._mode = process, url, mode
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    def worker_ids(self) -> list[tuple[str, int, int]]:
        """Of the workers; those of a server in one process are that process."""
        if self._mode == "colocated":
            return [("server", self.process.pid, 0)]
        workers = httpx.get(f"{self.url}/v1/pools", timeout=ANSWER_S).raise_for_status().json()["workers"]
        return sorted((worker["worker"], worker["pid"], worker["epoch"]) for worker in workers)

    def wait_idle(self) -> None:
        """Nothing runs and nothing is held any more."""
        deadline_s = time.monotonic() + ANSWER_S
        while not self._idle():
            assert time.monotonic() < deadline_s, "something is still held"
            threading.Event().wait(0.05)

    def _idle(self) -> bool:
        load = httpx.get(f"{self.url}/load", timeout=ANSWER_S).json()
        if load["server_load"] or load["running"] or load["waiting"]:
            return False
        if self._mode == "colocated":
            return bool(load["kv_usage"] == 0.0)
        pools = httpx.get(f"{self.url}/v1/pools", timeout=ANSWER_S).json()
        return all(worker["blocks_held"] == worker["placed"] == 0 for worker in pools["workers"])


@contextmanager
def serving(model: str, mode: Mode) -> Iterator[Server]:
    argv = ["serve", model, "--port", "0", *(["--split"] if mode == "split" else [])]
    with subprocess.Popen(
        [sys.executable, "-c", START, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(START_S, process.kill)  # so that the read below cannot last for ever
        watchdog.start()
        try:
            assert process.stdout is not None
            banner = ""
            while "Ctrl-C" not in banner:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                banner += line
            watchdog.cancel()
            found = re.search(r"http://[\d.]+:\d+", banner)
            assert found, banner
            yield Server(process, found[0], mode)
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


async def ask(http: httpx.AsyncClient, asked: Asked, report: Report) -> None:
    where = asked.kind or asked.path
    try:
        async with http.stream("POST", asked.path, json=asked.body) as response:
            pieces: list[bytes] = []
            async for piece in response.aiter_bytes():
                if asked.leaves_after is not None and len(pieces) >= asked.leaves_after:
                    report.counts[f"{where}: left"] += 1
                    return
                pieces.append(piece)
            text = b"".join(pieces).decode()
            wrong = judge(asked, response.status_code, text)
            report.counts[f"{where}: {response.status_code}"] += 1
            if not wrong and response.status_code != 200:
                error = json.loads(text)["error"]
                report.reasons[f"{response.status_code} {error['code']}: {error['message'][:70]}"] += 1
    except httpx.HTTPError as error:
        wrong = f"no answer: {error!r}"
    if wrong:
        report.harm.append(f"{wrong} to {asked.path} {json.dumps(asked.body)[:2000]}")


def judge(asked: Asked, status: int, text: str) -> str:
    """What is wrong with an answer; empty when nothing is."""
    streamed = status == 200 and asked.body.get("stream", False)
    said = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    try:
        parts = [json.loads(part) for part in said if part != "[DONE]"] if streamed else [json.loads(text)]
    except ValueError:
        return f"{status} with what is no JSON: {text[:500]!r}"
    for part in parts:
        if "error" in part:
            return _judge_error(status, part["error"])
    if status != 200:
        return f"{status} without an error: {text[:500]!r}"
    if streamed and not (said[-1] == "[DONE]" or parts[-1].get("type") == "message_stop"):
        return f"a stream without an end: {text[-500:]!r}"
    if not streamed and asked.kind in ("schema", "object"):
        return _judge_json(asked, parts[0])
    return ""


def _judge_error(status: int, error: dict[str, Any]) -> str:
    code, message = error.get("code"), error.get("message")
    if not message or (status >= 400 and not error.get("type")):
        return f"{status} without a reason: {error}"
    if status == 200 and code in ("overloaded", "rate_limited"):  # said when its stream had begun
        return ""
    return "" if 400 <= status < 500 or (status == 503 and code in _REASONS) else f"{status}: {error}"


def _judge_json(asked: Asked, answer: dict[str, Any]) -> str:
    if "stop" in asked.body or "stop_token_ids" in asked.body:
        return ""  # cut off where the caller wished
    for choice in answer["choices"]:
        text = choice["message"]["content"] if asked.path == CHAT else choice["text"]
        if choice["finish_reason"] == "stop":
            try:
                json.loads(text)
            except ValueError:
                return f"complete, and no JSON: {text[:500]!r}"
    return ""


async def send_all(url: str, count: int, make: Callable[[Random], Asked], seed: int, report: Report) -> None:
    numbers = iter(range(count))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as http:

        async def client() -> None:
            for number in numbers:
                await ask(http, make(Random(f"{seed} {number}")), report)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def hammer(model: str, mode: Mode, *, requests: int, grammars: int, seed: int) -> Report:
    report = Report()
    with serving(model, mode) as server:
        before = server.worker_ids()
        for name, count, make in (("requests", requests, random_request), ("grammars", grammars, random_grammar)):
            began_s = time.monotonic()
            asyncio.run(send_all(server.url, count, make, seed, report))
            report.counts[f"seconds for {name}"] = round(time.monotonic() - began_s)
        if server.process.poll() is not None or server.worker_ids() != before:
            report.harm.append(f"a process fell: {before} before, {server.said[-5:]}")
            return report
        server.wait_idle()
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        for path in (CHAT, MESSAGES):
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=ANSWER_S)
            if answer.status_code != 200:
                report.harm.append(f"a plain question got {answer.status_code}: {answer.text[:500]}")
        report.harm += [
            f"the server said: {line}" for line in server.said if "Traceback" in line or "process ended" in line
        ]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--mode", choices=("colocated", "split", "both"), default="both")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--grammars", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    harmful = False
    for mode in ("colocated", "split") if asked.mode == "both" else (asked.mode,):
        began_s = time.monotonic()
        report = hammer(asked.model, mode, requests=asked.requests, grammars=asked.grammars, seed=asked.seed)
        print(f"{mode}, {time.monotonic() - began_s:.0f} s\n{report.render()}\n", flush=True)
        harmful |= bool(report.harm)
    sys.exit(harmful)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
