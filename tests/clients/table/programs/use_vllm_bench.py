"""vllm bench serve over both of OpenAI's endpoints that it knows; its requests are streams."""

import json

from load import CONCURRENCY, INPUT_TOKENS, NUM_REQUESTS, OUTPUT_TOKENS, folder, run, tokenizer
from steps import MODEL, URL, step


def bench(backend: str, path: str, model: str = MODEL) -> tuple[int, str, dict]:
    cwd = folder()
    status, printed = run(
        "vllm", "bench", "serve", "--backend", backend, "--endpoint", path, "--base-url", URL, "--model", model,
        "--tokenizer", tokenizer(), "--dataset-name", "random", "--random-input-len", INPUT_TOKENS,
        "--random-output-len", OUTPUT_TOKENS, "--num-prompts", NUM_REQUESTS, "--max-concurrency", CONCURRENCY,
        "--ignore-eos", "--save-result", "--result-dir", cwd, "--result-filename", "result.json", cwd=cwd,
    )  # fmt: skip
    result = cwd / "result.json"
    return status, printed, json.loads(result.read_text("utf-8")) if result.exists() else {}


def whole(backend: str, path: str) -> None:
    status, printed, result = bench(backend, path)
    assert status == 0, printed[-2000:]
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), printed[-2000:]
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS and result["mean_ttft_ms"] > 0


@step("quick start")
def _() -> None:
    whole("openai", "/v1/completions")


@step("streaming")
def _() -> None:
    whole("openai-chat", "/v1/chat/completions")


@step("error")
def _() -> None:
    status, printed, result = bench("openai-chat", "/v1/chat/completions", "no")
    assert status or result.get("failed"), printed[-2000:]
