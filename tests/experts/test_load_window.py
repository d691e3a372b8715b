"""Observed loads: windows of tokens, decayed."""

from __future__ import annotations

import numpy as np
import pytest

from tripool.experts import LoadWindow


def test_windows_close_after_their_tokens_and_decay() -> None:
    window = LoadWindow(1, 2, tokens=100, decay=0.5)
    counts = np.array([[8, 0]])
    assert not window.add(counts, 60)
    assert window.loads.tolist() == [[8, 0]]
    assert window.add(counts, 60) and window.windows == 1
    assert window.loads.tolist() == [[16, 0]]
    assert window.add(np.array([[0, 16]]), 100)
    assert window.loads.tolist() == [[8, 16]]


def test_loads_follow_a_drift() -> None:
    rng = np.random.default_rng(0)
    window = LoadWindow(1, 4, tokens=1000, decay=0.75)
    for likely in ([0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]):
        for _ in range(20):
            window.add(rng.multinomial(8000, [likely]), 1000)
        assert (window.loads / window.loads.sum())[0] == pytest.approx(likely, abs=0.02)
