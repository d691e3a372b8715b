from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tripool.checkpoints import FolderCheckpoint
from tripool.checkpoints.bundle import bundle_int8, main, quantise_rows
from tripool.errors import CheckpointCorrupt


@pytest.fixture
def source(folder):
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "model.embed_tokens.weight": torch.randn(31, 24, generator=generator).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 24, generator=generator).bfloat16(),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.randn(8, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(17, 24, generator=generator).half(),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(5, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(24, generator=generator).bfloat16(),
    }
    tensors["model.embed_tokens.weight"][3] = 0
    save_file(tensors, folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_matrices_become_int8_and_the_rest_stays(source, tmp_path, read_all):
    with FolderCheckpoint(source) as checkpoint:
        original = read_all(checkpoint)
        text = checkpoint.text
        config = checkpoint.config
        bundle_int8(checkpoint, tmp_path / "out")
    with FolderCheckpoint(tmp_path / "out") as checkpoint:
        quantised = {name for name, info in checkpoint.infos().items() if info.dtype == "I8"}
        assert quantised == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
        read = read_all(checkpoint)
        assert read.keys() == original.keys()
        for name, tensor in read.items():
            allowed = original[name].abs().amax(dim=-1, keepdim=True) / 127 * 0.5001 if name in quantised else 0
            assert ((tensor - original[name]).abs() <= allowed).all(), name
        assert checkpoint.text.chat_template == text.chat_template
        assert checkpoint.text.special_tokens == text.special_tokens
        assert checkpoint.text.end_ids == text.end_ids
        assert {key: checkpoint.config[key] for key in config if key != "eos_token_id"} == {
            key: config[key] for key in config if key != "eos_token_id"
        }
        ours, theirs = (tokenizers.Tokenizer.from_str(t.tokenizer_json) for t in (checkpoint.text, text))
        assert ours.encode("The fox <|end|> 12").ids == theirs.encode("The fox <|end|> 12").ids


def test_others_can_read_the_layout(source, tmp_path):
    """The safetensors package opens it; weight and scale are where compressed-tensors puts them, and aligned."""
    with FolderCheckpoint(source) as checkpoint:
        bundle_int8(checkpoint, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    weight, scale = (stored[f"model.layers.0.mlp.up_proj.weight{end}"] for end in ("", "_scale"))
    assert (weight.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (17, 1))
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_the_same_source_gives_the_same_bytes(source, tmp_path):
    assert main([str(source), str(tmp_path / "a")]) == 0
    assert main([str(source), str(tmp_path / "b")]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_usage(capsys):
    assert main(["one"]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_weight_that_is_not_a_number_is_refused(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][2, 2] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with FolderCheckpoint(source) as checkpoint, pytest.raises(CheckpointCorrupt) as caught:
        bundle_int8(checkpoint, tmp_path / "out")
    assert caught.value.tensor == "model.embed_tokens.weight"
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_rows_of_any_size_round_to_the_nearest():
    rows = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [127.0, -63.4], [1e38, 3e38], [-1.0, 0.5]])
    values, scale = quantise_rows(rows)
    assert values.abs().max() <= 127
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert ((values * scale - rows).abs() <= scale * 0.5001).all()
    assert values[2].tolist() == [127, -63]
    assert quantise_rows(torch.empty(3, 0))[1].tolist() == [[1], [1], [1]]
