"""The operations from which plain sublayers are built; signatures and semantics are those of `kernels/ref`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tripool.kernels.ref import attention, experts, linear, mla, norm, rope, route, swiglu
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.sequence_rows import SequenceRows

Attend = Callable[[torch.Tensor, torch.Tensor, list[SequenceRows], int, float], torch.Tensor]


class LinearOp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def first(self, count: int) -> LinearOp:
        """The same operation restricted to the first outputs, sharing memory."""
        ...

    @property
    def num_bytes(self) -> int: ...


class MlaOp(Protocol):
    def prompt(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor: ...
    def decode(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor: ...
    @property
    def num_bytes(self) -> int: ...


class ExpertsOp(Protocol):
    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Ops:
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope_: Callable[[torch.Tensor, torch.Tensor], None]
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor | None], LinearOp]
    router: Callable[[torch.Tensor], LinearOp]
    """The router's linear layer: never quantised, because its result selects experts."""
    experts: Callable[[torch.Tensor, torch.Tensor], ExpertsOp]
    route: Callable[[torch.Tensor, torch.Tensor | None, RoutePlan], tuple[torch.Tensor, torch.Tensor]]
    attend_prompt: Attend
    attend_decode: Attend
    mla: Callable[[MlaWeights], MlaOp]


REFERENCE_OPS = Ops(
    rms_norm=norm.rms_norm,
    rope_=rope.rope_,
    swiglu=swiglu.swiglu,
    linear=linear.Linear,
    router=linear.Linear,
    experts=experts.Experts,
    route=route.route,
    attend_prompt=attention.attend_prompt,
    attend_decode=attention.attend_decode,
    mla=mla.Mla,
)
