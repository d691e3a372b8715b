from __future__ import annotations

import numpy as np
import pytest
import torch

from tripool.checkpoints import GgufCheckpoint
from tripool.errors import TensorMissing, TensorShape, WrongArchitecture

INTEGERS = (
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.kv_lora_rank",
    "rope.dimension_count",
)
INTEGERS += ("expert_count", "expert_used_count", "expert_feed_forward_length", "attention.head_count")


@pytest.fixture
def deepseek(tmp_path, write_gguf):
    """A file of architecture deepseek2 with these tensors beside the embeddings."""

    def write(**tensors):
        metadata = dict.fromkeys([f"deepseek2.{key}" for key in INTEGERS], 4)
        metadata |= {"deepseek2.block_count": 3, "deepseek2.nextn_predict_layers": 1}
        metadata |= {"deepseek2.attention.key_length": 8, "deepseek2.attention.value_length": 4}
        metadata |= {"deepseek2.attention.layer_norm_rms_epsilon": 1e-6}
        stored = {"token_embd.weight": (np.ones((3, 4)), "F32")}
        stored |= {name: (values, "F32") for name, values in tensors.items()}
        return GgufCheckpoint(write_gguf(tmp_path / "d.gguf", "deepseek2", metadata, stored))

    return write


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_the_joined_tensor_wins_over_its_halves(deepseek):
    joined = random(32, 4)
    checkpoint = deepseek(
        **{
            "blk.0.attn_k_b.weight": random(4, 4, 4),
            "blk.0.attn_v_b.weight": random(4, 4, 4),
            "blk.0.attn_kv_b.weight": joined,
        }
    )
    out = torch.empty(32, 4)
    checkpoint.read("model.layers.0.self_attn.kv_b_proj.weight", out)
    assert torch.equal(out, torch.from_numpy(joined))
    checkpoint.close()


def test_draft_layers_are_counted_apart_and_keep_their_names(deepseek):
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
    checkpoint = deepseek(**{f"blk.2.nextn.{name}.weight": random(4) for name in names})
    assert checkpoint.config["num_hidden_layers"] == 2
    assert checkpoint.config["num_nextn_predict_layers"] == 1
    assert checkpoint.infos().keys() == {"model.embed_tokens.weight"} | {
        f"model.layers.2.{name}.weight" for name in names.values()
    }
    checkpoint.close()


@pytest.mark.parametrize(
    ("tensors", "error", "named"),
    [
        ({"blk.0.attn_k_b.weight": (4, 4, 4)}, TensorMissing, "blk.0.attn_v_b.weight"),
        ({"blk.0.attn_k_b.weight": (16, 4), "blk.0.attn_v_b.weight": (4, 4, 4)}, TensorShape, "blk.0.attn_k_b.weight"),
        (
            {"blk.0.attn_k_b.weight": (4, 4, 4), "blk.0.attn_v_b.weight": (2, 4, 4)},
            TensorShape,
            "blk.0.attn_k_b.weight",
        ),
        ({"blk.0.ffn_up_exps.weight": (4, 4)}, TensorShape, "blk.0.ffn_up_exps.weight"),
        ({"blk.0.attn_output.weight": (4, 4, 4)}, TensorShape, "blk.0.attn_output.weight"),
        ({"blk.0.attn_sinks.weight": (4,)}, WrongArchitecture, "blk.0.attn_sinks.weight"),
        ({"mm.0.weight": (4,)}, WrongArchitecture, "mm.0.weight"),
    ],
)
def test_what_does_not_fit_is_named(deepseek, tensors, error, named):
    with pytest.raises(error) as caught:
        deepseek(**{name: random(*shape) for name, shape in tensors.items()})
    assert caught.value.tensor == named
    assert caught.value.hint


@pytest.mark.parametrize(("heads", "says"), [(0, "0 heads"), (7, "7 heads")])
def test_rows_that_are_no_heads_are_refused(tmp_path, write_gguf, llama_parts, heads, says):
    metadata, tensors = llama_parts()
    metadata["llama.attention.head_count"] = heads
    write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    with pytest.raises(TensorShape, match=says):
        GgufCheckpoint(tmp_path / "m.gguf")


def test_experts_of_a_dense_architecture_are_refused(tmp_path, write_gguf, llama_parts):
    metadata, tensors = llama_parts()
    tensors["blk.0.ffn_up_exps.weight"] = (random(2, 4, 64), "F32")
    write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    with pytest.raises(WrongArchitecture) as caught:
        GgufCheckpoint(tmp_path / "m.gguf")
    assert caught.value.tensor == "blk.0.ffn_up_exps.weight"
