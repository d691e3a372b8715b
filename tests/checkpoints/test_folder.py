from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tripool.checkpoints import FolderCheckpoint
from tripool.errors import TensorMissing, TensorShape

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=20, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("family", MODELS)
def test_reads_what_transformers_saved(tmp_path, read_all, byte_level, family, shard_size):
    torch.manual_seed(0)
    model = MODELS[family]().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<|begin|>", eos_token="<|end|>", chat_template="{{ messages }}"
    ).save_pretrained(tmp_path)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (shard_size == "20KB")
    with FolderCheckpoint(tmp_path) as checkpoint:
        state = model.state_dict()
        if model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        read = read_all(checkpoint)
        assert read.keys() == state.keys()
        for name, tensor in read.items():
            assert torch.equal(tensor, state[name].float()), name
        assert checkpoint.config["model_type"] == model.config.model_type
        assert checkpoint.name == tmp_path.name
        stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        assert checkpoint.stored_bytes() == stored
        assert checkpoint.text.chat_template == "{{ messages }}"
        assert byte_level.token_to_id("<|end|>") in checkpoint.text.end_ids


def test_an_unknown_name_and_a_wrong_shape_name_the_tensor(folder):
    with FolderCheckpoint(folder) as checkpoint:
        with pytest.raises(TensorMissing) as missing:
            checkpoint.read("lm_head.weight", torch.empty(3, 4))
        with pytest.raises(TensorMissing):
            checkpoint.row_scales("lm_head.weight")
        with pytest.raises(TensorShape, match=r"\[3, 4\].*\[4, 3\]") as shape:
            checkpoint.read("model.embed_tokens.weight", torch.empty(4, 3))
    assert missing.value.tensor == "lm_head.weight"
    assert shape.value.tensor == "model.embed_tokens.weight"
    assert shape.value.file == str(folder / "model.safetensors")


def test_only_float_tensors_are_filled(folder):
    with FolderCheckpoint(folder) as checkpoint, pytest.raises(AssertionError):
        checkpoint.read("model.norm.weight", torch.empty(4, dtype=torch.int32))


def test_closing_unmaps_and_reading_after_it_is_our_mistake(folder, mapped):
    checkpoint = FolderCheckpoint(folder)
    checkpoint.read("model.norm.weight", torch.empty(4))
    assert mapped(folder / "model.safetensors")
    checkpoint.close()
    assert not mapped(folder / "model.safetensors")
    checkpoint.close()
    with pytest.raises(AssertionError, match="after close"):
        checkpoint.read("model.norm.weight", torch.empty(4))
