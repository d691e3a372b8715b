"""Norm, gate and choice in two launches against their plain forms, in float32 and in 16 bits."""

from __future__ import annotations

import pytest
import torch

from oracle.close import assert_close
from tripool.kernels.ref import route, w8a8
from tripool.kernels.ref.norm import rms_norm
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.triton.router import norm_route

V3 = RoutePlan(8, "sigmoid", groups=8, top_groups=4, group_top=2, normalise=True, scaling=2.5)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize(
    ("rows", "width", "experts", "plan"),
    [(1, 256, 64, RoutePlan(6, "softmax")), (17, 520, 10, RoutePlan(3, "softmax", normalise=True)), (5, 1300, 256, V3)],
)
def test_norm_route(device: str, kind: torch.dtype, rows: int, width: int, experts: int, plan: RoutePlan) -> None:
    x = torch.randn(rows, width, device=device).to(kind)
    gain = torch.rand(width, device=device) + 0.5
    gate = (torch.randn(experts, width, device=device) / width**0.5).to(kind)
    bias = 0.1 * torch.randn(experts, device=device) if plan.score == "sigmoid" else None
    normed, chosen, weights = norm_route(x, gain, 1e-6, gate, bias, plan)
    expected = rms_norm(x.double(), gain.double(), 1e-6)
    assert_close(normed.float(), expected.float(), within=1e-6 if kind == torch.float32 else 1e-3)
    theirs, their_weights = route.route(normed.double() @ gate.double().T, bias, plan)
    assert torch.equal(chosen.long(), theirs)
    assert_close(weights, their_weights.float())


@pytest.mark.parametrize(("rows", "width"), [(1, 256), (17, 520), (5, 1300)])
def test_normed_rows_come_in_eight_bits(device: str, rows: int, width: int) -> None:
    x, gain = torch.randn(rows, width, device=device).half(), torch.rand(width, device=device) + 0.5
    x[-1] = 0
    given = x, gain, 1e-6, torch.randn(12, width, device=device).half(), None, RoutePlan(4, "softmax")
    (ours, scales), *choice = norm_route(*given, int8=True)
    normed, *plain_choice = norm_route(*given)
    assert all(torch.equal(a, b) for a, b in zip(choice, plain_choice, strict=True))
    steps, plain_scales = w8a8.quantise_rows(normed)
    torch.testing.assert_close(scales, plain_scales, rtol=1e-6, atol=0)
    # A value that lies between two steps may go either way by the last bit of the factor.
    assert (ours.int() - steps.int()).abs().le(1).all() and (ours != steps).sum() <= 1 + ours.numel() / 1000


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    x, gain = torch.randn(37, 600, device=device), torch.ones(600, device=device)
    gate = torch.randn(12, 600, device=device)
    together = norm_route(x, gain, 1e-6, gate, None, RoutePlan(4, "softmax"))
    alone = norm_route(x[20:21].clone(), gain, 1e-6, gate, None, RoutePlan(4, "softmax"))
    for all_rows, one in zip(together, alone, strict=True):
        assert torch.equal(all_rows[20], one[0])
