"""What a case is, and the parts that one is put together from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT_TOKENS = 384


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    settings: Mapping[str, Any]
    sharded: bool = False
    published: bool = False
    """config.json in the layout of published checkpoints (rope_theta, rope_scaling), not that of transformers 5."""
    mtp: bool = False
    """Whether the files hold the multi-token-prediction layer that every V3 config promises."""


def rope(kind: str = "default", theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    if kind in ("yarn", "llama3"):
        numbers = {"factor": 4.0, "original_max_position_embeddings": CONTEXT_TOKENS // 4} | numbers
    return {"rope_type": kind, "rope_theta": theta} | numbers


def make_case(
    name: str,
    model_type: str,
    *parts: Mapping[str, Any],
    rope: Mapping[str, Any],
    vocab: int = 211,
    width: int = 77,
    layers: int = 2,
    sharded: bool = False,
    published: bool = False,
    mtp: bool = False,
    **options: Any,
) -> Case:
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": dict(rope),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    for part in (*parts, options):
        settings |= part
    return Case(name, model_type, settings, sharded=sharded, published=published, mtp=mtp)
