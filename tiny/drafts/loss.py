"""How far drafts are from what they foretell."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

TEMPERATURE = 0.7
"""At which acceptance is reckoned: that of an ordinary request."""
_LIKELIEST = 24


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over places."""

    divergence: float
    """Kullback-Leibler, in nats: of the network's distribution from the draft's."""
    acceptance: float
    """Chance that a draft comes true at `TEMPERATURE`."""
    agreement: float
    """Where both find the same token likeliest: acceptance at temperature 0."""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        true = f"{self.acceptance:.4f} at temperature {TEMPERATURE:g} and {self.agreement:.4f} at 0"
        return f"divergence {self.divergence:.4f}, drafts come true {true}"


@dataclass(frozen=True, slots=True)
class Found:
    """The same as sums, on the device, and over how many places."""

    divergence: torch.Tensor
    acceptance: torch.Tensor
    agreement: torch.Tensor
    places: torch.Tensor

    def __add__(self, other: Found) -> Found:
        return Found(
            self.divergence + other.divergence,
            self.acceptance + other.acceptance,
            self.agreement + other.agreement,
            self.places + other.places,
        )

    def loss(self) -> torch.Tensor:
        """Divergence draws the whole distribution near; acceptance is what it is for."""
        return (self.divergence - self.acceptance) / self.places.clamp(min=1)

    def scores(self) -> Scores:
        sums = torch.stack([self.divergence, self.acceptance, self.agreement, self.places]).tolist()
        return Scores(*(one / max(sums[3], 1) for one in sums[:3]))


def compare(network: torch.Tensor, draft: torch.Tensor) -> Found:
    """Logits [places, tokens] of the two."""
    network, draft = network.float(), draft.float()
    said = network.log_softmax(-1)
    divergence = (said.exp() * (said - draft.log_softmax(-1))).sum()
    agreement = (network.argmax(-1) == draft.argmax(-1)).sum(dtype=torch.float32)
    places = torch.full((), float(len(network)), device=network.device)
    return Found(divergence, acceptance(network, draft).sum(), agreement, places)


def acceptance(network: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """[places]: the chance that both choose the same token when both draw with the same noise, as the engine does.

    With Gumbel noise token i wins in both with probability 1 / sum_j max(p_j / p_i, q_j / q_i). All but the network's
    likeliest tokens count as one that never agrees.
    """
    p, q = (network / TEMPERATURE).softmax(-1), (draft / TEMPERATURE).softmax(-1)
    p, which = p.topk(min(_LIKELIEST, p.shape[-1]), -1)
    q = q.gather(-1, which)
    p_rest, q_rest = ((1 - one.sum(-1, keepdim=True)).clamp(min=0) for one in (p, q))
    p, q = p.clamp(min=1e-9), q.clamp(min=1e-9)
    others = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None]).sum(-1)
    return (1 / (others + torch.maximum(p_rest / p, q_rest / q))).sum(-1)
