"""The official FP8 layout (128 x 128 blocks with a scale each), made here: read exactly, served, and quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oracle.case import make_case, rope
from oracle.folders import save_case
from oracle.fp8 import to_fp8
from tripool.checkpoints import open_checkpoint
from tripool.engine.device import DeviceSpec, table_of
from tripool.engine.runner import Runner, Work
from tripool.kernels import CPU, CPU8
from tripool.kernels.cuda.table import OnDevice
from tripool.models import load_model
from tripool.quant import Techniques, quantize

CASE = make_case(
    "v3-wide",
    "deepseek_v3",
    {"hidden_size": 160, "num_attention_heads": 3, "num_key_value_heads": 3, "qk_nope_head_dim": 40},
    {"qk_rope_head_dim": 12, "v_head_dim": 50, "kv_lora_rank": 72, "q_lora_rank": 136},
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "n_shared_experts": 2},
    {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    rope=rope(),
    width=320,
    published=True,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The FP8 checkpoint, and one that holds its very values in float32."""
    fp8, plain = save_case(CASE, tmp_path_factory.mktemp("fp8")), tmp_path_factory.mktemp("plain")
    to_fp8(fp8, plain)
    return fp8, plain


def test_values_are_exactly_scale_times_float8(folders) -> None:
    fp8, plain = folders
    floats, rounded = load_file(plain / "model.safetensors"), 0
    with open_checkpoint(fp8) as checkpoint:
        assert checkpoint.infos().keys() == floats.keys()
        for name, info in checkpoint.infos().items():
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.empty(info.shape, dtype=dtype)
                checkpoint.read(name, out)
                assert torch.equal(out, floats[name].to(dtype)), name
            rounded += info.dtype == "F8_E4M3"
    assert rounded >= 20


def test_a_network_computes_with_exactly_these(folders) -> None:
    tokens = list(range(3, 90))
    logits = []
    for folder in folders:
        with open_checkpoint(folder) as checkpoint:
            runner = Runner(load_model(checkpoint, kernels=CPU), num_blocks=2)
        logits.append(runner.logits(runner.hidden([Work(tokens, 0, [0, 1], False)])))
    assert torch.equal(*logits)


def test_eight_bit_kernels_of_a_cpu_round_it_for_themselves(folders) -> None:
    """Scales of blocks are no steps of integers."""
    logits = []
    for folder in folders:
        with open_checkpoint(folder) as checkpoint:
            runner = Runner(load_model(checkpoint, kernels=CPU8), num_blocks=2)
        logits.append(runner.logits(runner.hidden([Work(list(range(3, 90)), 0, [0, 1], False)])))
    assert torch.equal(*logits)


def test_a_device_multiplies_in_e4m3_what_is_stored_so(folders) -> None:
    """The CUDA table on a CPU, next to the same values in floats: apart by what rounding the rows costs, no more. Some
    of these shapes are too odd for e4m3 products, and are multiplied out."""
    tokens, device = list(range(3, 90)), torch.device("cpu")
    device_spec = DeviceSpec(device, torch.bfloat16, use_8_bit_products=True)
    logits, num_bytes = [], []
    for folder in folders:
        with open_checkpoint(folder) as checkpoint:
            table = table_of(device_spec, checkpoint)
            model = load_model(checkpoint, device_spec.dtype, kernels=table, store=OnDevice(device))
        assert table.name.endswith("F8_E4M3") == (folder == folders[0])
        runner = device_spec.runner(model, 2, mtp=False)
        logits.append(runner.logits(runner.hidden([Work(tokens, 0, [0, 1], False)])).float())
        num_bytes.append(model.num_bytes)
    ours, wanted = logits
    errors = (ours - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 0 < errors.median() < 0.15, (
        "rounded, and not far off: where a choice of experts is a tie a row may be further"
    )
    assert num_bytes[0] < 0.9 * num_bytes[1]


def test_it_can_be_quantised(folders, tmp_path) -> None:
    windows = [list(range(5, 105))]
    for folder in folders:
        with open_checkpoint(folder) as checkpoint:
            quantize(checkpoint, tmp_path / folder.name, techniques=Techniques(keep=0), windows=windows)
    ours, wanted = (
        {key: v for path in (tmp_path / f.name).glob("*.safetensors") for key, v in load_file(path).items()}
        for f in folders
    )
    assert ours.keys() == wanted.keys()
    for key in ours:
        assert torch.equal(ours[key], wanted[key]), key
    assert "quantization_config" in json.loads((tmp_path / folders[0].name / "config.json").read_text())
