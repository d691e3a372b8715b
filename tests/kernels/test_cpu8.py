"""The 8-bit C kernels: exact integers, rows that ignore their neighbours, and the plain torch version as oracle."""

from itertools import pairwise

import pytest
import torch

from tripool.kernels import CPU8, Batch
from tripool.kernels.cpu8 import pack
from tripool.kernels.cpu8.library import library, set_threads, variants
from tripool.kernels.cpu8.pack import PANEL, _panels
from tripool.kernels.cpu8.sublayers import Linear8, Mla8, Mlp8, Moe8
from tripool.kernels.ref import int8
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.sequence_rows import SequenceRows
from tripool.kernels.table import plain_table
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm

PLAIN8 = plain_table("reference-int8", int8.REFERENCE8_OPS)
SIZES = [(1, 1), (33, 35), (160, 320), (960, 576), (576, 1536)]
BATCHES = (1, 2, 3, 7, 8, 31, 32, 64)
HIDDEN = 72


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


@pytest.fixture(params=[1, 2])
def _threads(request):
    set_threads(request.param)
    yield
    set_threads(1)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    assert ours.shape == exact.shape and not ours.isnan().any()
    return float((ours - exact).norm() / exact.norm())


def ugly_rows(count: int, width: int) -> torch.Tensor:
    """Magnitudes over many orders, with rows of zeros, of equal values and of one huge value among small ones."""
    x = torch.randn(count, width) * torch.exp(3 * torch.randn(count, 1))
    x[1] = 0.0
    x[2] = -7.25
    x[3, 0] = 1e4
    x[4] *= 1e-20
    return x


def norm(width: int = HIDDEN) -> Norm:
    return Norm(1 + 0.1 * torch.randn(width), 1e-5)


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("out", "width"), SIZES)
def test_a_linear_row_is_the_same_to_the_bit_in_any_company(out, width):
    linear, x = Linear8(torch.randn(out, width), torch.randn(out)), ugly_rows(64, width)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in BATCHES:
        assert torch.equal(linear(x[:count]), alone[:count])
    order = torch.randperm(64)
    assert torch.equal(linear(x[order]), alone[order])


@pytest.mark.parametrize(("out", "width"), SIZES)
def test_a_linear_is_its_plain_version_and_close_to_the_unrounded_one(out, width):
    weight, bias, x = torch.randn(out, width), torch.randn(out), ugly_rows(64, width)
    ours = Linear8(weight, bias)(x)
    assert relative_error(ours, int8.Linear8(weight, bias)(x)) < 1e-4
    assert relative_error(ours, x @ weight.T + bias) < 2e-2


def whole_numbers(rows: int, width: int) -> torch.Tensor:
    """Of 7 bits and a sign, the limit in every group of 64: rounding to 8 bits leaves them as they are."""
    x = torch.randint(-127, 128, (rows, width)).float()
    x[:, ::64] = 127.0
    return x


def sums_of(variant: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Products of whole numbers by one variant's kernels, which must come out whole."""
    linear = Linear8(weight)
    linear._run = library(variant).tripool_linear
    y = linear(x)
    assert torch.allclose(y, y.round(), rtol=1e-6, atol=0)
    return y.round()


@pytest.mark.parametrize("variant", variants())
def test_products_are_integers_summed_exactly(variant):
    weight, x = whole_numbers(40, 777), whole_numbers(9, 777)
    assert torch.equal(sums_of(variant, weight, x), x @ weight.T)


@pytest.mark.parametrize("variant", variants())
def test_the_largest_products_do_not_saturate(variant):
    """Every byte at its limit, in every pairing of signs: where a CPU adds pairs in 16 bits, this is the worst case."""
    width, signs = 1024, torch.tensor([1.0, -1.0])
    rows = torch.stack([torch.ones(width), -torch.ones(width), signs.repeat(width // 2), -signs.repeat(width // 2)])
    assert torch.equal(sums_of(variant, 127 * rows, 127 * rows), (127 * rows) @ (127 * rows).T)


def test_every_vector_width_gives_the_same_bits():
    """So that a request may go on at a worker with another CPU. Plain C has no fused multiply-add: only nearly so."""
    x = ugly_rows(16, 320)
    mlp = Mlp8(mlp_weights(320, 200))
    results = {}
    for variant in variants():
        mlp._run = library(variant).tripool_mlp
        results[variant] = x.clone()
        mlp(results[variant])
    vectors = [results[v] for v in results if v != "plain"]
    assert all(torch.equal(one, vectors[0]) for one in vectors)
    if vectors:
        assert relative_error(results["plain"], vectors[0]) < 1e-3


def test_norm():
    x, gain = ugly_rows(9, 100), torch.randn(100)
    plain = PLAIN8.rms_norm(x, gain, 1e-5)
    torch.testing.assert_close(CPU8.rms_norm(x, gain, 1e-5), plain, rtol=1e-5, atol=1e-6)


# ---- feed-forward ------------------------------------------------------------------------------------------------


def mlp_weights(hidden: int, width: int, *, bias: bool = False) -> MlpWeights:
    return MlpWeights(
        norm=norm(hidden),
        gate_up=torch.randn(2 * width, hidden) * 0.2,
        gate_up_bias=torch.randn(2 * width) if bias else None,
        down=torch.randn(hidden, width) * 0.2,
        down_bias=torch.randn(hidden) if bias else None,
    )


def applied(half, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    half(y)
    return y


def alone_and_together(half, x: torch.Tensor) -> torch.Tensor:
    together = applied(half, x)
    assert torch.equal(torch.cat([applied(half, row[None]) for row in x]), together)
    order = torch.randperm(len(x))
    assert torch.equal(applied(half, x[order]), together[order])
    return together


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 16, 100, 130])
def test_dense(width, bias):
    weights, x = mlp_weights(HIDDEN, width, bias=bias), torch.randn(37, HIDDEN)
    ours = alone_and_together(Mlp8(weights), x)
    assert relative_error(ours - x, applied(PLAIN8.mlp(weights), x) - x) < 2e-3


PLANS = [
    RoutePlan(top_k=3, score="softmax"),
    RoutePlan(top_k=4, score="sigmoid", groups=4, top_groups=2, group_top=2, normalise=True, scaling=2.5),
    RoutePlan(top_k=2, score="softmax", groups=2, top_groups=1, normalise=True),
]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("width", "shared"), [(16, 0), (100, 33)])
def test_experts(width, shared, plan):
    experts = 20
    weights = MoeWeights(
        norm=norm(),
        gate=torch.randn(experts, HIDDEN) * 0.2,
        gate_bias=0.1 * torch.randn(experts) if plan.score == "sigmoid" else None,
        gate_up=torch.randn(experts, 2 * width, HIDDEN) * 0.2,
        down=torch.randn(experts, HIDDEN, width) * 0.2,
        shared=mlp_weights(HIDDEN, shared) if shared else None,
        plan=plan,
    )
    x = torch.randn(64, HIDDEN)
    ours = alone_and_together(Moe8(weights), x)
    assert relative_error(ours - x, applied(PLAIN8.moe(weights), x) - x) < 2e-3


# ---- attention ---------------------------------------------------------------------------------------------------

STOP = 200
TABLE = [3, 0, 5, 1]
GQA_SHAPES = [(9, 3, 20), (4, 4, 64), (7, 1, 16), (40, 2, 8)]


def gqa_weights(heads: int, kv_heads: int, dim: int, *, full: bool) -> GqaWeights:
    rows = (heads + 2 * kv_heads) * dim
    return GqaWeights(
        norm=norm(),
        qkv=torch.randn(rows, HIDDEN) * 0.3,
        qkv_bias=torch.randn(rows) if full else None,
        out=torch.randn(HIDDEN, heads * dim) * 0.2,
        out_bias=torch.randn(HIDDEN) if full else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=0.3,
        q_norm=norm(dim) if full else None,
        k_norm=norm(dim) if full else None,
    )


def latent_weights(*, low_rank: bool) -> LatentWeights:
    heads, rank, nope, rope, v, q_rank = 5, 48, 16, 8, 12, 36
    down = (q_rank if low_rank else 0) + rank + rope
    core = MlaWeights(
        query=torch.randn(heads * (nope + rope), q_rank if low_rank else HIDDEN) * 0.2,
        up=torch.randn(heads, nope + v, rank) * 0.2,
        out=torch.randn(HIDDEN, heads * v) * 0.2,
        out_bias=torch.randn(HIDDEN),
        nope=nope,
        scale=0.2,
    )
    return LatentWeights(
        norm=norm(),
        down=torch.randn(down, HIDDEN) * 0.3,
        down_bias=torch.randn(down) if low_rank else None,
        q_norm=norm(q_rank) if low_rank else None,
        kv_norm=norm(rank),
        core=core,
    )


def batch_of(pieces: list[tuple[int, int, bool]], table: list[int], rope: int, first: int) -> Batch:
    """Pieces (start, stop, decode form) of one sequence, prompt form first."""
    prompts: list[SequenceRows] = []
    decodes: list[SequenceRows] = []
    positions: list[int] = []
    for start, stop, decode in pieces:
        seqs = decodes if decode else prompts
        row = seqs[-1].row + seqs[-1].count if seqs else 0
        seqs.append(SequenceRows(row, stop - start, start, table[: -(-stop // 64)], first))
        positions += range(start, stop)
    slots = torch.tensor([table[p // 64] * 64 + p % 64 for p in positions])
    rows = sum(seq.count for seq in prompts)
    batch = Batch(
        torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions), slots, rows, prompts, decodes
    )
    angles = torch.tensor(positions)[:, None] * torch.linspace(0.01, 1.0, rope // 2)
    batch.cos_sin = torch.polar(torch.ones_like(angles), angles)
    return batch


def run(half, x, steps, kv_width: int, rope: int, first: int, table=TABLE):
    """Steps of pieces of one sequence; memory that nobody has written is NaN. Returns every position's row, and KV."""
    kv = torch.full((6 * 64, kv_width), float("nan"))
    rows = torch.empty_like(x)
    for pieces in steps:
        batch = batch_of(pieces, table, rope, first)
        y = x[batch.positions].clone()
        half(y, batch, kv)
        rows[batch.positions] = y
    order = torch.tensor([table[p // 64] * 64 + p % 64 for p in range(first, STOP)])
    return rows[first:], kv[order]


def any_way(half, x: torch.Tensor, kv_width: int, rope: int, first: int, prompt: int):
    """The prompt to `prompt` and then one by one, against other cuts, several pieces in a step, other blocks."""
    rest = [[(p, p + 1, True)] for p in range(prompt, STOP)]
    whole = run(half, x, [[(first, prompt, False)], *rest], kv_width, rope, first)
    for cuts in ([7], [64], [65, 66], [63, 64, 100], list(range(first + 1, prompt))):
        edges = [first, *cuts, prompt]
        steps = [[(a, b, False)] for a, b in pairwise(edges)]
        other = run(half, x, [*steps, *rest], kv_width, rope, first, [2, 4, 1, 0])
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    mixed = [[(first, 65, False), (65, prompt, False), (prompt, prompt + 3, True)], [(prompt + 3, STOP, True)]]
    assert all(torch.equal(a, b) for a, b in zip(whole, run(half, x, mixed, kv_width, rope, first), strict=True))
    return whole


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), GQA_SHAPES)
def test_grouped_attention(heads, kv_heads, dim, first):
    weights, x = gqa_weights(heads, kv_heads, dim, full=first == 1), torch.randn(STOP, HIDDEN)
    rows, kv = any_way(CPU8.gqa(weights), x, 2 * kv_heads * dim, dim, first, 130)
    steps = [[(first, 130, False)], [(130, STOP, True)]]
    plain, plain_kv = run(PLAIN8.gqa(weights), x, steps, 2 * kv_heads * dim, dim, first)
    assert relative_error(kv, plain_kv) < 1e-3
    assert relative_error(rows - x[first:], plain - x[first:]) < 3e-3


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("low_rank", [False, True])
def test_latent_attention_in_both_forms(low_rank, first):
    weights, x = latent_weights(low_rank=low_rank), torch.randn(STOP, HIDDEN)
    rows, kv = any_way(Mla8(weights), x, 56, 8, first, 130)
    plain, plain_kv = run(PLAIN8.mla(weights), x, [[(first, 130, False)], [(130, STOP, True)]], 56, 8, first)
    assert relative_error(kv, plain_kv) < 1e-3
    assert relative_error(rows - x[first:], plain - x[first:]) < 3e-3


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [40, 64])
def test_join(width):
    weights = JoinWeights(left=norm(width), right=norm(width), weight=torch.randn(33, 2 * width))
    left, right = torch.randn(19, width), 9 * torch.randn(19, width)
    ours = CPU8.join(weights)
    together = ours(left, right)
    assert torch.equal(torch.cat([ours(left[i : i + 1], right[i : i + 1]) for i in range(19)]), together)
    assert relative_error(together, PLAIN8.join(weights)(left, right)) < 1e-3


@pytest.mark.parametrize("scaled", [False, True])
def test_weights_packed_in_pieces_are_those_packed_at_once(monkeypatch, scaled):
    weight = torch.randn(5 * PANEL + 3, 100)
    scales = torch.rand(len(weight)) * (torch.arange(len(weight)) % 3 > 0) if scaled else None
    at_once = _panels(weight, scales)
    monkeypatch.setattr(pack, "_ROWS_AT_ONCE", 2 * PANEL)
    assert torch.equal(_panels(weight, scales), at_once)


@pytest.mark.parametrize("count", [1, 31, 64, 100])
def test_the_first_outputs_of_a_linear(count):
    weight, bias, x = torch.randn(100, 70), torch.randn(100), torch.randn(5, 70)
    whole = Linear8(weight, bias)
    assert torch.equal(whole.first(count)(x), whole(x)[:, :count])
