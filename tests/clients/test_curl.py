"""curl, as the banner and the README tell a newcomer to use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.prove

TYPE = ("-H", "Content-Type: application/json")


@pytest.fixture
def curl(run, tmp_path: Path):
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is missing: install it with the system's packages")

    def call(*options: str) -> str:
        return run(
            program, "--silent", "--show-error", "--fail-with-body", "--max-time", "60", *options, folder=tmp_path
        )

    return call


def test_chat(curl, served):
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "temperature": 0}
    answer = json.loads(curl(f"{served.url}/v1/chat/completions", *TYPE, "-d", json.dumps(body)))
    assert answer["choices"][0]["message"]["content"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 20


def test_a_stream_says_the_same(curl, served):
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    url = f"{served.url}/v1/completions"
    whole = json.loads(curl(url, *TYPE, "-d", json.dumps(body)))["choices"][0]["text"]
    lines = curl("-N", url, *TYPE, "-d", json.dumps(body | {"stream": True})).split("\n\n")
    *events, done, end = lines
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version"])
def test_get(curl, served, path):
    assert json.loads(curl(f"{served.url}{path}"))


def test_metrics(curl, served):
    printed = curl(f"{served.url}/metrics")
    assert "vllm:num_requests_running" in printed and "vllm:time_to_first_token_seconds_bucket" in printed


def test_tokens_and_back(curl, served):
    told = json.loads(curl(f"{served.url}/tokenize", *TYPE, "-d", json.dumps({"prompt": "Once upon a time"})))
    assert told["count"] == len(told["tokens"]) > 0
    back = json.loads(curl(f"{served.url}/detokenize", *TYPE, "-d", json.dumps({"tokens": told["tokens"]})))
    assert back["prompt"].endswith("Once upon a time")
