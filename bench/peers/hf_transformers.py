"""transformers behind the benchmark protocol: float32, one batched `generate` per run (equal lengths, no padding)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from worker import serve


class Transformers:
    def load(self, model: str, threads: int, precision: str) -> dict[str, Any]:
        assert precision == "float32"
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.eval()
        return {"version": f"transformers {transformers.__version__}", "bits": [32, 32]}

    def prepare(self, concurrency: int, context_tokens: int) -> None:
        """Its cache grows with the batch: nothing to set."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,  # suppresses the end of text: every answer has the same length
                pad_token_id=0,
            )
        return output[:, input_ids.shape[1] :].tolist()


if __name__ == "__main__":
    serve(Transformers())
