"""What a model will take is known before it is loaded, well enough to decide whether it fits."""

from __future__ import annotations

import pytest

from tripool.checkpoints import open_checkpoint
from tripool.kernels import CPU, CPU8
from tripool.models import load_model
from tripool.models.warm import weight_bytes


@pytest.mark.parametrize("table", [CPU, CPU8], ids=lambda table: table.name)
def test_the_estimate_is_within_a_tenth(table):
    with open_checkpoint("tiny") as checkpoint:
        told = weight_bytes(checkpoint, table)
        assert told == pytest.approx(load_model(checkpoint, kernels=table).num_bytes, rel=0.1)
