from __future__ import annotations

import torch

from tripool.quant.stream import Recorder


def seen_of(*windows: torch.Tensor):
    recorder = Recorder({"one"}, len(windows))
    for x in windows:
        assert recorder("one", x, False) is x
        recorder("other", x, False)
    (known,) = recorder.seen().values()
    return known


def test_a_very_long_token_decides_no_more_than_a_usual_one() -> None:
    """As the first token of a text in many networks: hundreds of times as long as the others, in one column."""
    rng = torch.Generator().manual_seed(3)
    x = torch.nn.functional.normalize(torch.randn(64, 12, generator=rng))
    x[0] = 0
    x[0, 7] = 1
    sane = seen_of(x)
    x[0, 7] = 500
    found = seen_of(x)
    assert found.count == sane.count == 64
    torch.testing.assert_close(found.second, sane.second)
    torch.testing.assert_close(found.largest, sane.largest)
    torch.testing.assert_close(found.rows, sane.rows)


def test_short_tokens_count_as_they_are() -> None:
    x = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.25, 0.0]))
    known = seen_of(x, x)
    assert known.second.diagonal().tolist() == [2.0, 2.0, 2.0, 0.125, 0.0]
    assert known.largest.tolist() == [1.0, 1.0, 1.0, 0.25, 0.0]
    assert known.count == 10
