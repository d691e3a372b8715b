"""Even shares of the streamed product: plain arithmetic, on any machine."""

from hypothesis import given
from hypothesis import strategies as st

from tripool.kernels.triton.int8_gemm import Stream
from tripool.kernels.triton.stream import _owner, num_shares

TILINGS = [Stream(16), Stream(32, 128, per_sm=2), Stream(16, 64, 256, whole=True), Stream(256, 128, 128, 4, 8)]


@given(st.integers(1, 400), st.integers(1, 200), st.integers(1, 300))
def test_every_step_of_every_tile_is_in_the_share_of_its_owner(tiles, steps, programs):
    units = tiles * steps
    programs = min(programs, units)
    cuts = [p * units // programs for p in range(programs + 1)]
    for p in range(programs):
        assert cuts[p] < cuts[p + 1]
        assert _owner.fn(cuts[p], units, programs) == _owner.fn(cuts[p + 1] - 1, units, programs) == p


@given(
    st.integers(1, 256), st.integers(1, 40_000), st.integers(1, 1200).map(lambda k: 16 * k), st.sampled_from(TILINGS)
)
def test_there_are_never_more_shares_than_steps_nor_than_places_for_programs(m, n, k, tiling):
    tiles = -(-m // tiling.block_m) * -(-n // tiling.block_n)
    shares = num_shares(tiling, m, n, k, 132)
    assert 1 <= shares <= min(132 * tiling.per_sm, tiles * -(-k // tiling.block_k))
    if tiling.whole:  # no more waves than with all of them
        assert -(-tiles // shares) == -(-tiles // (132 * tiling.per_sm))
