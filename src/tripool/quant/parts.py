"""Structure of a layer for the quantiser: which linears read which input, and which scalings are equivalent.

Names are relative to the layer (`self_attn.q_proj`). Uses shapes, never values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tripool.models.arch import Arch, GqaShape, MlaShape


@dataclass(frozen=True, slots=True)
class Input:
    """Linears that multiply one input, and therefore see it rounded in the same way."""

    label: str
    linears: tuple[str, ...]
    unit: str
    """Linears of one unit have one precision, because engines fuse them into one product."""
    like: str = ""
    """Label of an identical input; "": none."""

    @property
    def observed(self) -> str:
        return self.like or self.label


@dataclass(frozen=True, slots=True)
class Fold:
    """An equivalent scaling: the producer of an input is divided by a vector and its readers are multiplied by it.

    The producers are norms, concatenated along the columns, or the rows of a linear (`rows_of`): column c of the
    readers belongs to row `source_rows[c]`.
    """

    inputs: tuple[str, ...]
    """Labels of the readers."""
    norms: tuple[str, ...] = ()
    rows_of: str = ""
    source_rows: tuple[int, ...] = ()
    readers_in_floats: tuple[str, ...] = ()
    """Linears that read the same input and are never rounded: the router."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    prefix: str
    moe: bool
    inputs: tuple[Input, ...]
    folds: tuple[Fold, ...]
    mtp: bool = False

    def input(self, label: str) -> Input:
        return next(one for one in self.inputs if one.label == label)

    def linears(self) -> Iterator[str]:
        for one in self.inputs:
            yield from one.linears


def layer_parts(arch: Arch, index: int) -> LayerParts:
    """Layer `arch.layers` is the MTP layer."""
    mtp = index == arch.layers
    moe = arch.moe is not None if mtp else index in arch.moe_layers
    inputs, folds = _latent(arch.attention) if isinstance(arch.attention, MlaShape) else _grouped(arch.attention)
    more_inputs, more_folds = _experts(arch) if moe else _dense("mlp", arch.dense_width)
    if mtp:
        inputs.append(Input("eh", ("eh_proj",), "eh_proj"))
        folds.append(Fold(("eh",), norms=("enorm", "hnorm")))
    if not moe:
        more_folds.append(Fold(("mlp.in",), norms=("post_attention_layernorm",)))
    return LayerParts(f"model.layers.{index}", moe, (*inputs, *more_inputs), (*folds, *more_folds), mtp)


def _grouped(shape: GqaShape) -> tuple[list[Input], list[Fold]]:
    inputs = [
        Input("self_attn.in", tuple(f"self_attn.{part}_proj" for part in "qkv"), "self_attn.qkv_proj"),
        Input("self_attn.out", ("self_attn.o_proj",), "self_attn.o_proj"),
    ]
    group = shape.heads // shape.kv_heads
    rows = tuple(
        head // group * shape.head_dim + place for head in range(shape.heads) for place in range(shape.head_dim)
    )
    folds = [
        Fold(("self_attn.in",), norms=("input_layernorm",)),
        Fold(("self_attn.out",), rows_of="self_attn.v_proj", source_rows=rows),
    ]
    return inputs, folds


def _latent(shape: MlaShape) -> tuple[list[Input], list[Fold]]:
    low_rank = shape.q_rank is not None
    down = ("self_attn.q_a_proj",) * low_rank + ("self_attn.kv_a_proj_with_mqa",)
    query = "self_attn.q_b_proj" if low_rank else "self_attn.q_proj"
    inputs = [
        Input("self_attn.in", down, "self_attn.qkv_a_proj"),
        Input("self_attn.q", (query,), query, like="" if low_rank else "self_attn.in"),
        Input("self_attn.latent", ("self_attn.kv_b_proj",), "self_attn.kv_b_proj"),
        Input("self_attn.out", ("self_attn.o_proj",), "self_attn.o_proj"),
    ]
    wide = shape.nope + shape.v
    rows = tuple(head * wide + shape.nope + place for head in range(shape.heads) for place in range(shape.v))
    first = ("self_attn.in",) if low_rank else ("self_attn.in", "self_attn.q")
    folds = [
        Fold(first, norms=("input_layernorm",)),
        Fold(("self_attn.latent",), norms=("self_attn.kv_a_layernorm",)),
        Fold(("self_attn.out",), rows_of="self_attn.kv_b_proj", source_rows=rows),
    ]
    if low_rank:
        folds.append(Fold(("self_attn.q",), norms=("self_attn.q_a_layernorm",)))
    return inputs, folds


def _dense(prefix: str, width: int, unit: str = "", like: str = "") -> tuple[list[Input], list[Fold]]:
    both = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    inputs = [
        Input(f"{prefix}.in", both, unit or f"{prefix}.gate_up_proj", like),
        Input(f"{prefix}.mid", (f"{prefix}.down_proj",), unit or f"{prefix}.down_proj"),
    ]
    return inputs, [Fold((f"{prefix}.mid",), rows_of=f"{prefix}.up_proj", source_rows=tuple(range(width)))]


def _experts(arch: Arch) -> tuple[list[Input], list[Fold]]:
    """All routed experts have one precision: engines compute them in one grouped product."""
    assert arch.moe is not None
    inputs: list[Input] = []
    folds: list[Fold] = []
    if arch.moe.shared_width:
        inputs, folds = _dense("mlp.shared_experts", arch.moe.shared_width, like="mlp.experts.in")
    first: list[str] = []
    for i in range(arch.moe.experts):
        (reads, mid), more_folds = _dense(f"mlp.experts.{i}", arch.moe.width, unit="mlp.experts")
        first += reads.linears
        inputs.append(mid)
        folds += more_folds
    inputs.insert(0, Input("mlp.experts.in", tuple(first), "mlp.experts"))
    readers = ("mlp.experts.in",) + ("mlp.shared_experts.in",) * bool(arch.moe.shared_width)
    folds.append(Fold(readers, norms=("post_attention_layernorm",), readers_in_floats=("mlp.gate",)))
    return inputs, folds
