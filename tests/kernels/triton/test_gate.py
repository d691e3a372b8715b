"""From router scores to rows at their experts and back."""

import pytest
import torch

from tripool.kernels.ref import permute as plain
from tripool.kernels.ref import route as plain_route
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.triton import expert_blocks
from tripool.kernels.triton.expert_blocks import sort_and_plan
from tripool.kernels.triton.gate import route
from tripool.kernels.triton.permute import permute, sort_by_expert, unpermute
from tripool.kernels.triton.tilings import Narrow

V3 = RoutePlan(8, "sigmoid", groups=8, top_groups=4, group_top=2, normalise=True, scaling=2.5)
PLANS = [
    (V3, 256),
    (RoutePlan(6, "softmax", groups=8, top_groups=3, group_top=1, scaling=16.0), 160),
    (RoutePlan(3, "softmax", normalise=True), 10),
]


@pytest.mark.parametrize(("plan", "experts"), PLANS)
@pytest.mark.parametrize("biased", [False, True])
def test_route_is_the_plain_one(device, plan, experts, biased):
    logits = torch.randn(9, experts, device=device)
    bias = 0.1 * torch.randn(experts, device=device) if biased else None
    ours, theirs = route(logits, bias, plan), plain_route.route(logits, bias, plan)
    assert torch.equal(ours[0].long(), theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)


def test_a_bias_below_every_score_still_fills_all_choices_from_the_chosen_groups(device):
    experts, weights = route(torch.randn(4, 256, device=device), torch.full((256,), -3.0, device=device), V3)
    for row in experts.tolist():
        assert len(set(row)) == 8 and len({expert // 32 for expert in row}) <= 4
    torch.testing.assert_close(weights.sum(1), torch.full((4,), 2.5, device=device))


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "first", "count"),
    [(1, 1, 1, 0, 1), (16, 8, 16, 0, 16), (17, 8, 32, 8, 9), (65, 6, 5, 0, 5), (40, 8, 12, 12, 4)],
)
def test_rows_go_to_their_experts_and_come_back(device, rows, top_k, experts, first, count):
    choice = torch.randint(0, experts, (rows, top_k), dtype=torch.int32, device=device)
    ours, theirs = sort_by_expert(choice, count, first), plain.sort_by_expert(choice, count, first)
    assert torch.equal(ours.slots, theirs.slots) and torch.equal(ours.starts, theirs.starts)

    x = torch.randint(-128, 128, (rows, 48), dtype=torch.int8, device=device)
    scale = torch.rand(rows, device=device)
    out = torch.zeros(rows * top_k, 48, dtype=torch.int8, device=device), torch.zeros(rows * top_k, device=device)
    expected = plain.permute(x, scale, theirs)
    assert all(torch.equal(a, b) for a, b in zip(permute(x, scale, ours, out), expected, strict=True))

    y = torch.randn(rows * top_k, 200, device=device).to(torch.bfloat16)
    y[int(ours.starts[-1]) :] = float("nan")  # nobody's rows may hold anything
    weights = torch.rand(rows, top_k, device=device)
    back = unpermute(y, weights, ours)
    assert not back.isnan().any()
    torch.testing.assert_close(back, plain.unpermute(y, weights, theirs), rtol=2**-7, atol=1e-6)

    onto, also = (torch.randn(rows, 200, device=device).to(torch.bfloat16) for _ in range(2))
    expected = plain.unpermute(y, weights, theirs, onto.clone(), also)
    assert unpermute(y, weights, ours, onto, also) is onto
    torch.testing.assert_close(onto, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 1, 1), (1, 6, 64), (16, 8, 16), (65, 6, 5), (200, 6, 33)])
@pytest.mark.parametrize("block_m", [16, 128])
def test_one_launch_sorts_and_plans_as_several(device, monkeypatch, rows, top_k, experts, block_m):
    choice = torch.randint(0, experts, (rows, top_k), dtype=torch.int32, device=device)
    order, plan = sort_and_plan(choice, experts, Narrow(block_m))
    monkeypatch.setattr(expert_blocks, "MOST_PAIRS", 0)
    wanted, planned = sort_and_plan(choice, experts, Narrow(block_m))
    assert torch.equal(order.slots, wanted.slots) and torch.equal(order.starts, wanted.starts)
    count = int(plan.num_blocks)
    assert count == int(planned.num_blocks) <= len(plan.blocks)
    assert torch.equal(plan.blocks[:count], planned.blocks[:count])


def test_all_choices_of_one_expert_keep_their_order(device):
    expert_order = sort_by_expert(torch.full((150, 2), 3, dtype=torch.int64, device=device), 8)
    assert torch.equal(expert_order.slots.flatten().cpu(), torch.arange(300, dtype=torch.int32))
    assert expert_order.starts.tolist() == [0, 0, 0, 0, 300, 300, 300, 300, 300]
