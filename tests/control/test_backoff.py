"""Started again soon, then later, and soon again after a good run."""

from __future__ import annotations

from tripool.control import Backoff


def test_longer_each_time_up_to_a_bound_and_forgiven() -> None:
    backoff = Backoff()
    waits = [backoff.failed(1.0) for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert backoff.failed(60.0) == 0.1
    assert backoff.failed(1.0) == 0.2
