"""Architecture of a network as data. Family files (`llama`, `qwen`, `deepseek`) read it from a Hugging Face config."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tripool.core import BLOCK_TOKENS
from tripool.errors import WrongArchitecture
from tripool.kernels.ref.route import RoutePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Rotary embedding: `kind` is default, linear, llama3 or yarn; `extra` holds the parameters of that kind."""

    dim: int
    theta: float
    kind: str
    extra: Mapping[str, Any]
    paired: bool = False
    """Whether the checkpoint pairs elements (2j, 2j + 1); otherwise (j, j + dim / 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaShape:
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v: int
    bias: bool
    scale: float
    norm_eps: float = 1e-6
    """Epsilon of the two inner norms; the published networks do not take it from the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    experts: int
    width: int
    shared_width: int
    route: RoutePlan
    correction_bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    family: str
    vocab: int
    hidden: int
    layers: int
    context_tokens: int
    norm_eps: float
    tied_head: bool
    rope: RopeShape
    attention: GqaShape | MlaShape
    dense_width: int
    mlp_bias: bool = False
    moe: MoeShape | None = None
    moe_layers: frozenset[int] = frozenset()
    mtp_layers: int = 0
    """As declared by the config; a checkpoint may lack their tensors."""

    @property
    def kv_width(self) -> int:
        """KV numbers per token and layer."""
        a = self.attention
        return a.kv_rank + a.rope if isinstance(a, MlaShape) else 2 * a.kv_heads * a.head_dim

    @property
    def query_width(self) -> int:
        """Numbers of a token's queries in one layer."""
        a = self.attention
        return a.heads * (a.nope + a.rope if isinstance(a, MlaShape) else a.head_dim)

    @property
    def attended_width(self) -> int:
        """Numbers of what a token's heads give in one layer."""
        a = self.attention
        return a.heads * (a.v if isinstance(a, MlaShape) else a.head_dim)

    def block_bytes(self, *, mtp: bool, itemsize: int = 4) -> int:
        """Of one KV block in all layers."""
        return (self.layers + mtp) * BLOCK_TOKENS * self.kv_width * itemsize


_MOST = {
    "num_hidden_layers": 2**10,
    "vocab_size": 2**22,
    "max_position_embeddings": 2**22,
    "n_routed_experts": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
}
_MOST_OTHERWISE = 2**20
_MOST_FLOAT = 1e30
"""Far above every published network. Sizes are multiplied and iterated over before any tensor is read."""


class ConfigReader:
    """Typed access to a config dict; a missing or invalid entry raises WrongArchitecture."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config = config
        self._source = source

    def int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"'{key}' is {_shown(value)}, not a whole number")
        if value > _MOST.get(key, _MOST_OTHERWISE):
            raise self.error(f"'{key}' is {_shown(value)}, which no model has")
        return value

    def float(self, key: str, default: float | None = None) -> float:
        return self.finite(key, self.get(key, default))

    def finite(self, key: str, value: Any) -> builtins.float:
        """A finite number, also from a nested entry."""
        is_number = isinstance(value, (builtins.int, builtins.float)) and not isinstance(value, bool)
        if not is_number or not abs(value) < _MOST_FLOAT:
            raise self.error(f"'{key}' is {_shown(value)}, not a number that can be used")
        return builtins.float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def demand(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self.get(key, default)
        if value not in allowed:
            raise self.error(f"'{key}' is {_shown(value)}; this version runs {', '.join(map(repr, allowed))}")
        return value

    def positive(self, *keys: str) -> None:
        for key in keys:
            if self.int(key) == 0:
                raise self.error(f"'{key}' is 0")

    def error(self, message: str) -> WrongArchitecture:
        return WrongArchitecture(message, hint="check config.json against the model's own page", file=self._source)


def _shown(value: object) -> str:
    """Shortened, because an untrusted value may be of any length."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
