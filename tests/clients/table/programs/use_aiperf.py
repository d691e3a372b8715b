"""NVIDIA's AIPerf over chat completions, whole and streamed, and completions."""

import json

from load import CONCURRENCY, INPUT_TOKENS, NUM_REQUESTS, OUTPUT_TOKENS, folder, run, tokenizer
from steps import MODEL, URL, step


def bench(kind: str, *words: str, model: str = MODEL) -> tuple[int, str, dict]:
    cwd = folder()
    status, printed = run(
        "aiperf", "profile", "--model", model, "--url", URL, "--endpoint-type", kind, "--tokenizer", tokenizer(),
        "--request-count", NUM_REQUESTS, "--concurrency", CONCURRENCY, "--synthetic-input-tokens-mean", INPUT_TOKENS,
        "--output-tokens-mean", OUTPUT_TOKENS, "--extra-inputs", "ignore_eos:true", "--ui", "none",
        "--artifact-dir", cwd / "made", *words, cwd=cwd, HF_HUB_OFFLINE="",  # else it takes no folder for a tokenizer
    )  # fmt: skip
    found = sorted((cwd / "made").rglob("profile_export_aiperf.json"))
    return status, printed, json.loads(found[0].read_text("utf-8")) if found else {}


def whole(kind: str, *words: str) -> None:
    status, printed, result = bench(kind, *words)
    assert status == 0 and result, printed[-2000:]
    assert result["request_count"]["avg"] == NUM_REQUESTS, result["request_count"]
    assert not result.get("error_summary"), result["error_summary"]


@step("quick start")
def _() -> None:
    whole("chat")
    whole("completions")


@step("streaming")
def _() -> None:
    whole("chat", "--streaming")


@step("error")
def _() -> None:
    status, printed, result = bench("chat", model="no")
    assert status or result.get("error_summary") or not result.get("request_count"), printed[-2000:]
