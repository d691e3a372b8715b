"""What can be served by several ranks, and how large the memory is that they share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oracle.folders import save_case
from oracle.gqa_cases import LLAMA
from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.engine.load import load_engine
from tripool.errors import InvalidRequest
from tripool.serving import AccessConfig, build_split
from tripool.serving.ranks import rank_layout
from tripool.serving.split import SplitConfig

CONFIG = EngineConfig(threads=1, kv_gb=0.02)


def test_the_layout_is_that_of_the_loaded_model() -> None:
    layout = rank_layout("tiny", CONFIG, 4)
    layers = load_engine("tiny", CONFIG).executor.runner.model.expert_sublayers
    first = layers[0].struct  # type: ignore[attr-defined]
    assert (layout.ranks, layout.layers, layout.experts) == (4, len(layers), first.experts)
    assert (layout.top_k, layout.hidden) == (first.top_k, first.norm.width)
    assert layout.slab_rows == 256
    assert rank_layout("tiny", CONFIG, 64).slab_rows < 256, "many ranks share no more memory than a few"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"precision": "float32"}, "8 bits"), ({"device": "cuda"}, "on a CPU")],
    ids=["float32", "cuda"],
)
def test_without_an_exchange_ranks_are_refused(change: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        rank_layout("tiny", replace(CONFIG, **change), 2)
    assert "one rank per instance" in refused.value.hint


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    save_case(LLAMA[0], tmp_path / "dense")
    with pytest.raises(InvalidRequest, match="dense has no experts") as refused:
        rank_layout(str(tmp_path / "dense"), CONFIG, 2)
    assert "2 instances of one rank" in refused.value.hint


def test_a_refusal_comes_before_any_process(tmp_path: Path) -> None:
    access = AccessConfig(tmp_path / "keys", open=True)
    with pytest.raises(InvalidRequest, match="fake engine"):
        build_split(
            ["fake"], CONFIG, GatewayConfig(port=0), access=access, pools=SplitConfig(decode=PoolSize.parse("1x2"))
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3", PoolSize(3)),
        ("0", PoolSize(0)),
        ("1x4", PoolSize(1, 4)),
        ("2x1", PoolSize(2)),
        ("2x1+3", PoolSize(2, 1, 3)),
    ],
)
def test_sizes_of_pools(text: str, size: PoolSize) -> None:
    assert PoolSize.parse(text) == size
    assert PoolSize.parse(str(size)) == size


@pytest.mark.parametrize("text", ["", "x", "1x", "1x0", "-1", "1x2x3", "1x2+", "1+2", "two", "257", "16x17", "²"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        PoolSize.parse(text)
