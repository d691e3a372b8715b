"""The worker's half of the benchmark protocol: one JSON object per line, in on stdin, out on stdout.

| asked                                            | answered                                                       |
|--------------------------------------------------|----------------------------------------------------------------|
| {"do": "load", "model", "threads", "precision"}  | {"version", "bits": [weights, activations], ...}                |
| {"do": "prepare", "concurrency", "context_tokens"} | {}: called before each workload, outside the clock             |
| {"do": "run", "prompts": [[id]], "max_tokens"}   | {"wall_s", "token_ids": [[id]]}: greedy, end of text ignored    |

A program of this folder is one engine behind these three calls; what is made of them is the benchmark's affair.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Protocol


class Engine(Protocol):
    def load(self, model: str, threads: int, precision: str) -> dict[str, Any]: ...

    def prepare(self, concurrency: int, context_tokens: int) -> None:
        """Room for `concurrency` requests of `context_tokens` (prompt and answer) each."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """All prompts at once; returns each one's `max_tokens` generated ids."""


def serve(engine: Engine) -> None:
    # Engines print to stdout as they please; the protocol keeps the real one for itself.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            reply = answer(engine, json.loads(line))
        except Exception as error:  # noqa: BLE001 - the boundary: whatever an engine raises becomes a failed row
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
    # Engines with threads of their own can hang or crash in their destructors; nobody needs those to run.
    os._exit(0)


def answer(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    match message.pop("do"):
        case "load":
            return engine.load(**message)
        case "prepare":
            engine.prepare(**message)
            return {}
        case "run":
            started = time.perf_counter()
            token_ids = engine.run(**message)
            wall_s = time.perf_counter() - started
            lengths = {len(ids) for ids in token_ids}
            assert lengths == {message["max_tokens"]}, f"answers of {lengths} tokens, asked for {message['max_tokens']}"
            return {"wall_s": wall_s, "token_ids": token_ids}
        case unknown:
            raise ValueError(f"no such command: {unknown}")
