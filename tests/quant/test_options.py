from __future__ import annotations

from dataclasses import asdict

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from tripool.cli.quantize import register
from tripool.errors import InvalidRequest
from tripool.quant.options import Candidate, Techniques, choose_kept

candidates = st.lists(
    st.builds(
        Candidate,
        st.uuids().map(str),
        st.floats(0, 1, allow_nan=False),
        st.integers(0, 1000),
    ),
    max_size=12,
)


@given(candidates, st.integers(0, 3000))
def test_what_stays_in_floats_fits_the_budget_and_nothing_better_was_left(some: list[Candidate], budget: int) -> None:
    kept = choose_kept(some, budget)
    chosen = [one for one in some if one.name in kept]
    left = budget - sum(one.extra_bytes for one in chosen)
    assert left >= 0
    assert len(set(kept)) == len(kept)
    for one in some:
        if one.name not in kept and one.sensitivity > 0:
            worth = one.sensitivity / max(one.extra_bytes, 1)
            better = sum(c.extra_bytes for c in chosen if c.sensitivity / max(c.extra_bytes, 1) >= worth)
            assert better + one.extra_bytes > budget, "it would have fitted when its turn came"


def test_the_most_error_per_byte_stays_first() -> None:
    some = [Candidate("large", 0.5, 1000), Candidate("small", 0.1, 10), Candidate("harmless", 0.0, 1)]
    assert choose_kept(some, 1005) == ["small"]
    assert choose_kept(some, 1010) == ["large", "small"]
    assert choose_kept(some, 9) == []


@pytest.mark.parametrize("keep", [-0.1, 1.0, float("nan")])
def test_a_budget_is_a_share(keep: float) -> None:
    with pytest.raises(InvalidRequest, match="keep"):
        Techniques(keep=keep)


def test_the_command_has_the_defaults_of_the_library() -> None:
    """They are written twice, because the command must not import torch before it is called."""
    app = typer.Typer()
    register(app)
    said = {one.name: one.default for one in typer.main.get_command(app).params}
    assert {name: said[name] for name in asdict(Techniques())} == asdict(Techniques())
