"""Paged grouped-query decode attention against float64: ragged lengths, scattered pages, poisoned memory."""

import pytest
import torch

from oracle.gqa import assert_near, attended, paged_kv
from tripool.kernels.triton.gqa_decode import MAX_SPLITS, Tiling, gqa_decode

SCALE = 0.17
SHORT = Tiling(split_tokens=64)


def make(lengths, queries, heads, kv_heads, dim, device):
    """q is part of wider rows, as it is in the qkv product."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kv, table = paged_kv(lengths, 2 * kv_heads * dim)
    q = torch.randn(len(lengths) * queries, heads + 3, dim)[:, :heads]
    data = (q.to(dtype), kv.to(dtype), table, torch.tensor(lengths, dtype=torch.int32))
    return [tensor.to(device) for tensor in data]


def run(inputs, *, queries=1, **more):
    q = inputs[0]
    out = torch.full((len(q), q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype, device=q.device)
    assert gqa_decode(*inputs, SCALE, queries=queries, out=out, **more) is out
    return out


def wanted(inputs, *, queries=1, first=0, window=None):
    q, kv, table, lengths = inputs
    parts = []
    for b, length in enumerate(lengths.tolist()):
        rows = q[b * queries : (b + 1) * queries]
        skipped = max(0, queries - length)  # padding: positions before 0
        out = attended(rows[skipped:], kv, table[b], length - queries + skipped, SCALE, first=first, window=window)
        parts.append(torch.cat((out.new_zeros(skipped, out.shape[1]), out)))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[1], [64], [65, 1, 130], [0, 200, 63, 300]])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("tiling", [None, SHORT, Tiling(split_tokens=64, block_tokens=32)], ids=["", "split", "narrow"])
def test_equals_float64(device, lengths, queries, tiling):
    inputs = make(lengths, queries, 6, 2, 32, device)
    assert_near(run(inputs, queries=queries, tiling=tiling), wanted(inputs, queries=queries))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 1, 128), (7, 1, 24), (2, 1, 256), (70, 1, 16)])
def test_shapes_of_heads(device, heads, kv_heads, dim):
    inputs = make([100, 7], 2, heads, kv_heads, dim, device)
    assert_near(run(inputs, queries=2, tiling=SHORT), wanted(inputs, queries=2))


@pytest.mark.parametrize("more", [{"first": 1}, {"window": 5}, {"window": 70}, {"first": 1, "window": 100}], ids=str)
def test_first_visible_position_and_sliding_window(device, more):
    inputs = make([1, 65, 200, 2], 2, 4, 2, 16, device)
    for tiling in (None, SHORT):
        assert_near(run(inputs, queries=2, tiling=tiling, **more), wanted(inputs, queries=2, **more))


def test_contexts_of_more_than_the_most_splits(device):
    tiling = Tiling(split_tokens=16, block_tokens=16)
    inputs = make([16 * MAX_SPLITS + 1, 16 * MAX_SPLITS, 30, 16], 1, 4, 2, 16, device)
    assert_near(run(inputs, tiling=tiling), wanted(inputs))


def test_a_row_does_not_depend_on_its_company(device):
    """Alone in a narrow table, beside longer ones, and as the second or first of two queries: the same bits."""
    inputs = make([128, 400, 129], 1, 4, 2, 16, device)
    together = run(inputs, tiling=SHORT)
    q, kv, table, lengths = inputs
    for b, blocks in enumerate((2, 7, 3)):
        alone = run([q[b : b + 1], kv, table[b : b + 1, :blocks], lengths[b : b + 1]], tiling=SHORT)
        assert torch.equal(alone[0], together[b])
    pair = [q[:2], kv, table[2:], lengths[2:]]
    first, second = run(pair, queries=2, tiling=SHORT)
    assert torch.equal(first, run([q[:1], kv, table[2:], lengths[2:] - 1], tiling=SHORT)[0])
    assert torch.equal(second, run([q[1:2], kv, table[2:], lengths[2:]], tiling=SHORT)[0])


def test_large_scores_do_not_overflow(device):
    inputs = make([130], 1, 3, 1, 64, device)
    inputs[0] *= 100
    assert_near(run(inputs, tiling=SHORT), wanted(inputs))


def test_a_padding_query_beyond_the_table(device):
    """A request of one row in a step of two: the length counts a token that has no block, which only padding sees."""
    q, kv, table, lengths = make([128, 64], 2, 4, 2, 16, device)
    for b, blocks, tiling in ((0, 2, SHORT), (1, 1, None)):
        pair = [q[2 * b : 2 * b + 2], kv, table[b : b + 1, :blocks].clone(), lengths[b : b + 1] + 1]
        alone = [q[2 * b : 2 * b + 1], kv, table[b : b + 1], lengths[b : b + 1]]
        assert torch.equal(run(pair, queries=2, tiling=tiling)[0], run(alone, tiling=tiling)[0])


def test_no_requests(device):
    q, kv, table, lengths = make([1], 1, 4, 2, 16, device)
    assert gqa_decode(q[:0], kv, table[:0], lengths[:0], SCALE).shape == (0, 64)
