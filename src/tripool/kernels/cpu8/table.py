"""The kernel table of the 8-bit CPU kernels, and a whole forward step of the network as one call into C."""

from collections.abc import Sequence
from ctypes import addressof
from functools import partial

import torch

from tripool.kernels.batch import Piece
from tripool.kernels.cpu8 import library, sublayers
from tripool.kernels.cpu8.draft import Draft8, entry, layer
from tripool.kernels.cpu8.native_batch import NativeDraws, NativePieces
from tripool.kernels.cpu8.pack import PackedNorm
from tripool.kernels.cpu8.sublayers import Linear8
from tripool.kernels.table import DraftOp, Draw, KernelTable, StackParts
from tripool.kernels.weight_store import FRESH, WeightStore
from tripool.kernels.weights import INT8


class Stack8:
    def __init__(self, parts: StackParts) -> None:
        assert isinstance(parts.head, Linear8)
        norm, cos_sin = PackedNorm(parts.norm.gain, parts.norm.eps), torch.view_as_real(parts.cos_sin).flatten(1)
        layers = (library.Layer * len(parts.layers))(*(layer(*sublayers) for sublayers in parts.layers))
        self._keep = (parts, norm, cos_sin, layers)
        self.struct = library.Stack(entry(parts.embed, cos_sin), len(layers), layers, norm.struct, parts.head.struct)
        self.at, self._width = addressof(self.struct), parts.embed.shape[1]
        self._run, self._guess = library.library().tripool_step, library.library().tripool_step_guess

    def step(
        self, pieces: Sequence[Piece], kv: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, list[int]]:
        assert kv.is_contiguous() and kv.dtype == torch.float32
        native, choosing = NativePieces(pieces), NativeDraws(rows, draws)
        hidden = torch.empty(native.num_rows, self._width)
        self._run(
            self.at,
            native.tokens,
            kv.data_ptr(),
            kv.stride(0),
            native.address,
            choosing.address,
            hidden.data_ptr(),
        )
        return hidden, choosing.chosen()

    def step_and_guess(
        self, piece: Piece, kv: torch.Tensor, draws: Sequence[Draw], draft: DraftOp
    ) -> tuple[list[int], int]:
        assert isinstance(draft, Draft8) and piece.decode and kv.is_contiguous() and kv.dtype == torch.float32
        native, num_rows = NativePieces((piece,)), len(piece.tokens)
        choosing = NativeDraws((0, 1, 2), draws, num_rows)
        self._guess(self.at, draft.at, native.tokens, kv.data_ptr(), kv.stride(0), native.address, choosing.address)
        *chosen, guess = choosing.chosen()
        return chosen[:num_rows], guess


def cpu8_table(store: WeightStore) -> KernelTable:
    return KernelTable(
        name="cpu-int8",
        rms_norm=sublayers.rms_norm,
        linear=partial(sublayers.Linear8, store=store),
        join=partial(sublayers.Join8, store=store),
        gqa=partial(sublayers.Gqa8, store=store),
        mla=partial(sublayers.Mla8, store=store),
        mlp=partial(sublayers.Mlp8, store=store),
        moe=partial(sublayers.Moe8, store=store),
        draft=Draft8,
        stack=Stack8,
        over=cpu8_table,
        linear_of_scales=lambda weight, scales: sublayers.Linear8(weight, None, scales, store),
        stored=INT8,
    )


CPU8 = cpu8_table(FRESH)
