"""Run by the peers' interpreter: what transformers with compressed-tensors makes of a folder. Prints JSON."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(folder: str, prompts: list[list[int]], count: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers, gaps = [], []
    for prompt in prompts:
        tokens = list(prompt)
        gaps.append([])
        for _ in range(count):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            best = logits.topk(2).values
            gaps[-1].append(float(best[0] - best[1]))
            tokens.append(int(logits.argmax()))
        answers.append(tokens[len(prompt) :])
    kinds = sorted({type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__})
    schemes = sum(getattr(module, "quantization_scheme", None) is not None for module in model.modules())
    print(json.dumps({"answers": answers, "gaps": gaps, "kinds": kinds, "schemes": schemes}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
