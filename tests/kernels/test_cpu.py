"""The float32 CPU table against the plain reference: ugly sizes, scattered blocks, poisoned memory."""

import pytest
import torch

from oracle.close import assert_close
from tripool.core import BLOCK_TOKENS
from tripool.kernels.cpu.ops import CPU_OPS as CPU
from tripool.kernels.ops import REFERENCE_OPS as REFERENCE
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.sequence_rows import SequenceRows

SPANS = [
    [(0, 1)],
    [(0, 64)],
    [(0, 65)],
    [(63, 1)],
    [(64, 1)],
    [(130, 7), (0, 3), (5, 1)],
    [(1, 200), (199, 1), (3, 64)],
]


def make_spans(shape: list[tuple[int, int]], width: int, first: int) -> tuple[list[SequenceRows], torch.Tensor, int]:
    """Spans over shuffled blocks; slots outside every context hold NaN, so that reading one shows."""
    need = [-(-(start + count) // BLOCK_TOKENS) for start, count in shape]
    order = torch.randperm(sum(need) + 2)
    kv = torch.full(((sum(need) + 2) * BLOCK_TOKENS, width), float("nan"))
    seqs, row, taken = [], 0, 0
    for (start, count), blocks in zip(shape, need, strict=True):
        if start < first:
            start = first
        table = order[taken : taken + blocks + 1].tolist()
        for position in range(first, start + count):
            kv[table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS] = torch.randn(width)
        seqs.append(SequenceRows(row, count, start, table[: -(-(start + count) // BLOCK_TOKENS)], first))
        row, taken = row + count, taken + blocks
    return seqs, kv, row


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shape", SPANS)
@pytest.mark.parametrize("form", ["attend_prompt", "attend_decode"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 10), (7, 1, 12)])
def test_grouped_attention(form, shape, heads, kv_heads, dim, first):
    seqs, kv, rows = make_spans(shape, 2 * kv_heads * dim, first)
    q = torch.randn(rows, heads, dim)
    assert_close(getattr(CPU, form)(q, kv, seqs, kv_heads, 0.3), getattr(REFERENCE, form)(q, kv, seqs, kv_heads, 0.3))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("shape", SPANS)
@pytest.mark.parametrize(
    ("heads", "rank", "nope", "rope", "v"), [(8, 128, 32, 32, 48), (3, 20, 5, 6, 17), (1, 7, 8, 2, 3)]
)
def test_latent_attention(shape, heads, rank, nope, rope, v, first):
    seqs, kv, rows = make_spans(shape, rank + rope, first)
    x, cos_sin = torch.randn(rows, 11), torch.polar(torch.ones(rows, rope // 2), torch.randn(rows, rope // 2))
    weights = MlaWeights(
        query=torch.randn(heads * (nope + rope), 11) * 0.3,
        up=torch.randn(heads, nope + v, rank) * 0.2,
        out=torch.randn(13, heads * v) * 0.2,
        out_bias=torch.randn(13),
        nope=nope,
        scale=0.2,
    )
    plain = REFERENCE.mla(weights).prompt(x, kv, seqs, cos_sin)
    assert_close(REFERENCE.mla(weights).decode(x, kv, seqs, cos_sin), plain)
    assert_close(CPU.mla(weights).prompt(x, kv, seqs, cos_sin), plain)
    assert_close(CPU.mla(weights).decode(x, kv, seqs, cos_sin), plain)


@pytest.mark.parametrize("rows", [0, 1, 3, 65])
@pytest.mark.parametrize("width", [2, 20, 576])
def test_elementwise(rows, width):
    x, weight = torch.randn(rows, width), torch.randn(width)
    assert_close(CPU.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert_close(CPU.swiglu(x), REFERENCE.swiglu(x))


@pytest.mark.parametrize(("heads", "dim", "offset"), [(1, 2, 0), (12, 64, 0), (3, 10, 4), (2, 6, 5), (5, 8, 3)])
def test_rope_turns_in_place_wherever_the_slice_starts(heads, dim, offset):
    whole = torch.randn(7, heads, dim + offset)
    cos_sin = torch.polar(torch.rand(7, dim // 2) + 0.5, torch.randn(7, dim // 2))
    expected = whole.clone()
    pairs = torch.view_as_complex(whole[..., offset:].reshape(7, heads, -1, 2).contiguous()) * cos_sin[:, None]
    expected[..., offset:] = torch.view_as_real(pairs).flatten(2)
    for table in (CPU, REFERENCE):
        ours = whole.clone()
        table.rope_(ours[..., offset:], cos_sin)
        assert_close(ours, expected)


@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows, bias):
    weight, x = torch.randn(13, 36), torch.randn(rows, 36)
    b = torch.randn(13) if bias else None
    assert_close(CPU.linear(weight, b)(x), REFERENCE.linear(weight, b)(x))


@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2), (32, 4)])
def test_experts(rows, experts, top_k):
    gate_up, down, x = torch.randn(experts, 22, 36) * 0.3, torch.randn(experts, 36, 11) * 0.3, torch.randn(rows, 36)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k)
    assert_close(CPU.experts(gate_up, down)(x, chosen, weights), REFERENCE.experts(gate_up, down)(x, chosen, weights))


def test_route_keeps_to_the_best_groups_and_weighs_without_the_bias():
    """By hand: 6 experts in 3 groups, the bias lifts group 2 over group 0."""
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0, 0.5, 0.4]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    plan = RoutePlan(top_k=2, score="sigmoid", groups=3, top_groups=1, group_top=2, normalise=True, scaling=2.0)
    experts, weights = REFERENCE.route(logits, bias, plan)
    assert sorted(experts[0].tolist()) == [4, 5]
    scores = torch.sigmoid(torch.tensor([0.5, 0.4]))
    torch.testing.assert_close(weights[0].sort(descending=True).values, 2.0 * scores / scores.sum())
