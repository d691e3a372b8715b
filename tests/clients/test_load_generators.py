"""Load generators of others: each sends real traffic, loses no request, and gets every token that it asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import REPO, installed

pytestmark = pytest.mark.prove

NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 16, 48, 16


@pytest.mark.parametrize(("backend", "path"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")])
def test_vllm_bench_serve(run, served, tokenizer_folder, tmp_path: Path, backend: str, path: str):
    vllm = installed(REPO / ".venv-peers" / "bin" / "vllm", "make peers")
    run(
        *(vllm, "bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", served.url),
        *("--model", served.model, "--tokenizer", tokenizer_folder, "--dataset-name", "random"),
        *("--random-input-len", INPUT_TOKENS, "--random-output-len", OUTPUT_TOKENS),
        *("--num-prompts", NUM_REQUESTS, "--max-concurrency", 4, "--ignore-eos", "--goodput", "ttft:60000"),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "told.json"),
        folder=tmp_path,
    )
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["completed"], told["failed"]) == (NUM_REQUESTS, 0)
    assert told["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert told["mean_ttft_ms"] > 0 and told["mean_tpot_ms"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(run, served, tokenizer_folder, tmp_path: Path, path: str):
    guidellm = installed(REPO / ".venv-guidellm" / "bin" / "guidellm", "python tests/clients/install.py")
    run(
        *(guidellm, "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={served.url},model={served.model},request_format={path}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", "kind=json,path=told.json"),
        folder=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[how]) for how in ("successful", "errored", "incomplete")] == [NUM_REQUESTS, 0, 0]
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {OUTPUT_TOKENS}
