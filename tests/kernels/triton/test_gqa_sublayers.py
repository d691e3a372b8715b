"""Grouped-query attention and dense MLP sublayers in 16 bits, and whole networks: with Triton kernels and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle.case import Case, make_case, rope
from oracle.folders import save_case
from tripool.checkpoints import open_checkpoint
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.runner import Runner, batch_of
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.weights import GqaWeights, MlpWeights, Norm
from tripool.models import load_model
from tripool.sequence import Work

HIDDEN, HEADS, KV_HEADS, DIM, BLOCKS = 48, 6, 2, 16, 12
GQA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}
"""Every row uses every expert: were one of two that nearly tie chosen, all later rows would be others."""
SHARED = {"rope": rope(), "vocab": 208, "width": 96, "head_dim": 16}
NETWORKS = [
    make_case("llama", "llama", GQA, **SHARED, attention_bias=True, mlp_bias=True),
    make_case("qwen3", "qwen3", GQA, **SHARED, tie_word_embeddings=True),
    pytest.param(make_case("qwen3_moe", "qwen3_moe", GQA, MOE, **SHARED), marks=pytest.mark.prove),
]
BOTH = [cuda_table(torch.bfloat16, fused=fused) for fused in (False, True)]


def normal(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16()


def gain(width: int) -> Norm:
    return Norm((torch.rand(width) + 0.5).bfloat16(), 1e-5)


def near(ours: torch.Tensor, plain: torch.Tensor, within: float = 1.5e-2) -> None:
    assert ours.isfinite().all()
    error = (ours.double() - plain.double()).norm() / plain.double().norm()
    assert error < within, error


def works(first: int) -> list[Work]:
    """Two whole prompts, a chunk of a third, decode pieces of one and of two rows."""
    return [
        Work([1] * 70, first, [3, 7], False), Work([1] * 9, first, [1], False), Work([1] * 20, 60, [4, 0], False),
        Work([1], 130, [9, 2, 5], True), Work([1, 1], 40, [8], True),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("part", [slice(None), slice(4, 5)], ids=["mixed", "two rows"])
def test_attention(device: str, part: slice, with_norms: bool, first: int) -> None:
    out = HEADS * DIM
    weights = GqaWeights(
        norm=gain(HIDDEN), qkv=normal((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), qkv_bias=None, out=normal(HIDDEN, out),
        out_bias=None, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5,
        q_norm=gain(DIM) if with_norms else None, k_norm=gain(DIM) if with_norms else None,
    )  # fmt: skip
    x, kv = normal(200, HIDDEN) * 7, normal(BLOCKS * 64, 2 * KV_HEADS * DIM) * 5
    angles = torch.randn(200, DIM // 2)
    results = []
    for table in BOTH:
        assert table.over is not None
        batch, _ = batch_of(works(first)[part], first=first)
        rows = batch.num_rows
        batch.tokens, batch.slot_mapping = batch.tokens.to(device), batch.slot_mapping.to(device)
        batch.cos_sin = torch.polar(torch.ones(rows, DIM // 2), angles[:rows]).to(device)
        stream, cache = x[:rows].to(device, copy=True), kv.to(device, copy=True)
        table.over(OnDevice(device)).gqa(_moved(weights, device))(stream, batch, cache)
        results.append((stream, cache))
    near(results[1][0], results[0][0])
    near(results[1][1], results[0][1])
    written = [(cache != kv.to(device)).any(1) for _, cache in results]
    assert torch.equal(*written), "other slots were written"


def _moved(weights: GqaWeights, device: str) -> GqaWeights:
    fields = {name: getattr(weights, name) for name in weights.__slots__}
    moved = {name: field.to(device) for name, field in fields.items() if isinstance(field, torch.Tensor)}
    norms = {name: Norm(field.gain.to(device), field.eps) for name, field in fields.items() if isinstance(field, Norm)}
    return GqaWeights(**fields | moved | norms)


def test_mlp(device: str) -> None:
    weights = MlpWeights(
        norm=Norm(gain(HIDDEN).gain.to(device), 1e-5), gate_up=normal(160, HIDDEN), gate_up_bias=None,
        down=normal(HIDDEN, 80), down_bias=None,
    )  # fmt: skip
    x = normal(7, HIDDEN) * 7
    results = []
    for table in BOTH:
        assert table.over is not None
        results.append(x.to(device, copy=True))
        table.over(OnDevice(device)).mlp(weights)(results[-1])
    near(results[1], results[0])


@pytest.mark.parametrize("case", NETWORKS, ids=["llama", "qwen3", "qwen3_moe"])
def test_networks(device: str, tmp_path: Path, case: Case) -> None:
    """A prompt in two chunks beside another, then captured decode steps of one row and of two."""
    tokens = list(range(3, 80))
    steps = [
        [Work(tokens[:30], 0, [0, 1], False), Work(tokens[5:20], 0, [2], False)],
        [Work(tokens[30:], 30, [0, 1], False), Work([9], 15, [2], True)],
        [Work([5], 77, [0, 1], True), Work([6], 16, [2], True)],
        [Work([5, 8], 78, [0, 1], True), Work([6], 17, [2], True)],
    ]
    spoken = []
    with open_checkpoint(save_case(case, tmp_path)) as checkpoint:
        floats = Runner(load_model(checkpoint), num_blocks=3)
        wanted = torch.cat([floats.logits(floats.hidden(work)) for work in steps])
        for table in BOTH:
            model = load_model(checkpoint, torch.bfloat16, kernels=table, store=OnDevice(device))
            runner = DeviceRunner(model, num_blocks=3, device=device, dtype=torch.bfloat16)
            spoken.append(torch.cat([runner.logits(runner.hidden(work)).float().cpu() for work in steps]))
    plain, ours = (float(((each - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) for each in spoken)
    assert ours < 1.25 * plain < 0.1, f"{ours:.3f} from float32, plain {plain:.3f}"
