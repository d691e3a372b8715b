from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.close import assert_close
from tripool.checkpoints.write import quantise_rows
from tripool.quant.rounding import Feedback, Seen, output_errors, round_linear, searched_scales, to_integers


def seen_of(rows: torch.Tensor) -> Seen:
    return Seen(rows.T @ rows, rows.abs().amax(0), rows, len(rows))


def correlated(count: int, width: int, seed: int) -> torch.Tensor:
    """Inputs as networks have them: a few directions, some columns much larger than others."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, width, generator=rng) @ torch.randn(width, width, generator=rng).tril() / width**0.5
    return mixed * torch.rand(width, generator=rng).mul_(3).exp()


def test_without_techniques_it_is_plain_rounding() -> None:
    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    rounded = round_linear(weight, None, search=False, feedback=None)
    values, scale = quantise_rows(weight)
    assert torch.equal(rounded.values, values)
    assert torch.equal(rounded.scale, scale)


@given(seed=st.integers(0, 1000), out=st.integers(1, 9), width=st.integers(1, 70), heavy=st.booleans())
def test_a_searched_scale_is_never_worse_on_what_was_seen(seed: int, out: int, width: int, heavy: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=rng)
    if heavy:
        weight = weight**5
    rows = correlated(20, width, seed)
    found = searched_scales(weight, rows)
    plain = quantise_rows(weight)[1]
    errors = [output_errors(to_integers(weight, scale) * scale - weight, rows) for scale in (found, plain)]
    assert (errors[0] <= errors[1]).all()
    assert (found > 0).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("count", [5, 40, 90])
def test_errors_of_few_rows_are_those_of_their_second_moments(count: int) -> None:
    """Few rows are multiplied themselves, which is cheaper; many are not, and then a sample of them is no more."""
    rng = torch.Generator().manual_seed(count)
    rows, difference = torch.randn(count, 40, generator=rng), torch.randn(6, 40, generator=rng)
    known = seen_of(rows)
    assert_close(known.errors(difference), output_errors(difference, rows))
    known.rows = known.sample(3)
    assert len(known.rows) <= 3
    assert_close(known.errors(difference), output_errors(difference, rows))


def test_heavy_tails_are_clipped() -> None:
    """One large weight, read by a column that is hardly ever there: the rest gains more than it loses."""
    rng = torch.Generator().manual_seed(5)
    weight, rows = torch.randn(4, 64, generator=rng), torch.randn(50, 64, generator=rng)
    weight[:, 9], rows[:, 9] = 6.0, rows[:, 9] * 1e-3
    assert (searched_scales(weight, rows) < 0.9 * quantise_rows(weight)[1]).all()


@pytest.mark.parametrize("width", [1, 31, 128, 129, 300])
def test_feedback_lowers_the_error_of_the_output(width: int) -> None:
    rows = correlated(2 * width + 40, width, width)
    weight = torch.randn(24, width, generator=torch.Generator().manual_seed(width))
    seen = seen_of(rows)
    errors = []
    for feedback in (None, Feedback(seen.second)):
        rounded = round_linear(weight, seen, search=False, feedback=feedback)
        assert rounded.values.abs().max() <= 127
        errors.append(seen.errors(rounded.floats() - weight))
    assert (errors[1] <= errors[0]).all(), "a row that gains nothing keeps the plain integers"
    if width >= 31:
        assert errors[1].sum() < 0.7 * errors[0].sum()


def test_an_input_that_is_always_zero_can_be_fed_back_to() -> None:
    rows = correlated(100, 40, 3)
    rows[:, [0, 7]] = 0
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    seen = seen_of(rows)
    floats = round_linear(weight, seen, search=True, feedback=Feedback(seen.second)).floats()
    assert floats.isfinite().all()
    assert (rows @ (floats - weight).T).norm() < 0.02 * (rows @ weight.T).norm()
