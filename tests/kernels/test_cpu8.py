"""The 8-bit CPU table: exact integers, rows that ignore their neighbours, the reference within 8-bit rounding."""

import pytest
import torch

from tripool.kernels import CPU8, REFERENCE
from tripool.kernels.cpu8.fbgemm import pack, product
from tripool.kernels.cpu8.linear import Linear8, Router8, quantise_rows
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.spans import Span

SIZES = [(1, 1), (33, 35), (160, 320), (960, 576), (576, 1536)]
BATCHES = (1, 2, 3, 7, 8, 31, 32, 64)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


def ugly_rows(count: int, width: int) -> torch.Tensor:
    """Magnitudes over many orders, with rows of zeros, of equal values and of one huge value among small ones."""
    x = torch.randn(count, width) * torch.exp(3 * torch.randn(count, 1))
    x[1] = 0.0
    x[2] = -7.25
    x[3, 0] = 1e4
    x[4] *= 1e-20
    return x


@pytest.mark.parametrize(("out", "width"), SIZES)
def test_a_linear_row_is_the_same_to_the_bit_in_any_company(out, width):
    linear, x = Linear8(torch.randn(out, width), torch.randn(out)), ugly_rows(64, width)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in BATCHES:
        assert torch.equal(linear(x[:count]), alone[:count])
    order = torch.randperm(64)
    assert torch.equal(linear(x[order]), alone[order])


@pytest.mark.parametrize(("out", "width"), SIZES)
def test_activations_cost_almost_nothing_beside_the_weights(out, width):
    weight, x = torch.randn(out, width), ugly_rows(64, width)
    rounded, scales = quantise_rows(weight)
    assert relative_error(Linear8(weight)(x), x @ (rounded * scales[:, None]).T) < 1e-3
    assert relative_error(Linear8(weight)(x), x @ weight.T) < 2e-2


def test_the_largest_products_do_not_saturate():
    """Every byte at its limit, in every pairing of signs: where a CPU adds pairs in 16 bits, this is the worst case."""
    width, signs = 1024, torch.tensor([1, -1], dtype=torch.int8)
    weight = torch.stack([torch.full((width,), 127, dtype=torch.int8) * s for s in signs])
    weight = torch.cat((weight, (127 * signs).repeat(width // 2)[None]))
    packed = pack(weight, torch.ones(3))
    for steps in (torch.full((width,), 64.0), torch.full((width,), -64.0), 64.0 * signs.repeat(width // 2).float()):
        assert torch.equal(product(steps[None], packed)[0], weight.float() @ steps)


def test_products_are_integers_summed_exactly():
    weight = torch.randint(-127, 128, (40, 777), dtype=torch.int8)
    steps = torch.randint(-64, 65, (9, 777)).float()
    expected = steps.double() @ weight.double().T
    assert torch.equal(product(steps, pack(weight, torch.ones(40))).double(), expected)


def test_the_router_is_nearly_exact_and_alone_equals_in_company():
    weight, x = torch.randn(32, 320), ugly_rows(64, 320)
    router = Router8(weight)
    assert relative_error(router(x), x @ weight.T) < 2e-4
    assert torch.equal(torch.cat([router(row[None]) for row in x]), router(x))


@pytest.mark.parametrize("width", [16, 96, 100])
def test_experts(width):
    gate_up, down = torch.randn(8, 2 * width, 64) * 0.2, torch.randn(8, 64, width) * 0.2
    x = torch.randn(64, 64)
    chosen, weights = REFERENCE.route(torch.randn(64, 8), None, RoutePlan(top_k=3, score="softmax", normalise=True))
    ours, plain = CPU8.experts(gate_up, down), REFERENCE.experts(gate_up, down)
    together = ours(x, chosen, weights)
    assert relative_error(together, plain(x, chosen, weights)) < 2e-2
    alone = [ours(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(64)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("width", [2, 70, 192, 3072])
def test_the_gate_is_the_same_to_the_bit_in_any_company(width):
    x = ugly_rows(64, width)
    assert torch.equal(torch.cat([CPU8.swiglu(row[None]) for row in x]), CPU8.swiglu(x))
    torch.testing.assert_close(CPU8.swiglu(x), REFERENCE.swiglu(x), rtol=1e-5, atol=1e-30)


def spans_of(cuts: list[int], table: list[int], first: int) -> list[Span]:
    return [
        Span(0, stop - start, start, table[: -(-stop // 64)], first)
        for start, stop in zip([first, *cuts], [*cuts, 200], strict=True)
    ]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("cuts", [[7], [64], [65, 66], [63, 64, 129], list(range(2, 200))])
def test_prompt_attention_does_not_depend_on_chunks(cuts, first):
    table, kv_heads, heads, dim = [3, 0, 5, 1], 3, 9, 20
    kv, q = torch.randn(6 * 64, 2 * kv_heads * dim), torch.randn(200, heads, dim)

    def attend(cuts: list[int]) -> torch.Tensor:
        spans = spans_of(cuts, table, first)
        parts = [CPU8.attend_prompt(q[s.start : s.stop], kv, [s], kv_heads, 0.2) for s in spans]
        return torch.cat(parts)

    whole = attend([])
    assert torch.equal(attend(cuts), whole)
    span = spans_of([], table, first)[0]
    plain = REFERENCE.attend_prompt(q[first:], kv, [span], kv_heads, 0.2)
    torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_latent_attention_in_both_forms(first):
    table, heads, rank, nope, rope, v = [3, 0, 5, 1], 4, 48, 16, 8, 12
    kv, x = torch.randn(6 * 64, rank + rope), torch.randn(200, 36)
    turns = torch.polar(torch.ones(200, rope // 2), torch.randn(200, rope // 2))
    weights = MlaWeights(
        query=torch.randn(heads * (nope + rope), 36) * 0.2,
        up=torch.randn(heads, nope + v, rank) * 0.2,
        out=torch.randn(40, heads * v) * 0.2,
        out_bias=torch.randn(40),
        nope=nope,
        scale=0.2,
    )
    ours, (span,) = CPU8.mla(weights), spans_of([], table, first)
    plain = REFERENCE.mla(weights).prompt(x[first:], kv, [span], turns[first:])
    for form in (ours.prompt, ours.decode):
        whole = form(x[first:], kv, [span], turns[first:])
        assert relative_error(whole, plain) < 3e-2
        pieces = [
            form(x[s.start : s.stop], kv, [s], turns[s.start : s.stop]) for s in spans_of([5, 64, 131], table, first)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_what_an_earlier_owner_left_in_a_block_is_not_seen():
    table, kv_heads, heads, dim = [0, 1], 1, 2, 8
    kv, q = torch.randn(2 * 64, 2 * dim), torch.randn(70, heads, dim)
    (clean,) = [CPU8.attend_prompt(q, kv, [Span(0, 70, 0, table)], kv_heads, 0.3)]
    kv[70:] = float("nan")
    assert torch.equal(CPU8.attend_prompt(q, kv, [Span(0, 70, 0, table)], kv_heads, 0.3), clean)
