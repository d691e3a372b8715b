from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tripool.checkpoints import FolderCheckpoint
from tripool.errors import TensorMissing, TensorShape, WrongDtype

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}},
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def save_folder(path, quantisation, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantisation}))
    save_file(tensors, path / "model.safetensors")
    return path


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_rank", [1, 2])
def test_int8_rows_become_one_tensor(tmp_path, monkeypatch, scale_dtype, scale_rank):
    monkeypatch.setattr("tripool.checkpoints.mapped.PIECE_BYTES", 5000)  # several pieces
    weight = (random(257, 65) * 40).round().clamp(-127, 127).to(torch.int8)
    scale = random(257, 1).abs().to(scale_dtype)
    stored_scale = scale if scale_rank == 2 else scale.view(-1).clone()
    tensors = {"x.weight": weight, "x.weight_scale": stored_scale, "norm.weight": random(65)}
    with FolderCheckpoint(save_folder(tmp_path / "m", INT8, tensors)) as checkpoint:
        assert {name: info.dtype for name, info in checkpoint.infos().items()} == {
            "x.weight": "I8",
            "norm.weight": "F32",
        }
        expected = weight.float() * scale.float()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            fused = torch.full((300, 70), 9.0, dtype=dtype)
            checkpoint.read("x.weight", fused[10:267, 2:67])
            assert torch.equal(fused[10:267, 2:67], expected.to(dtype))
            assert (fused[:10] == 9).all()
        scales = checkpoint.row_scales("x.weight")
        assert checkpoint.row_scales("norm.weight") is None
    assert scales is not None and scales.dtype == torch.float32
    assert torch.equal(scales, scale.float().view(-1))


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (127, 129), (300, 257), (513, 128)])
def test_float8_blocks_with_ragged_edges(tmp_path, monkeypatch, shape):
    monkeypatch.setattr("tripool.checkpoints.mapped.PIECE_BYTES", 50_000)
    num_rows, num_columns = shape
    weight = (random(num_rows, num_columns) * 50).to(torch.float8_e4m3fn)
    scale = random(-(-num_rows // 128), -(-num_columns // 128)).abs() + 0.1
    expected = torch.empty(shape)
    for row in range(num_rows):
        for column_block in range(scale.shape[1]):
            columns = slice(128 * column_block, 128 * (column_block + 1))
            expected[row, columns] = weight[row, columns].float() * scale[row // 128, column_block]
    tensors = {"x.weight": weight, "x.weight_scale_inv": scale, "e.weight": random(3, 4).bfloat16()}
    with FolderCheckpoint(save_folder(tmp_path / "m", FP8, tensors)) as checkpoint:
        assert checkpoint.infos().keys() == {"x.weight", "e.weight"}
        scales = checkpoint.row_scales("x.weight")
        assert scales is not None
        assert torch.equal(scales, torch.stack([scale[row // 128] for row in range(num_rows)]))
        assert checkpoint.row_scales("e.weight") is None
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(shape, dtype=dtype)
            checkpoint.read("x.weight", out)
            assert torch.equal(out, expected.to(dtype))


def test_a_weight_without_its_scale_names_the_scale(tmp_path):
    path = save_folder(tmp_path / "m", INT8, {"x.weight": torch.ones(4, 4, dtype=torch.int8)})
    with pytest.raises(TensorMissing) as caught:
        FolderCheckpoint(path)
    assert caught.value.tensor == "x.weight_scale"


@pytest.mark.parametrize(
    ("quantisation", "weight", "suffix", "scale"),
    [
        (INT8, torch.ones(4, 4, dtype=torch.int8), "_scale", torch.ones(4, 4)),
        (INT8, torch.ones(4, 4, dtype=torch.int8), "_scale", torch.ones(1)),
        (FP8, torch.ones(200, 4).to(torch.float8_e4m3fn), "_scale_inv", torch.ones(1, 1)),
    ],
)
def test_scales_of_another_layout_are_refused(tmp_path, quantisation, weight, suffix, scale):
    path = save_folder(tmp_path / "m", quantisation, {"x.weight": weight, "x.weight" + suffix: scale})
    with pytest.raises(TensorShape) as caught:
        FolderCheckpoint(path)
    assert caught.value.tensor == "x.weight" + suffix


def test_8_bit_weights_that_no_config_explains_are_refused(tmp_path):
    path = save_folder(tmp_path / "m", None, {"x.weight": torch.ones(4, 4, dtype=torch.int8)})
    with FolderCheckpoint(path) as checkpoint, pytest.raises(WrongDtype, match="I8") as caught:
        checkpoint.read("x.weight", torch.empty(4, 4))
    assert caught.value.tensor == "x.weight"


def changed(**weights):
    group = {"weights": INT8["config_groups"]["group_0"]["weights"] | weights}
    return INT8 | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantisation", "says"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({}, "None"),
        ("fp8", "not an object"),
        (INT8 | {"format": "pack-quantized"}, "pack-quantized"),
        (INT8 | {"config_groups": {}}, "int-quantized"),
        (changed(num_bits=4), "num_bits"),
        (changed(symmetric=False), "symmetric"),
        (changed(strategy="group"), "group"),
        (FP8 | {"weight_block_size": None}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, quantisation, says):
    path = save_folder(tmp_path / "m", quantisation, {"x.weight": torch.ones(4, 4)})
    with pytest.raises(WrongDtype, match=says) as caught:
        FolderCheckpoint(path)
    assert caught.value.file == str(path / "config.json")
    assert caught.value.hint
