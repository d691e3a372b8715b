"""A decode step of the teacher's attention and its draw, against plain torch."""

import math

import pytest
import torch

from oracle.close import assert_close
from tiny.distil import draw, gqa_decode, plain


def a_step(device: str, rows: int, heads: int, kv_heads: int, dim: int, positions: int):
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device)
    keys, values = (torch.randn(rows, kv_heads, positions, dim, device=device) for _ in range(2))
    angles = torch.randn(positions, dim // 2, device=device)
    return qkv, (angles.cos(), angles.sin()), keys, values


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "positions"), [(9, 3, 64, 96), (4, 4, 16, 130), (8, 2, 32, 64)])
def test_turned_stored_and_attended_as_in_plain_torch(device, heads, kv_heads, dim, positions):
    lengths = torch.tensor([0, 1, 63, 64 % positions, positions - 1], dtype=torch.int32, device=device).clamp(
        max=positions - 1
    )
    qkv, cos_sin, keys, values = a_step(device, len(lengths), heads, kv_heads, dim, positions)
    theirs = [tensor.clone() for tensor in (qkv, keys, values)]
    gqa_decode.turn_and_store(qkv, cos_sin, lengths, keys, values)
    plain.turn_and_store(theirs[0], cos_sin, lengths.long(), theirs[1], theirs[2])
    for ours, expected in zip((qkv, keys, values), theirs, strict=True):
        # Keys within `qkv` are spent once they are stored.
        width = heads * dim if ours is qkv else None
        assert_close(ours[..., :width], expected[..., :width])
    counts = lengths + 1
    counts[0] = 0
    ours, expected = gqa_decode.attend(qkv, keys, values, counts), plain.attend(*theirs, counts)
    assert_close(ours, expected)
    assert not ours[0].any()


def test_the_coldest_draw_takes_the_likeliest_after_the_penalty(device):
    logits = torch.randn(3, 5000, device=device)
    logits[0, 4321], logits[0, 17] = 9.0, 8.5
    logits[1] -= 20.0
    seen = torch.zeros(3, 5000, dtype=torch.bool, device=device)
    seen[0, 4321] = True
    seen[1, logits[1].argmax()] = True
    cold, seed = torch.zeros(3, device=device), torch.tensor([5], device=device)
    ours = draw.draw(logits, seen, cold, seed, penalty=1.18, log_min_p=math.log(0.1))
    assert ours[0] == 17
    assert ours[1] != logits[1].argmax()
    assert ours[2] == logits[2].argmax()
    assert torch.equal(ours, plain.draw(logits, seen, cold, seed, penalty=1.18, log_min_p=math.log(0.1)))


@pytest.mark.parametrize(("drawn", "rows", "within"), [(draw.draw, 60, 0.2), (plain.draw, 2000, 0.05)])
def test_warm_draws_follow_the_distribution_above_min_p(device, drawn, rows, within):
    chances = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    logits = torch.full((rows, 2050), -50.0, device=device)
    positions = torch.tensor([3, 2049, 700, 12, 1500])
    logits[:, positions] = chances.log().to(device)
    seen = torch.zeros(rows, 2050, dtype=torch.bool, device=device)
    warm, seed = torch.ones(rows, device=device), torch.tensor([11], device=device)
    tokens = drawn(logits, seen, warm, seed, penalty=1.18, log_min_p=math.log(0.1))
    counts = torch.bincount(tokens.cpu(), minlength=2050)[positions] / rows
    assert counts[3:].sum() == 0
    torch.testing.assert_close(counts[:3], chances[:3] / chances[:3].sum(), rtol=0, atol=within)
