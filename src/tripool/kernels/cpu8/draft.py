"""A whole draft in one call into C."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof

import torch

from tripool.kernels.batch import Batch
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.halves import Gqa8, Join8, Linear8, Mla8, Mlp8, Moe8
from tripool.kernels.cpu8.native_batch import native_batch
from tripool.kernels.cpu8.pack import PackedNorm
from tripool.kernels.table import DraftParts, Draw


class Draft8:
    def __init__(self, parts: DraftParts) -> None:
        join, attention, mlp, head = parts.join, parts.attention, parts.mlp, parts.head
        assert isinstance(join, Join8) and isinstance(head, Linear8)
        assert isinstance(attention, Mla8 | Gqa8) and isinstance(mlp, Moe8 | Mlp8)
        norm, turns = PackedNorm(parts.norm.gain, parts.norm.eps), torch.view_as_real(parts.turns).flatten(1)
        assert parts.embed.is_contiguous() and turns.is_contiguous()
        self._keep = (parts, norm, turns)
        self._struct = library.Draft(
            parts.embed.data_ptr(),
            turns.data_ptr(),
            turns.shape[1],
            join.at,
            attention.at if isinstance(attention, Mla8) else None,
            attention.at if isinstance(attention, Gqa8) else None,
            mlp.at if isinstance(mlp, Moe8) else None,
            mlp.at if isinstance(mlp, Mlp8) else None,
            norm.struct,
            head.struct,
        )
        self._at, self._run = addressof(self._struct), library.library().tripool_draft
        self._choose = library.library().tripool_draft_choose

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        y = torch.empty(batch.num_rows, hidden.shape[1])
        self._call(batch, hidden, kv, None, -1, y)
        return y

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        wanted = array("i", rows)
        y = torch.empty(len(wanted), self._struct.head.out)
        self._call(batch, hidden, kv, wanted.buffer_info()[0], len(wanted), y)
        return y

    def choose(
        self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> list[int]:
        hidden = hidden.contiguous()
        assert kv.is_contiguous()
        wanted, chosen = array("i", rows), array("i", rows)
        temperatures, keys = array("f", [draw[0] for draw in draws]), array("Q", [draw[1] for draw in draws])
        self._choose(
            self._at,
            batch.tokens.data_ptr(),
            hidden.data_ptr(),
            kv.data_ptr(),
            native_batch(batch),
            wanted.buffer_info()[0],
            len(wanted),
            temperatures.buffer_info()[0],
            keys.buffer_info()[0],
            chosen.buffer_info()[0],
        )
        return chosen.tolist()

    def _call(
        self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, wanted: int | None, count: int, y: torch.Tensor
    ) -> None:
        hidden = hidden.contiguous()
        assert kv.is_contiguous()
        at = native_batch(batch)
        self._run(self._at, batch.tokens.data_ptr(), hidden.data_ptr(), kv.data_ptr(), at, wanted, count, y.data_ptr())
