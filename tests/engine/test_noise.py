"""Noise is keyed by (seed, choice, position, token) alone, and is Gumbel-distributed."""

import pytest
import torch

from tripool.engine.noise import _log, draw, gumbel, keys_at, noise_key, stream_base, token_hashes
from tripool.kernels.cpu8.library import library, variants


def test_each_part_of_the_key_matters():
    keys = {noise_key(s, c, p) for s in (0, 1, 2**63) for c in range(4) for p in range(50)}
    assert len(keys) == 3 * 4 * 50


def test_a_token_draws_the_same_noise_in_any_selection():
    hashes, key = token_hashes(1000), noise_key(5, 0, 17)
    chosen = torch.tensor([999, 3, 512])
    assert torch.equal(gumbel(key, hashes)[chosen], gumbel(key, hashes[chosen]))


def test_known_values_do_not_drift():
    """Recovery on another machine or version must draw the same noise: these numbers are part of the wire format."""
    assert noise_key(42, 1, 7) == 0xD5755CF05C9C2237
    noise = gumbel(noise_key(42, 1, 7), token_hashes(3)).tolist()
    assert [round(x, 4) for x in noise] == [2.4864, -0.6717, 2.0618]


def test_argmax_samples_the_softmax():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).log()
    hashes, draws = token_hashes(5), 20_000
    keys = keys_at(torch.tensor(stream_base(3, 0)), torch.arange(draws))
    counts = (logits + gumbel(0, hashes + keys[:, None])).argmax(-1).bincount(minlength=5)
    chi_squared = ((counts - logits.exp() * draws) ** 2 / (logits.exp() * draws)).sum()
    assert chi_squared < 18.5  # 99.9 % of a chi-squared with 4 degrees of freedom; the draws are fixed


def test_moments_are_gumbels():
    noise = torch.cat([gumbel(noise_key(9, 0, p), token_hashes(50_000)) for p in range(4)])
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - torch.pi**2 / 6) < 0.03


def test_the_largest_draws_are_finite():
    """All ones: infinite noise would choose its token whatever the logits say, and make a banned one NaN."""
    for position, token in ((576, 3988), (1072, 7003), (6615, 132)):
        noise = gumbel(noise_key(1, 0, position), token_hashes(8192))
        assert noise.isfinite().all()
        assert noise.argmax() == token


@pytest.mark.skipif(not variants(), reason="no compiled kernels")
@pytest.mark.parametrize("variant", variants())
def test_the_fast_draw_is_the_plain_one(variant: str) -> None:
    """Same noise to the bit: with all logits equal the largest noise decides, and nothing else."""
    for count in (1, 15, 16, 17, 1000, 8192):
        hashes = token_hashes(count)
        for position in range(200 if count < 8192 else 20):
            key = noise_key(11, 0, position)
            logits = torch.randn(count, generator=torch.Generator().manual_seed(position)) * (position % 3)
            if position % 5 == 0:
                logits[1::2] = float("-inf")
            for temperature in (0.3, 1.0, 2.5):
                chosen = library(variant).tripool_draw(logits.data_ptr(), count, temperature, key)
                assert chosen == draw(logits, temperature, key, hashes)


@pytest.mark.skipif(not variants(), reason="no compiled kernels")
@pytest.mark.parametrize("variant", variants())
def test_the_fast_draw_leaves_nobody_out_who_could_win(variant: str) -> None:
    """Tokens of much noise, up to the most there is, just over and just under the likeliest one, which may have little.
    All others are far below and need no noise at all."""
    hashes, outcomes = token_hashes(8192), set()
    for position in (*range(40), 576, 1072, 6615):
        key = noise_key(1, 0, position)
        noise = gumbel(key, hashes)
        for challenger in noise.topk(5).indices.tolist():
            for likeliest, gap in ((0, -1e-4), (int(noise.argmin()), 1e-4), (8191, -1e-4), (4000, 1e-4)):
                logits = torch.full((8192,), -60.0)
                logits[challenger] = -20.0
                logits[likeliest] = -20.0 + noise[challenger] - noise[likeliest] + gap
                chosen = library(variant).tripool_draw(logits.data_ptr(), 8192, 1.0, key)
                assert chosen == draw(logits, 1.0, key, hashes)
                outcomes.add(chosen == challenger)
    assert outcomes == {False, True}


@pytest.mark.skipif(not variants(), reason="no compiled kernels")
@pytest.mark.parametrize("variant", variants())
def test_the_fast_largest_is_the_first_of_the_largest(variant: str) -> None:
    for count in (1, 2, 15, 16, 17, 1000, 8192):
        rows = torch.randn(5, count, generator=torch.Generator().manual_seed(count))
        rows[1] = rows[1].round()  # many are equal
        rows[2] = 3.0
        rows[3, : count // 2] = float("-inf")
        rows[4] = float("-inf")
        chosen = torch.full((5,), -1, dtype=torch.int32)
        library(variant).tripool_largest(rows.data_ptr(), 5, count, chosen.data_ptr())
        assert chosen.tolist() == rows.numpy().argmax(-1).tolist()


def test_the_logarithm_is_one():
    """To the last two bits, from the smallest draw to the largest."""
    x = torch.cat([torch.linspace(2.0**-24, 1 - 2.0**-24, 100_001), torch.linspace(5.9e-8, 17.0, 100_001)])
    exact = x.double().log()
    assert ((_log(x).double() - exact).abs() <= 2.5e-7 * exact.abs().clamp(min=1e-9)).float().mean() > 0.9999
