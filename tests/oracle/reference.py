"""A checkpoint folder run by transformers in float32: the answers that ours are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oracle.quiet import quiet

TIE_GAP = 1e-3
"""Two leading logits closer than this may change places through rounding alone."""


@dataclass(frozen=True)
class Greedy:
    """Reference tokens, and at each step how far the best logit was above the second."""

    tokens: list[int]
    gaps: list[float]

    def is_tie_at_first_difference(self, ours: Sequence[int]) -> bool:
        first = next(i for i, (a, b) in enumerate(zip(ours, self.tokens, strict=True)) if a != b)
        return self.gaps[first] < TIE_GAP


def differences(ours: Sequence[Sequence[int]], theirs: Sequence[Greedy]) -> tuple[list[int], list[int]]:
    """Prompts whose answers differ: from a near-tie of the reference on, which rounding may decide; and the others."""
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if list(a) != b.tokens]
    ties = [i for i in differing if theirs[i].is_tie_at_first_difference(ours[i])]
    return ties, [i for i in differing if i not in ties]


class Reference:
    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def load(cls, folder: Path) -> Reference:
        with quiet():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            # The default groups the experts' products, which needs rows of whole 16 bytes; odd sizes have none.
            model.set_experts_implementation("eager")
            return cls(model)

    @classmethod
    def load_gguf(cls, path: Path) -> Reference:
        """Through its GGUF reader, multiplied out; `from_pretrained` would ask for the `accelerate` package first."""
        with quiet():
            from transformers import AutoConfig, AutoModelForCausalLM
            from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
            missing, unexpected = model.load_state_dict(tensors, strict=False)
            tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
            assert set(missing) <= tied, missing
            assert not unexpected, unexpected
            return cls(model)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with quiet():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[Greedy]:
        """`generate` on all prompts at once, shorter ones padded on the left; `count` tokens each whatever they are."""
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with quiet():
            from transformers import GenerationConfig

            plan = GenerationConfig(
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            self.model.generation_config.eos_token_id = None
            result = self.model.generate(ids, attention_mask=mask, generation_config=plan)
        tokens = result.sequences[:, longest:]
        top = torch.stack(result.logits, dim=1).topk(2).values
        gaps = top[..., 0] - top[..., 1]
        return [Greedy(t.tolist(), g.tolist()) for t, g in zip(tokens, gaps, strict=True)]
