"""The kernel table: one set of layer halves per kind of device, chosen once. Model code never asks where it runs.

A half takes the residual stream x [rows, hidden] and adds to it in place. `plain_table` makes a table from small ops
(see `tripool.kernels.ops`); a table may as well fuse a whole half into one call.
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
        """Writes the rows' KV into kv [slots, width], then attends; adds to x."""
        ...

    @property
    def num_bytes(self) -> int: ...


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
    """What a draft goes through: an MTP layer with what it shares with the network around it."""

    embed: torch.Tensor
    """[vocab, hidden]."""
    cos_sin: torch.Tensor
    """complex64 [positions, rope / 2]."""
    join: JoinOp
    attention: AttentionSublayer
    mlp: MlpSublayer
    norm: Norm
    head: LinearOp
    """Of the tokens that a draft may be."""


class DraftOp(Protocol):
    """`batch`: the successors at their own positions; `hidden`: the final states of the tokens before them."""

    def hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """The layer's own final state of every row. Writes the rows' KV, as `logits` does."""
        ...

    def logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """What the layer says after these rows, given in rising order."""
        ...


Draw = tuple[float, int]
"""How a token is chosen from logits as they are: the temperature, 0 for the largest, and the key of the noise."""


@runtime_checkable
class ChoosingDraftOp(Protocol):
    """A draft that can go on to the tokens themselves: small models spend as long on the way there as in the layer."""

    def choose(
        self,
        pieces: Sequence[Piece],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
    ) -> list[int]:
        """What each draw chooses from the `logits` of its row. Pieces in prompt form come first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    """The whole network, from tokens to logits."""

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
        """Final normed states of all rows, and what each draw chooses from the logits of its row. Writes the rows' KV
        into kv [layers or more, slots, width]. Pieces in prompt form come first; no row is drawn from twice."""
        ...

    def step_and_guess(
        self, piece: Piece, kv: torch.Tensor, draws: Sequence[Draw], draft: DraftOp
    ) -> tuple[list[int], int]:
        """As `step` for one piece in decode form, of one token or of one and a draft of the next; and then, with the
        tokens that this has settled, as `draft.choose`. `draws`: of the next three tokens.

        Returns what is chosen after each row, and the new draft: after the second row, if the first one says what the
        draft said, else after the first. The draft's KV is the layer after the network's own.
        """
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
    """The same table with what it packs kept on a shelf; None: it packs nothing worth keeping."""
    linear_of_scales: Callable[[torch.Tensor, torch.Tensor], LinearOp] | None = None
    """As `linear`, of a weight and its scales."""
    stored: str | None = None
    """The kind of eight bits whose scales it is told (`kernels/weights.py`); None: it computes with the floats."""
    stack: Callable[[StackParts], StackOp] | None = None
    """A whole step in one call, the same to the bit as half after half; None: there is no such call."""


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
