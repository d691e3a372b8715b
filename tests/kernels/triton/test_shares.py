"""Even shares of the streamed product: plain arithmetic, on any machine."""

from hypothesis import given
from hypothesis import strategies as st

from tripool.kernels.triton.stream import num_shares
from tripool.kernels.triton.tilings import Stream

TILINGS = [Stream(16), Stream(32, 128, per_sm=2), Stream(16, 64, 256, whole=True), Stream(256, 128, 128, 4, 8)]


@given(
    st.integers(1, 256), st.integers(1, 40_000), st.integers(1, 1200).map(lambda k: 16 * k), st.sampled_from(TILINGS)
)
def test_there_are_never_more_shares_than_steps_nor_than_places_for_programs(m, n, k, tiling):
    tiles = -(-m // tiling.block_m) * -(-n // tiling.block_n)
    shares = num_shares(tiling, m, n, k, 132)
    assert 1 <= shares <= min(132 * tiling.per_sm, tiles * -(-k // tiling.block_k))
    if tiling.whole:  # no more waves than with all of them
        assert -(-tiles // shares) == -(-tiles // (132 * tiling.per_sm))
