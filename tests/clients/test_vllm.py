"""vLLM's own server, asked what clients asked this one: nothing is refused here that vLLM serves.

    python -m clients.table.install vllm-bench     # in tests/

The model is small and random. Its answers are cut short, because their number of tokens decides nothing here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import tripool
from clients.conftest import installed
from clients.table.catalog import VLLM_BENCH
from clients.table.install import folder_of
from clients.table.replay import recorded
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION
from tripool.gateway.responses.fields import RESPONSES

pytestmark = pytest.mark.prove

START_WITHIN_S, ANSWER_WITHIN_S = 600.0, 120.0
MAX_TOKENS = 4
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ (m['content'] or '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ONLY_OURS = ("/api/", "/tokenizer_info", "/tripool")
"""Paths that vLLM has not, or not by default."""
ONLY_SERVED_HERE = {"item_reference"}
"""Input items of Responses that vLLM does not know."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    bundled = Path(tripool.__file__).parent / "checkpoints" / "bundled" / "tiny"
    vocab = json.loads((bundled / "config.json").read_text("utf-8"))["vocab_size"]
    set_seed(7)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32768, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    shutil.copy(bundled / "tokenizer.json", folder)
    about = json.loads((bundled / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": TEMPLATE}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def vllm(checkpoint: Path) -> Iterator[httpx.Client]:
    program = installed(folder_of(VLLM_BENCH) / "bin" / "vllm", "python -m clients.table.install vllm-bench")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program, "serve", checkpoint, "--served-model-name", "fake", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "32768", "--max-num-seqs", "8",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--override-generation-config", json.dumps({"max_new_tokens": MAX_TOKENS}),
    ]  # fmt: skip
    alone = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    log = checkpoint / "vllm.log"
    with (
        log.open("wb") as written,
        subprocess.Popen(
            list(map(str, command)), stdout=written, stderr=subprocess.STDOUT, env=os.environ | alone
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_WITHIN_S) as http,
    ):
        try:
            _await(http, process, log)
            yield http
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)  # somebody else's server: there is nothing to wait on
    raise AssertionError(f"vLLM did not start: {log.read_text('utf-8', 'replace')[-3000:]}")


LIST_FIELDS = """
import json
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
bodies = ChatCompletionRequest, CompletionRequest, AnthropicMessagesRequest, ResponsesRequest
print(json.dumps([sorted(body.model_fields) for body in bodies]))
"""


def test_every_field_of_vllm_is_known_here() -> None:
    """Served, ignored by the documented list, or refused as what it is: none is a typing error."""
    python = installed(folder_of(VLLM_BENCH) / "bin" / "python", "python -m clients.table.install vllm-bench")
    listed = subprocess.run([python, "-c", LIST_FIELDS], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(listed.splitlines()[-1])
    for fields, names in zip((CHAT, COMPLETION, ANTHROPIC, RESPONSES), theirs, strict=True):
        assert len(names) > 10
        assert set(names) <= {*fields.known, *fields.ignored, *(fields.only_plain or {})}


def shortened(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    return body | {name: min(body[name], MAX_TOKENS) for name in LENGTHS if isinstance(body.get(name), int)}


def test_nothing_is_refused_that_vllm_serves(vllm: httpx.Client) -> None:
    stricter, same, more_lenient = [], 0, []
    for client, request in recorded():
        if request["path"].startswith(ONLY_OURS):
            continue
        body = shortened(request["body"])
        answer = vllm.request(
            request["method"], request["path"], headers=request["headers"], json=body if body is not None else None
        )
        ours, theirs = request["status"] < 400, answer.status_code < 400
        about = (client, request["path"], request["status"], answer.status_code, answer.text[:300])
        if ours == theirs:
            same += 1
        elif theirs:
            stricter.append(about)
        else:
            more_lenient.append((about, json.dumps(body)))
    print(f"{same} alike, {len(more_lenient)} served here alone, {len(stricter)} refused here alone")
    assert not stricter
    assert same > 100, "nothing was compared"
    assert all(any(kind in body for kind in ONLY_SERVED_HERE) for _, body in more_lenient), more_lenient
