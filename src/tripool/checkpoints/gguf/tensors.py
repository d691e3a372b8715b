"""Logical tensors from stored GGUF tensors: rows, expert slices, reordered heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tripool.checkpoints.gguf.header import TensorEntry
from tripool.checkpoints.gguf.kinds import BLOCKS, Kind, unpack
from tripool.checkpoints.mapped import MappedFile, row_pieces
from tripool.errors import WrongDtype

PLAIN = {
    Kind.F32: torch.float32,
    Kind.F16: torch.float16,
    Kind.BF16: torch.bfloat16,
}

QUANTISED = frozenset(
    {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    }
)
"""Types that are unpacked, here or by the gguf package."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor as a matrix: its last dimension is a row, the others are flattened."""

    file: MappedFile
    entry: TensorEntry

    def __post_init__(self) -> None:
        kind = self.entry.kind
        if kind not in PLAIN and kind.name not in QUANTISED:
            hint = f"readable: {', '.join(k.name for k in PLAIN)}, {', '.join(sorted(QUANTISED))}"
            raise WrongDtype(f"stored as {kind.name}", hint=hint, file=self.file.path, tensor=self.entry.name)

    @property
    def num_columns(self) -> int:
        return self.entry.shape[-1]

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.entry.shape[:-1], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        block_values, block_bytes = BLOCKS[self.entry.kind]
        return int(self.num_columns // block_values * block_bytes)

    def values(self, first: int, last: int) -> torch.Tensor:
        """[last - first, num_columns]: a view of plain types, float32 of quantised ones."""
        start, stop = self.entry.start + first * self.row_bytes, self.entry.start + last * self.row_bytes
        kind = self.entry.kind
        if kind in PLAIN:
            return self.file.tensor(start, stop, PLAIN[kind]).view(last - first, self.num_columns)
        packed = np.frombuffer(self.file.view(start, stop), dtype=np.uint8).reshape(last - first, self.row_bytes)
        return torch.from_numpy(unpack(packed, kind))

    def drop(self, first: int, last: int) -> None:
        start = self.entry.start
        self.file.drop(start + first * self.row_bytes, start + last * self.row_bytes)


class Source(Protocol):
    """A logical tensor: its shape, its stored type, and how to read it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensor(self) -> GgufTensor: ...

    def read(self, out: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows: a whole tensor, or one expert of a stack."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0

    def read(self, out: torch.Tensor) -> None:
        rows_out = out if out.dim() == 2 else out.unsqueeze(0)
        for first, last in row_pieces(rows_out.shape[0], 4 * self.tensor.num_columns):
            rows_out[first:last].copy_(self.tensor.values(self.first_row + first, self.first_row + last))
            self.tensor.drop(self.first_row + first, self.first_row + last)


@dataclass(frozen=True, slots=True)
class HalvesFromPairs:
    """Query or key rows of a `llama` file, which pairs rows 2i and 2i + 1 for RoPE; Hugging Face's layout pairs rows i
    and i + dim / 2: within each head, even rows go to the first half and odd rows to the second."""

    tensor: GgufTensor
    num_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.entry.shape

    def read(self, out: torch.Tensor) -> None:
        head_rows = self.shape[0] // self.num_heads
        if len(self.shape) == 1:
            stored = self.tensor.values(0, 1).view(self.num_heads, head_rows // 2, 2)
            out.copy_(stored.transpose(1, 2).reshape(-1))
            self.tensor.drop(0, 1)
            return
        for first, last in row_pieces(self.shape[0], 4 * self.tensor.num_columns, multiple=head_rows):
            stored = self.tensor.values(first, last).view(-1, head_rows // 2, 2, self.tensor.num_columns)
            out[first:last].copy_(stored.transpose(1, 2).reshape(last - first, -1))
            self.tensor.drop(first, last)


@dataclass(frozen=True, slots=True)
class JoinedKeyValue:
    """`kv_b_proj` from the two tensors that newer files split it into, the key's transposed for absorbed attention.

    Stored: keys [heads, latent, nope], values [heads, v, latent]. Wanted: [heads · (nope + v), latent].
    """

    tensor: GgufTensor
    value: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        num_heads, num_latent, num_nope = self.tensor.entry.shape
        return num_heads * (num_nope + self.value.entry.shape[1]), num_latent

    def read(self, out: torch.Tensor) -> None:
        num_heads, num_latent, num_nope = self.tensor.entry.shape
        num_v = self.value.entry.shape[1]
        for head in range(num_heads):
            first = head * (num_nope + num_v)
            keys = self.tensor.values(head * num_latent, (head + 1) * num_latent)
            out[first : first + num_nope].copy_(keys.T)
            values = self.value.values(head * num_v, (head + 1) * num_v)
            out[first + num_nope : first + num_nope + num_v].copy_(values)
        self.tensor.drop(0, self.tensor.num_rows)
        self.value.drop(0, self.value.num_rows)
