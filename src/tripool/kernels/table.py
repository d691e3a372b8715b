"""Kernel table: one set of sublayers per device, chosen once. Model code never asks on which device it runs.

A sublayer takes the residual stream x [rows, hidden] and adds to it in place. `plain_table` builds a table from small
operations (see `tripool.kernels.ops`); a table may also fuse a whole sublayer into one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from tripool.kernels.batch import Batch, Piece
from tripool.kernels.cpu.ops import cpu_ops
from tripool.kernels.ops import REFERENCE_OPS, LinearOp, Ops
from tripool.kernels.ref.sublayers import Draft, GroupedAttention, Join, LatentAttention, Mlp, MoeMlp
from tripool.kernels.weight_store import FRESH, WeightStore
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm


class AttentionSublayer(Protocol):
    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        """Write the rows' KV into kv [slots, width], attend, and add to x."""
        ...

    @property
    def num_bytes(self) -> int: ...


@runtime_checkable
class AttentionParts(Protocol):
    """An attention sublayer in three calls, of which only the second needs to know the sequences of the batch."""

    def before(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Write the rows' KV and return their queries."""
        ...

    def attend(self, q: torch.Tensor, batch: Batch, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Write what the queries find into `out` [rows, out_width]."""
        ...

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Project and add to x."""
        ...

    @property
    def out_width(self) -> int: ...


class MlpSublayer(Protocol):
    def __call__(self, x: torch.Tensor) -> None: ...
    @property
    def num_bytes(self) -> int: ...


class JoinOp(Protocol):
    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """Parts of the MTP layer, including those it shares with the main model."""

    embed: torch.Tensor
    """[vocab, hidden]."""
    cos_sin: torch.Tensor
    """complex64 [positions, rope / 2]."""
    join: JoinOp
    attention: AttentionSublayer
    mlp: MlpSublayer
    norm: Norm
    head: LinearOp
    """Output head over the tokens that may be drafted."""


class DraftOp(Protocol):
    """`batch`: the next tokens at their own positions; `hidden`: final states of the tokens before them."""

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Final state of every row. Writes the rows' KV, as `logits` does."""
        ...

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits of these rows, given in rising order."""
        ...


Draw = tuple[float, int]
"""How a token is sampled from logits: the temperature (0: argmax) and the key of the noise."""


@runtime_checkable
class ChoosingDraftOp(Protocol):
    """A draft operation that also samples: for small models, returning logits costs as much as the layer."""

    def choose(
        self,
        pieces: Sequence[Piece],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> list[int]:
        """The token that each draw samples from the `logits` of its row. Prompt-form pieces come first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    """Parts of the whole network, from tokens to logits."""

    embed: torch.Tensor
    """[vocab, hidden]."""
    cos_sin: torch.Tensor
    """complex64 [positions, rope / 2]."""
    layers: Sequence[tuple[AttentionSublayer, MlpSublayer]]
    norm: Norm
    head: LinearOp


class StackOp(Protocol):
    def step(
        self, pieces: Sequence[Piece], kv: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns the normed final states of all rows and one sampled token per draw. Writes the rows' KV into kv
        [layers or more, slots, width]. Prompt-form pieces come first; each row has at most one draw."""
        ...

    def step_and_guess(
        self, piece: Piece, kv: torch.Tensor, draws: Sequence[Draw], draft: DraftOp
    ) -> tuple[list[int], int]:
        """As `step` for one piece in decode form, of one token or of one and a draft of the next, followed by
        `draft.choose` with the accepted tokens. `draws`: of the next three tokens.

        Returns the token sampled after each row, and the new draft: after the second row if the first row's token
        equals the draft, else after the first. The draft's KV is the layer after the network's own."""
        ...


@dataclass(frozen=True, slots=True)
class KernelTable:
    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor | None], LinearOp]
    join: Callable[[JoinWeights], JoinOp]
    gqa: Callable[[GqaWeights], AttentionSublayer]
    mla: Callable[[LatentWeights], AttentionSublayer]
    mlp: Callable[[MlpWeights], MlpSublayer]
    moe: Callable[[MoeWeights], MlpSublayer]
    draft: Callable[[DraftParts], DraftOp]
    over: Callable[[WeightStore], KernelTable] | None = None
    """The same table with its packed weights in a weight store; None: it packs nothing."""
    linear_of_scales: Callable[[torch.Tensor, torch.Tensor], LinearOp] | None = None
    """As `linear`, for a weight and its scales."""
    stored: str | None = None
    """The 8-bit type whose scales the table uses (`kernels/weights.py`); None: it computes with floats."""
    stack: Callable[[StackParts], StackOp] | None = None
    """A whole step in one call, bit for bit equal to the sublayers one by one; None: not available."""


def plain_table(name: str, ops: Ops, over: Callable[[WeightStore], KernelTable] | None = None) -> KernelTable:
    return KernelTable(
        name=name,
        rms_norm=ops.rms_norm,
        linear=ops.linear,
        join=partial(Join, ops),
        gqa=partial(GroupedAttention, ops),
        mla=partial(LatentAttention, ops),
        mlp=partial(Mlp, ops),
        moe=partial(MoeMlp, ops),
        draft=partial(Draft, ops),
        over=over,
    )


REFERENCE = plain_table("reference", REFERENCE_OPS)


def cpu_table(store: WeightStore) -> KernelTable:
    return plain_table("cpu-float32", cpu_ops(store), cpu_table)


CPU = cpu_table(FRESH)
