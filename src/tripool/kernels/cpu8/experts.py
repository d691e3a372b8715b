"""Routed experts with 8-bit weights; each runs on its own tokens only."""

import torch

from tripool.kernels.cpu8.elementwise import swiglu
from tripool.kernels.cpu8.fbgemm import pack, product
from tripool.kernels.cpu8.linear import joined, quantise_rows, step_of, two_parts


class Experts8:
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = [pack(*quantise_rows(weight)) for weight in gate_up]
        self._down = [pack(*quantise_rows(weight)) for weight in down]
        self.num_bytes = gate_up.numel() + down.numel() + 4 * len(gate_up) * (gate_up.shape[1] + down.shape[1])

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, top_k = experts.shape
        order, parts = _by_expert(experts)
        x = x.index_select(0, order // top_k)
        inner = swiglu(_run(x, self._gate_up, parts))
        out = _run(inner, self._down, parts).mul_(weights.flatten().index_select(0, order)[:, None])
        return torch.empty_like(out).index_copy_(0, order, out).view(rows, top_k, -1).sum(1)


def _run(x: torch.Tensor, packed: list[torch.ScriptObject], parts: list[tuple[int, slice]]) -> torch.Tensor:
    """Each slice of x through its own expert."""
    step = step_of(x)
    out = [joined(product(two_parts(x[part], step[part]), packed[expert]), step[part]) for expert, part in parts]
    return torch.cat(out)


def _by_expert(experts: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, slice]]]:
    """Order of the (token, choice) pairs by expert, and each hit expert's slice of it."""
    flat, order = experts.flatten().sort(stable=True)
    hit, counts = flat.unique_consecutive(return_counts=True)
    parts, start = [], 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        parts.append((expert, slice(start, start + count)))
        start += count
    return order, parts
