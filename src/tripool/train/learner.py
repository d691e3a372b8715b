"""A network that learns: passes forward and back, the optimiser's step, and the experts' balance after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tripool.train.attention import Way
from tripool.train.batch import Batch, Wanted, make_batch
from tripool.train.config import TrainConfig
from tripool.train.device import Tell, autocast, line_of
from tripool.train.network import Layer, Network
from tripool.train.plan import Optimise
from tripool.train.rows import Rows, rows_of_step


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums over a pass, still on the device."""

    next: torch.Tensor
    after_next: torch.Tensor
    loads: list[torch.Tensor]


def token_losses(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In float32, whatever the product was computed in."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="none")


Each = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`token_losses`, or a compiled form of it."""


def losses(network: Network, batch: Batch, each: Each = token_losses) -> Losses:
    def weighted(hidden: torch.Tensor, target: Wanted) -> torch.Tensor:
        found = each(hidden.flatten(0, 1), network.head, target.tokens.flatten())
        return (found * target.weights.flatten()).sum()

    states = network(batch.tokens, batch.sight, batch.real)
    next_loss = weighted(states.hidden, batch.next)
    after = next_loss.new_zeros(()) if states.mtp is None else weighted(states.mtp, batch.after_next)
    return Losses(next_loss, after, states.loads)


@dataclass(frozen=True, slots=True)
class Found:
    """What a step found."""

    loss: float
    mtp_loss: float
    grad_norm: float
    load: float
    """The busiest expert's load over the mean, in the layer where that is worst."""


class Step:
    """A step on its way: what it finds is copied as it comes, so that reading it never waits for a later step."""

    def __init__(self, *values: torch.Tensor) -> None:
        found = torch.stack(values).detach()
        self._event: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            self._values = torch.empty(len(values), pin_memory=True)
            self._values.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = found

    def found(self) -> Found:
        if self._event is not None:
            self._event.synchronize()
        return Found(*self._values.tolist())


class Learner:
    def __init__(self, config: TrainConfig, network: Network, way: Way, rows: Rows) -> None:
        self._plan, self._prompt_loss = config.optimise, config.data.prompt_loss
        self.network, self.way, self._rows = network, way, rows
        self.device = network.embed.device
        self.optimiser = adamw(config.optimise, network, network)
        self._each: Each = token_losses

    def compile(self, tell: Tell) -> None:
        """Layers of one shape share what is compiled. Tried on the first step's rows, which are not learned from."""
        layers = [one for one in self.network.modules() if isinstance(one, Layer)]
        for layer in layers:
            layer.compile(dynamic=False)
        self._each = torch.compile(token_losses, dynamic=False)
        try:
            one = torch.ones((), device=self.device)
            self._pass(self.batches(0)[0], one, one)
        except (RuntimeError, ImportError, OSError) as error:  # no compiler, or none for this torch
            tell(f"not compiled: {line_of(error)}")
            self._each = token_losses
            for layer in layers:
                layer._compiled_call_impl = None
        self.optimiser.zero_grad(set_to_none=True)

    def batches(self, step: int) -> list[Batch]:
        plan = self._plan
        numbers = rows_of_step(len(self._rows), plan.rows_per_step, step, plan.seed).to(self.device)
        parts = numbers.split(plan.rows_per_pass)
        return [make_batch(self._rows, part, self._prompt_loss, self.way.sight) for part in parts]

    def step(self, step: int, lr: float, bias_rate: float) -> Step:
        batches = self.batches(step)
        total, total_after = (
            torch.stack([getattr(batch, which).weights.sum() for batch in batches]).sum().clamp(min=1)
            for which in ("next", "after_next")
        )
        found = [self._pass(batch, total, total_after) for batch in batches]
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._plan.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        loads = [torch.stack(parts).sum(0) for parts in zip(*(one.loads for one in found), strict=True)]
        for experts, load in zip(self.network.experts(), loads, strict=True):
            experts.balance(load, bias_rate)
        uneven = [load.max() / load.mean() for load in loads] or [norm.new_ones(())]
        main = torch.stack([one.next for one in found]).sum() / total
        after = torch.stack([one.after_next for one in found]).sum() / total_after
        return Step(main, after, norm, torch.stack(uneven).max())

    def _pass(self, batch: Batch, total: torch.Tensor, total_after: torch.Tensor) -> Losses:
        with autocast(self.device):
            found = losses(self.network, batch, self._each)
            loss = found.next / total + self._plan.mtp_weight * found.after_next / total_after
        loss.backward()
        return Losses(found.next.detach(), found.after_next.detach(), found.loads)


def adamw(plan: Optimise, network: Network, learning: nn.Module) -> torch.optim.AdamW:
    """Of `learning`: the network itself, or a part of it."""
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for weight in learning.parameters():
        (decayed if weight.ndim > 1 and weight is not network.embed else others).append(weight)
    groups = [{"params": decayed, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = network.embed.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(plan.beta_1, plan.beta_2), fused=fused)
