"""The MTP layer, from tokens to drafts, as one call into C."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof

import torch

from tripool.kernels.batch import Batch, Piece
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.native_batch import NativeDraws, NativePieces, native_batch
from tripool.kernels.cpu8.pack import PackedNorm
from tripool.kernels.cpu8.sublayers import Gqa8, Join8, Linear8, Mla8, Mlp8, Moe8
from tripool.kernels.table import AttentionSublayer, DraftParts, Draw, MlpSublayer


def entry(embed: torch.Tensor, cos_sin: torch.Tensor) -> library.Entry:
    """Points into both tensors; `cos_sin`: float32 [positions, rope], cosine and sine interleaved."""
    assert embed.is_contiguous() and cos_sin.is_contiguous()
    return library.Entry(embed.data_ptr(), cos_sin.data_ptr(), embed.shape[1], cos_sin.shape[1], len(cos_sin))


def layer(attention: AttentionSublayer, mlp: MlpSublayer) -> library.Layer:
    assert isinstance(attention, Mla8 | Gqa8) and isinstance(mlp, Moe8 | Mlp8)
    return library.Layer(
        attention.at if isinstance(attention, Mla8) else None,
        attention.at if isinstance(attention, Gqa8) else None,
        mlp.at if isinstance(mlp, Moe8) else None,
        mlp.at if isinstance(mlp, Mlp8) else None,
    )


class Draft8:
    def __init__(self, parts: DraftParts) -> None:
        join, head = parts.join, parts.head
        assert isinstance(join, Join8) and isinstance(head, Linear8)
        norm, cos_sin = PackedNorm(parts.norm.gain, parts.norm.eps), torch.view_as_real(parts.cos_sin).flatten(1)
        self._keep = (parts, norm, cos_sin)
        self._struct = library.Draft(
            entry(parts.embed, cos_sin), join.at, layer(parts.attention, parts.mlp), norm.struct, head.struct
        )
        self.at, self._run = addressof(self._struct), library.library().tripool_draft
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
        self,
        pieces: Sequence[Piece],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> list[int]:
        hidden = hidden.contiguous()
        assert kv.is_contiguous()
        native, choosing = NativePieces(pieces, first=1), NativeDraws(rows, draws)
        tokens, at = native.tokens, native.address
        self._choose(self.at, tokens, hidden.data_ptr(), kv.data_ptr(), at, choosing.address)
        return choosing.chosen()

    def _call(
        self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, wanted: int | None, count: int, y: torch.Tensor
    ) -> None:
        hidden = hidden.contiguous()
        assert kv.is_contiguous()
        at = native_batch(batch)
        self._run(self.at, batch.tokens.data_ptr(), hidden.data_ptr(), kv.data_ptr(), at, wanted, count, y.data_ptr())
