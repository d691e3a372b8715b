"""Paged latent attention against plain torch: ragged lengths, scattered pages, poisoned memory, every way to cut it."""

import pytest
import torch

from tripool.kernels.ref import paged
from tripool.kernels.triton.mla_decode import HOPPER, Tiling, choose_splits, choose_tiling, mla_decode

ROWS = Tiling("rows", block_rows=16, num_warps=4)
SWAPPED = Tiling("swapped", block_rows=16, num_warps=4)


def make(lengths, queries, heads, rank, rope, device, *, poison=float("nan")):
    """Pages in shuffled order; slots that no request sees, and table entries past a length, hold poison."""
    need = [-(-length // 64) for length in lengths]
    order = torch.randperm(sum(need) + 3).tolist()
    kv = torch.full((len(order), 64, rank + rope), poison)
    table = torch.full((len(lengths), max(*need, 1) + 1), len(order) + 10**6, dtype=torch.int32)
    for b, length in enumerate(lengths):
        table[b, : need[b]] = torch.tensor([order.pop() for _ in range(need[b])], dtype=torch.int32)
        for position in range(length):
            kv[table[b, position // 64], position % 64] = torch.randn(rank + rope)
    q = torch.randn(len(lengths), queries, heads, rank + rope)
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter cannot multiply bfloat16
    data = (q.to(dtype), kv.to(dtype), table, torch.tensor(lengths, dtype=torch.int32))
    return [tensor.to(device) for tensor in data]


def run(inputs, rank, tiling, splits):
    q = inputs[0]
    out = torch.full((*q.shape[:3], rank), float("nan"), dtype=q.dtype, device=q.device)
    assert mla_decode(*inputs, 0.07, rank=rank, tiling=tiling, splits=splits, out=out) is out
    return out


def close(ours, plain):
    assert not ours.isnan().any()
    error = (ours.double() - plain.double()).norm() / plain.double().norm()
    assert error < (1e-2 if ours.dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("lengths", [[1], [64], [65, 1, 130], [0, 200, 63]])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiling", [ROWS, SWAPPED], ids=["rows", "swapped"])
def test_equals_plain_torch(device, lengths, queries, splits, tiling):
    inputs = make(lengths, queries, 5, 64, 16, device)
    close(run(inputs, 64, tiling, splits), paged.mla_decode(*inputs, 0.07, rank=64))


@pytest.mark.parametrize("tiling", [ROWS, SWAPPED], ids=["rows", "swapped"])
def test_heads_beyond_one_block_of_rows(device, tiling):
    inputs = make([100, 7], 2, 19, 64, 16, device)
    close(run(inputs, 64, tiling, 2), paged.mla_decode(*inputs, 0.07, rank=64))


def test_size_of_deepseek(device):
    inputs = make([70, 1], 2, 16, 512, 64, device)
    for tiling in (ROWS, SWAPPED):
        close(run(inputs, 512, tiling, 2), paged.mla_decode(*inputs, 0.07))


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_tiles_smaller_and_larger_than_a_page(device, block_tokens):
    inputs = make([200, 33], 1, 4, 64, 16, device)
    for kind in ("rows", "swapped"):
        tiling = Tiling(kind, block_rows=16, block_tokens=block_tokens, num_warps=4)
        close(run(inputs, 64, tiling, 2), paged.mla_decode(*inputs, 0.07, rank=64))


def test_large_scores_do_not_overflow(device):
    inputs = make([130], 1, 3, 64, 16, device)
    inputs[0] *= 100
    close(run(inputs, 64, ROWS, 2), paged.mla_decode(*inputs, 0.07, rank=64))


def test_padding_gets_zeros(device):
    inputs = make([0, 0], 2, 3, 64, 16, device)
    for splits in (1, 2):
        assert run(inputs, 64, ROWS, splits).eq(0).all()
    inputs = make([1], 2, 3, 64, 16, device)  # the first of two queries sees nothing, the second itself
    out = run(inputs, 64, SWAPPED, 1)
    assert out[0, 0].eq(0).all()
    torch.testing.assert_close(out[0, 1], inputs[1][inputs[2][0, 0], 0, :64].expand(3, -1))


def test_no_requests(device):
    inputs = make([1], 1, 3, 64, 16, device)
    inputs[0], inputs[2], inputs[3] = inputs[0][:0], inputs[2][:0], inputs[3][:0]
    assert mla_decode(*inputs, 1.0, rank=64).shape == (0, 1, 3, 64)


def test_cut_is_chosen_by_shape():
    assert choose_tiling(torch.empty(1, 1, 16, 576), 512).kind == "swapped"
    assert choose_tiling(torch.empty(1, 2, 16, 576), 512).block_rows == 32
    assert choose_tiling(torch.empty(1, 1, 128, 576), 512).kind == "rows"


@pytest.mark.parametrize(
    ("requests", "row_blocks", "max_tokens", "splits"),
    [(128, 2, 4096, 1), (128, 1, 8192, 1), (132, 1, 64, 1), (1, 1, 64, 1)],
)
def test_full_devices_and_short_contexts_are_not_split(requests, row_blocks, max_tokens, splits):
    assert choose_splits(requests, row_blocks, max_tokens, 132) == splits


def test_few_requests_are_split_until_the_device_is_busy():
    splits = choose_splits(8, 2, 4096, 132)
    assert 7 * 8 * 2 <= splits * 8 * 2 <= 132
    assert choose_splits(96, 2, 4096, 132) > 1  # one wave and a half: splitting fills the second


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("splits", [1, 2, 5, None])
@pytest.mark.parametrize(("queries", "heads"), [(1, 128), (2, 128), (1, 16), (2, 16), (1, 3), (2, 65)])
def test_hopper_kernel(queries, heads, splits):
    torch.manual_seed(queries + heads)
    inputs = make([1, 64, 65, 0, 700, 4001], queries, heads, 512, 64, "cuda", poison=30000.0)
    close(run(inputs, 512, HOPPER, splits), paged.mla_decode(*inputs, 0.07))


def alike_in_any_company(device, heads, rank, rope, tiling):
    """Lengths of one, two and three splits of 128 tokens, and one beyond MAX_SPLITS of them in a table of its width."""
    lengths = [300, 1, 129, 128, 5000]
    q, kv, table, seq_lens = make(lengths, 1, heads, rank, rope, device, poison=0.0)
    given = {"rank": rank, "tiling": tiling, "split_tokens": 128}
    together = mla_decode(q, kv, table, seq_lens, 0.07, **given)
    close(together, paged.mla_decode(q, kv, table, seq_lens, 0.07, rank=rank))
    for i, length in enumerate(lengths):
        narrow = table[i : i + 1, : -(-length // 64)].contiguous()
        alone = mla_decode(q[i : i + 1].clone(), kv, narrow, seq_lens[i : i + 1].clone(), 0.07, **given)
        assert torch.equal(alone[0], together[i]), length


@pytest.mark.parametrize("tiling", [ROWS, SWAPPED], ids=["rows", "swapped"])
def test_fixed_splits_give_the_same_bits_in_any_company(device, tiling):
    alike_in_any_company(device, 3, 32, 16, tiling)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_fixed_splits_of_the_hopper_kernel():
    torch.manual_seed(7)
    alike_in_any_company("cuda", 16, 512, 64, HOPPER)
