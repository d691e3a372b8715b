"""Bodies that real clients sent by themselves, with their texts shortened: every field of them is served or ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.serving import WatchedEngine

BODIES = Path(__file__).parent / "recorded"
CONTEXT_TOKENS = 2**17


MESSAGES = "/v1/messages?beta=true"
UNPROMISED = pytest.mark.xfail(reason="its tools have `propertyNames`, which the grammar refuses", strict=True)


@pytest.mark.parametrize(
    ("name", "path", "without"),
    [
        ("codex", "/v1/responses", ""),
        ("claude_code", MESSAGES, "tools"),
        pytest.param("claude_code", MESSAGES, "", marks=UNPROMISED),
    ],
)
def test_served(serve, name, path, without):
    body = json.loads((BODIES / f"{name}.json").read_text("utf-8"))
    body.pop(without, None)
    with serve(engine=WatchedEngine(context_tokens=CONTEXT_TOKENS, num_blocks=CONTEXT_TOKENS // 64)) as served:
        limit = {"max_output_tokens": 4} if path == "/v1/responses" else {"max_tokens": 4}
        answer = served.http.post(path, json=body | limit)
        assert answer.status_code == 200, answer.text
        last = [line for line in answer.text.splitlines() if line.startswith("event: ")][-1]
        assert last in ("event: response.incomplete", "event: response.completed", "event: message_stop")
