"""Rotary embedding tables for every position, with all published context extensions."""

from __future__ import annotations

import math

import torch

from tripool.models.arch import ConfigReader, RopeShape

KINDS = ("default", "linear", "llama3", "yarn")
MAX_TABLE_BYTES = 2**29
"""A million positions of the usual width. The table is computed for the whole context length."""
_PAIR_BYTES = 8
_LEAST = 1e-9
_NOT_NEGATIVE = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
)  # fmt: skip
_NUMBERS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def read_rope(config: ConfigReader, dim: int, *, paired: bool = False) -> RopeShape:
    """From `rope_parameters` (recent configs), or `rope_theta` with `rope_scaling` (all published ones)."""
    extra = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(extra, dict):
        raise config.error("the rope parameters are no object")
    extra = dict(extra)
    kind = extra.get("rope_type", extra.get("type", "default"))
    if kind not in KINDS:
        raise config.error(f"rope type {str(kind)[:100]!r}; this version runs {', '.join(KINDS)}")
    theta = config.finite("rope_theta", extra.get("rope_theta") or config.float("rope_theta", 10000.0))
    context = config.int("max_position_embeddings")
    for key in _NUMBERS.get(kind, ()):
        if isinstance(extra.get(key), bool) or not isinstance(extra.get(key), (int, float)):
            raise config.error(f"rope type {kind!r} needs a number for '{key}'")
    for key in _NOT_NEGATIVE:
        if extra.get(key) is not None:
            extra[key] = config.finite(key, extra[key])
        if extra.get(key) is not None and extra[key] < 0:
            raise config.error(f"'{key}' is below 0")
        if extra.get(key) and extra[key] < _LEAST:  # a division by it would overflow
            raise config.error(f"'{key}' is {extra[key]:g}, which no model has")
    original = extra.get("original_max_position_embeddings") or context
    if kind != "default":
        extra["factor"] = float(extra.get("factor") or context / original)
    if kind == "llama3" and extra["high_freq_factor"] <= extra["low_freq_factor"]:
        raise config.error("'high_freq_factor' is not above 'low_freq_factor'")
    extra["original_max_position_embeddings"] = original
    if dim % 2 or dim == 0:
        raise config.error(f"rotary width {dim} is not even")
    if theta <= 1:
        raise config.error(f"'rope_theta' is {theta:g}, not above 1")
    if context * dim * _PAIR_BYTES // 2 > MAX_TABLE_BYTES:
        needs = f"{context * dim * _PAIR_BYTES / 2**31:.1f} GB"
        raise config.error(f"{context} positions need {needs} of rotary tables; lower 'max_position_embeddings'")
    return RopeShape(dim=dim, theta=theta, kind=kind, extra=extra, paired=paired)


def inverse_frequencies(rope: RopeShape) -> torch.Tensor:
    """Angle per position of each rotated pair, float32 [dim / 2]."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    inverse: torch.Tensor = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return inverse / float(rope.extra["factor"])
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "yarn":
        return _yarn(inverse, rope)
    return inverse


def amplitude(rope: RopeShape) -> float:
    """Factor on cos and sin. YaRN sharpens attention slightly when it extends the context."""
    if rope.kind != "yarn":
        return 1.0
    extra, factor = rope.extra, rope.extra["factor"]
    if extra.get("attention_factor") is not None:
        return float(extra["attention_factor"])
    if extra.get("mscale") and extra.get("mscale_all_dim"):
        return yarn_sharpness(factor, extra["mscale"]) / yarn_sharpness(factor, extra["mscale_all_dim"])
    return yarn_sharpness(factor, 1.0)


def yarn_sharpness(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_table(rope: RopeShape, positions: int) -> torch.Tensor:
    """complex64 [positions, dim / 2]: the rotation of each pair at each position."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return torch.complex(angles.cos(), angles.sin()) * amplitude(rope)


def to_pairs(rows: torch.Tensor, rope: RopeShape) -> None:
    """Reorder `dim` rows (of a weight, a bias or a norm) from the half layout to the interleaved one, in place."""
    if not rope.paired and not rows.is_meta:  # a tensor without bytes has no order
        rows.copy_(rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1))


def _llama3(inverse: torch.Tensor, rope: RopeShape) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
    extra = rope.extra
    low, high = extra["low_freq_factor"], extra["high_freq_factor"]
    rotations = extra["original_max_position_embeddings"] * inverse / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    slowed = inverse / float(extra["factor"])
    return torch.lerp(slowed, inverse, blend)


def _yarn(inverse: torch.Tensor, rope: RopeShape) -> torch.Tensor:
    """Pairs with many rotations within the original context are kept, those with few are slowed by the factor."""
    extra = rope.extra

    def pair_with(rotations: float) -> float:
        ratio = extra["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with(extra.get("beta_fast") or 32), pair_with(extra.get("beta_slow") or 1)
    if extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    slowed = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    blended: torch.Tensor = inverse / extra["factor"] * slowed + inverse * (1 - slowed)
    return blended
