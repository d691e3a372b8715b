"""Sizes in a config are a stranger's: whatever they say, it is refused by name before memory is taken for it."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tripool.checkpoints import FolderCheckpoint, TensorInfo
from tripool.checkpoints.write import SafetensorsWriter
from tripool.engine.memory import kv_blocks
from tripool.errors import CheckpointError, TensorShape, WrongArchitecture
from tripool.kernels import REFERENCE
from tripool.models import load_model
from tripool.models.decoder import Model
from tripool.models.load import arch_of
from tripool.models.loader import Loader
from tripool.models.rope import inverse_frequencies

MOST_BYTES = 256 * 2**20
SHARED = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHARED | {"model_type": "llama", "head_dim": 8, "rope_scaling": LLAMA3},
    "qwen3_moe": SHARED | {
        "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "deepseek_v3": SHARED | {
        "model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "qk_nope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0, "rope_scaling": YARN,
    },
}  # fmt: skip
VALUES: list[Any] = [
    0, 1, 2, 3, -1, 7, 10**4, 10**6, 10**9, 10**12, 2**63, 10**30, 10**400, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"), True, False, "", "16", "x" * 10_000, [], [1], [[]], {}, {"a": 1}, None,
]  # fmt: skip


class Wanted:
    """A source that gives whatever is asked for, and remembers it."""

    device = "cpu"

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return False

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def read(self, name: str, out: torch.Tensor) -> None:
        out.fill_(0.01)

    def scales(self, name: str, kind: str) -> None:
        return None


def make(folder: Path, config: dict[str, Any]) -> FolderCheckpoint:
    wanted = Wanted()
    Model(arch_of(config, "x"), Loader(wanted, REFERENCE, torch.float32))
    writer = SafetensorsWriter(
        folder / "model.safetensors", {name: TensorInfo(shape, "F32") for name, shape in wanted.shapes.items()}
    )
    for name, shape in wanted.shapes.items():
        writer.put(name, torch.full(shape, 0.01))
    writer.finish()
    (folder / "config.json").write_text(json.dumps(config))
    return FolderCheckpoint(folder)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderCheckpoint]:
    with make(tmp_path_factory.mktemp(request.param), CONFIGS[request.param]) as made:
        yield made


def try_load(checkpoint: FolderCheckpoint, config: dict[str, Any]) -> bool:
    """False: it was refused, as it should be."""
    before, checkpoint.config = checkpoint.config, config
    try:
        arch = load_model(checkpoint, kernels=REFERENCE).arch
        block_bytes = arch.block_bytes(mtp=False)
        assert kv_blocks(block_bytes, arch.context_tokens, None) * block_bytes <= 2**31
        return True
    except CheckpointError as error:
        if not error.hint or len(str(error)) > 2000:
            raise AssertionError(f"an error of no use: {str(error)[:300]}") from error
        return False
    finally:
        checkpoint.config = before


def test_every_entry_with_every_odd_value(checkpoint: FolderCheckpoint) -> None:
    good = dict(checkpoint.config)
    assert try_load(checkpoint, good)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in good:
        assert try_load(checkpoint, {name: good[name] for name in good if name != key}) in (True, False)
        for value in VALUES:
            try_load(checkpoint, good | {key: value})
        if isinstance(good[key], dict):
            for inner in (*good[key], "rope_theta", "attention_factor"):
                for value in VALUES:
                    try_load(checkpoint, good | {key: good[key] | {inner: value}})
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb) * 1024 < MOST_BYTES


def test_several_entries_at_once(checkpoint: FolderCheckpoint) -> None:
    rng, good = random.Random(17), dict(checkpoint.config)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        try_load(checkpoint, good | {key: rng.choice(VALUES) for key in rng.sample(sorted(good), 3)})
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb) * 1024 < MOST_BYTES


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("vocab_size", 4_000_000, TensorShape),
        ("hidden_size", 1_000_000, TensorShape),
        ("intermediate_size", 1_000_000, TensorShape),
        ("num_hidden_layers", 10**9, WrongArchitecture),
        ("max_position_embeddings", 16_000_000, WrongArchitecture),
        ("max_position_embeddings", 10**10, WrongArchitecture),
    ],
)
def test_what_took_gigabytes_is_refused_by_name(
    checkpoint: FolderCheckpoint, key: str, value: int, error: type[CheckpointError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of such a size is even asked for."""
    taken: list[int] = []
    empty, arange = torch.empty, torch.arange
    monkeypatch.setattr(torch, "empty", lambda *a, **k: taken.append((made := empty(*a, **k)).nbytes) or made)
    monkeypatch.setattr(torch, "arange", lambda *a, **k: taken.append((made := arange(*a, **k)).nbytes) or made)
    before, checkpoint.config = checkpoint.config, {**checkpoint.config, key: value}
    try:
        with pytest.raises(error):
            load_model(checkpoint, kernels=REFERENCE)
    finally:
        checkpoint.config = before
    assert sum(taken) < 2**20


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "beta_fast", "beta_slow", "factor"])
def test_numbers_too_small_to_divide_by_are_refused(key: str) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        config = {**CONFIGS["deepseek_v3"], "rope_scaling": None, name: {**YARN, key: 5e-324}}
        with pytest.raises(WrongArchitecture, match=key):
            inverse_frequencies(arch_of(config, "x").rope)


def test_a_rotary_table_is_bounded_by_its_width_too() -> None:
    wide = CONFIGS["llama"] | {"head_dim": 128, "max_position_embeddings": 2**20}
    assert arch_of(wide, "x").context_tokens == 2**20
    with pytest.raises(WrongArchitecture, match="rotary tables"):
        arch_of(wide | {"max_position_embeddings": 2**21}, "x")
