"""Every expert on every token, weighed by zeros, is the same as sending each token to its experts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.close import assert_close
from train.small import small_config
from tripool.kernels.ref.experts import Experts as RoutedExperts
from tripool.kernels.ref.route import RoutePlan, route
from tripool.kernels.ref.swiglu import swiglu
from tripool.models.load import arch_of
from tripool.train.experts import Experts, best, gates


@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_the_best_are_those_of_a_sort_that_keeps_the_order_of_equals(seed: int, count: int, ties: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(4, (5, 8), generator=rng).float() if ties else torch.randn(5, 8, generator=rng)
    first = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(best(values, count), torch.zeros(5, 8, dtype=torch.bool).scatter_(1, first, True))


@given(st.integers(0, 10_000), st.sampled_from([(1, 1), (4, 2), (2, 1)]), st.booleans())
def test_gates_are_what_the_router_decides(seed: int, groups: tuple[int, int], normalise: bool) -> None:
    plan = RoutePlan(4, "sigmoid", *groups, group_top=2, normalise=normalise, scaling=2.5)
    rng = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(6, 16, generator=rng), 0.3 * torch.randn(16, generator=rng)
    weights, chosen = gates(logits, bias, plan)
    experts, expected = route(logits, bias, plan)
    assert torch.equal(chosen, torch.zeros(6, 16, dtype=torch.bool).scatter_(1, experts, True))
    torch.testing.assert_close(weights, torch.zeros(6, 16).scatter_(1, experts, expected))


def _experts() -> Experts:
    arch = arch_of(small_config().model, "small")
    assert arch.moe is not None
    experts = Experts(arch, arch.moe)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
        experts.bias.copy_(0.2 * torch.randn(experts.bias.shape, generator=rng))
    return experts


def _routed(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    shape = experts.shape
    gate, up = experts.gate_up.weight.detach().chunk(2)
    down = experts.down.weight.detach()
    parts = [part[: experts.wide].unflatten(0, (shape.experts, -1)) for part in (gate, up)]
    routed = RoutedExperts(torch.cat(parts, 1), down[:, : experts.wide].unflatten(1, (shape.experts, -1)).movedim(1, 0))
    chosen, weights = route(x @ experts.router.weight.detach().T, experts.bias, shape.route)
    shared = swiglu(torch.cat([x @ part[experts.wide :].T for part in (gate, up)], -1)) @ down[:, experts.wide :].T
    return routed(x, chosen, weights) + shared


def test_wide_experts_are_routed_experts() -> None:
    experts = _experts()
    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, 33, dtype=torch.bool)
    out, load = experts(x, real)
    expected = _routed(experts, x.flatten(0, 1))
    assert expected.std() > 0.1
    assert_close(out.detach().flatten(0, 1), expected)
    chosen, _ = route(x.flatten(0, 1) @ experts.router.weight.detach().T, experts.bias, experts.shape.route)
    assert load.tolist() == torch.bincount(chosen.flatten(), minlength=experts.shape.experts).tolist()


def test_only_tokens_of_documents_count_as_load() -> None:
    experts = _experts()
    real = torch.zeros(1, 10, dtype=torch.bool)
    real[0, :3] = True
    _, load = experts(torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(1)), real)
    assert load.sum() == 3 * experts.shape.route.top_k


def test_balancing_brings_loads_toward_their_mean() -> None:
    """Scores stay as they are, with a favourite among them: the biases alone do it."""
    experts = _experts()
    plan = experts.shape.route
    logits = torch.randn(400, experts.shape.experts, generator=torch.Generator().manual_seed(1))
    logits[:, 0] += 1.5
    experts.bias.zero_()

    def load() -> torch.Tensor:
        return gates(logits, experts.bias, plan)[1].sum(0).float()

    before = load()
    for _ in range(200):
        experts.balance(load(), 0.004)
    after = load()
    assert before.max() / before.mean() > 2
    assert after.max() / after.mean() < 1.15
