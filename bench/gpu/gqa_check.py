"""Inputs of the benchmark of grouped-query attention, and its checks against the plain versions in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import timing  # noqa: F401 (puts the sources on the import path)
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tripool.kernels.cuda import attention, elementwise
from tripool.kernels.cuda.rows import DeviceRows, PagedRows
from tripool.kernels.sequence_rows import SequenceRows
from tripool.kernels.triton import elementwise as fused
from tripool.kernels.triton import gqa_decode as decoding
from tripool.kernels.triton import gqa_prefill as prefilling
from tripool.kernels.triton.rope_cache import rope_cache
from tripool.kernels.weights import Norm

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    norms: bool

    @property
    def kv_bytes(self) -> int:
        return 4 * self.kv_heads * self.dim


LLAMA = Shape("Llama-3-8B", 4096, 14336, 32, 8, 128, norms=False)
QWEN = Shape("Qwen3-30B", 2048, 768, 32, 4, 128, norms=True)
SHAPES = (LLAMA, QWEN)
ODD = (Shape("dim 64", 512, 512, 8, 2, 64, norms=True), Shape("dim 256", 512, 512, 14, 2, 256, norms=False))


def scattered(lengths: torch.Tensor, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """KV and block table of requests whose pages are in random order."""
    width = -(-int(lengths.max()) // 64)
    table = torch.randperm(len(lengths) * width, device="cuda").view(len(lengths), width).int()
    return torch.randn(table.numel() * 64, 2 * shape.kv_heads * shape.dim, dtype=dtype, device="cuda"), table


def queries(rows: int, shape: Shape) -> torch.Tensor:
    """[rows, heads, dim] as part of the qkv product."""
    return torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.dim, **BF16)[:, : shape.heads]


def sequences(pieces: list[tuple[int, int]], table: torch.Tensor, first: int = 0) -> list[SequenceRows]:
    """pieces: (start, count)."""
    out, row = [], 0
    for (start, count), blocks in zip(pieces, table.tolist(), strict=True):
        out.append(SequenceRows(row, count, start, blocks[: -(-(start + count) // 64)], first))
        row += count
    return out


def rows_of(seqs: list[SequenceRows]) -> DeviceRows:
    return DeviceRows(seqs, None, torch.arange(sum(seq.count for seq in seqs), device="cuda"))


def error_of(out: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((out.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")


def check_decode(shape: Shape, tiling: decoding.Tiling | None = None) -> float:
    worst = 0.0
    lengths = torch.tensor([2, 64, 65, 256, 257, 700, 513, 3000, 8400], dtype=torch.int32, device="cuda")
    for num_queries, first in ((1, 0), (2, 0), (2, 1)):
        kv, table = scattered(lengths, shape)
        q = queries(len(lengths) * num_queries, shape)
        rows = PagedRows(table, lengths, num_queries, first)
        wanted = attention.attend_decode(q.double(), kv.double(), rows, shape.kv_heads, shape.dim**-0.5)
        if first:  # a query that sees nothing gets zeros, where a softmax over nothing is NaN
            wanted = wanted.nan_to_num(0.0)
        out = torch.full_like(wanted, float("nan"), dtype=q.dtype)
        decoding.gqa_decode(
            q, kv, table, lengths, shape.dim**-0.5, queries=num_queries, first=first, tiling=tiling, out=out
        )  # fmt: skip
        worst = max(worst, error_of(out, wanted))
    return worst


def check_prefill(shape: Shape, tiling: prefilling.Tiling | None = None) -> float:
    worst = 0.0
    for first in (0, 1):
        pieces = [(first, 300), (first, 1), (64, 65), (1000, 200), (first, 64), (130, 7), (first, 1500)]
        kv, table = scattered(torch.tensor([start + count for start, count in pieces], device="cuda"), shape)
        rows = rows_of(sequences(pieces, table, first))
        q = queries(len(rows.order), shape)
        wanted = attention.attend_prompt(q.double(), kv.double(), rows.prompts, shape.kv_heads, shape.dim**-0.5)
        out = torch.full_like(wanted, float("nan"), dtype=q.dtype)
        index = rows.prompt_index
        prefilling.gqa_prefill(q, kv, index.index, shape.dim**-0.5, low=index.has_first, tiling=tiling, out=out)
        worst = max(worst, error_of(out, wanted))
    return worst


def norm_pair(shape: Shape) -> dict[str, Norm | None]:
    gains = [Norm(torch.rand(shape.dim, **BF16) + 0.5, 1e-6) if shape.norms else None for _ in range(2)]
    return {"q_norm": gains[0], "k_norm": gains[1]}


def check_rope(shape: Shape) -> float:
    rows, every, rotated = 37, shape.heads + 2 * shape.kv_heads, shape.heads + shape.kv_heads
    qkv, norms = torch.randn(rows, every * shape.dim, **BF16), norm_pair(shape)
    cos_sin = torch.polar(torch.ones(rows, shape.dim // 2), torch.randn(rows, shape.dim // 2)).cuda()
    slots, kv = (
        torch.randperm(128, device="cuda")[:rows],
        torch.full((128, 2 * shape.kv_heads * shape.dim), 7.0, **BF16),
    )
    plain = qkv.double().unflatten(1, (every, shape.dim))
    for name, part in (("q_norm", slice(shape.heads)), ("k_norm", slice(shape.heads, rotated))):
        norm = norms[name]
        if norm is not None:
            plain[:, part] = elementwise.normed(plain[:, part], norm)
    elementwise.rope_(plain[:, :rotated], cos_sin)
    wanted = kv.double().index_copy_(0, slots, plain[:, shape.heads :].flatten(1))
    q = rope_cache(qkv, cos_sin, slots, kv, heads=shape.heads, kv_heads=shape.kv_heads, **norms)
    return max(error_of(q, plain[:, : shape.heads]), error_of(kv, wanted))


def check_elementwise() -> float:
    x, gain, gate_up = torch.randn(33, 4096, **BF16), torch.rand(4096, **BF16), torch.randn(33, 2 * 14336, **BF16)
    wanted = elementwise.rms_norm(x.double(), gain, 1e-5), elementwise.swiglu(gate_up.double())
    return max(error_of(fused.rms_norm(x, gain, 1e-5), wanted[0]), error_of(fused.swiglu(gate_up), wanted[1]))


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    for shape in (*SHAPES, *ODD):
        yield f"decode {shape.name}", lambda shape=shape: check_decode(shape)
        yield f"prefill {shape.name}", lambda shape=shape: check_prefill(shape)
        yield f"rope + cache {shape.name}", lambda shape=shape: check_rope(shape)
    yield "norm, swiglu", check_elementwise


def attempt(name: str, check: Callable[[], float], bound: float = 1e-2) -> bool:
    try:
        error = check()
    except (OutOfResources, CompilationError, PTXASError) as failure:
        print(f"no     {name}: {str(failure).splitlines()[0][:100]}", flush=True)
        return False
    print(f"{'right ' if error < bound else 'WRONG '} {name}, error {error:.1e}", flush=True)
    return error < bound
