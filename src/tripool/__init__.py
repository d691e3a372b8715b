"""Tripool serves mixture-of-experts language models from three pools of peers: prefill, decode and cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tripool.core import SamplingParams, Structure, Usage
from tripool.errors import TripoolError

if TYPE_CHECKING:
    from tripool.answer import Choice, Generation
    from tripool.llm import LLM

__version__ = "0.2.0"

__all__ = ["LLM", "SamplingParams", "Structure", "Generation", "Choice", "Usage", "TripoolError", "__version__"]


def __getattr__(name: str) -> object:
    """What knows text on first use: rooms without it (planner, policies) import this package and need no tokenizer."""
    if name == "LLM":
        from tripool.llm import LLM

        return LLM
    if name in ("Choice", "Generation"):
        from tripool import answer

        return getattr(answer, name)
    raise AttributeError(f"module 'tripool' has no attribute '{name}'")
