"""Batches while processes die: a real split server, kill -9 of its gateway and workers, and of the whole server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from split.serving import DEADLINE_S, SplitServer, split_server

CHAT = "/v1/chat/completions"


def question(number: int) -> dict[str, Any]:
    content = f"Question {number} of a batch"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3 + number % 5, "seed": number}


def upload(url: str, num_lines: int) -> str:
    rows = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": question(n)} for n in range(num_lines)]
    text = "\n".join(map(json.dumps, rows)).encode()
    made = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}, timeout=60)
    body = {"input_file_id": made.raise_for_status().json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(httpx.post(f"{url}/v1/batches", json=body, timeout=60).raise_for_status().json()["id"])


def look(url: str, batch_id: str) -> dict[str, Any] | None:
    """None while the gateway is being replaced."""
    try:
        found = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=DEADLINE_S)
    except httpx.TransportError:
        return None
    return found.json() if found.status_code == 200 else None


def strike(server: SplitServer, random: Random) -> None:
    """kill -9 of the gateway, or of a worker."""
    if random.random() < 0.5:
        pid = server.find("gateway")
    else:
        try:
            pid = random.choice([*server.pids("prefill"), *server.pids("decode")])
        except (httpx.HTTPError, IndexError):
            return
    if pid is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def check(url: str, batch: dict[str, Any], num_lines: int) -> None:
    assert batch["status"] == "completed" and batch["error_file_id"] is None
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    text = httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content", timeout=60).text
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["custom_id"] for entry in entries] == [str(n) for n in range(num_lines)]
    for number in range(0, num_lines, max(1, num_lines // 20)):
        alone = httpx.post(f"{url}{CHAT}", json=question(number), timeout=DEADLINE_S).raise_for_status().json()
        assert entries[number]["response"]["body"]["choices"][0]["message"] == alone["choices"][0]["message"]


@pytest.mark.parametrize(("num_lines", "num_kills"), [(120, 2), pytest.param(2000, 100, marks=pytest.mark.prove)])
def test_each_line_is_answered_once(tmp_path: Path, num_lines: int, num_kills: int) -> None:
    random = Random(num_kills)
    options = ("--batch-dir", str(tmp_path))
    with split_server("fake:step_ms=2", prefill=1, decode=1, options=options) as server:
        batch_id = upload(server.url, num_lines)
        struck = 0
        while True:
            batch = look(server.url, batch_id)
            if batch is not None and batch["status"] not in ("validating", "in_progress", "finalizing"):
                break
            if batch is not None and batch["request_counts"]["completed"] >= struck * num_lines / (num_kills + 1):
                struck += 1
                if struck <= num_kills:
                    strike(server, random)
        check(server.url, batch, num_lines)
