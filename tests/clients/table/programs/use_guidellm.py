"""GuideLLM over both of OpenAI's endpoints that it knows; its requests are streams."""

import json

from load import CONCURRENCY, INPUT_TOKENS, NUM_REQUESTS, OUTPUT_TOKENS, folder, run, tokenizer
from steps import MODEL, URL, step


def bench(path: str, model: str = MODEL) -> tuple[int, str, dict]:
    cwd = folder()
    status, printed = run(
        "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={URL},model={model},request_format={path}",
        "--profile", f"kind=concurrent,streams={CONCURRENCY}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer()}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", "kind=json,path=result.json", cwd=cwd,
    )  # fmt: skip
    result = cwd / "result.json"
    return status, printed, json.loads(result.read_text("utf-8"))["benchmarks"][0] if result.exists() else {}


def whole(path: str) -> None:
    status, printed, result = bench(path)
    assert status == 0 and result, printed[-2000:]
    counts = [len(result["requests"][how]) for how in ("successful", "errored", "incomplete")]
    assert counts == [NUM_REQUESTS, 0, 0], counts
    tokens = {request["output_metrics"]["text_tokens"] for request in result["requests"]["successful"]}
    assert tokens == {OUTPUT_TOKENS}, tokens


@step("quick start")
def _() -> None:
    whole("/v1/chat/completions")


@step("streaming")
def _() -> None:
    whole("/v1/completions")


@step("error")
def _() -> None:
    status, printed, result = bench("/v1/chat/completions", "no")
    errored = len(result["requests"]["errored"]) if result else 0
    assert status or errored, printed[-2000:]
