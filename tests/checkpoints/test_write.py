"""Writing checkpoints: how rows become 8 bits."""

from __future__ import annotations

import torch

from tripool.checkpoints.write import quantise_rows


def test_rows_of_any_size_round_to_the_nearest():
    rows = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [127.0, -63.4], [1e38, 3e38], [-1.0, 0.5]])
    values, scale = quantise_rows(rows)
    assert values.abs().max() <= 127
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert ((values * scale - rows).abs() <= scale * 0.5001).all()
    assert values[2].tolist() == [127, -63]
    assert quantise_rows(torch.empty(3, 0))[1].tolist() == [[1], [1], [1]]
