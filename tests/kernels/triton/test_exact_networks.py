"""Networks in the exact mode: a row has the same logits to the bit alone, in company, in chunks, replayed, drafted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from oracle.case import Case, make_case, rope
from oracle.folders import save_case
from oracle.fp8 import to_fp8
from tripool.checkpoints import open_checkpoint
from tripool.engine.device_runner import DeviceRunner
from tripool.errors import NotExact
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.weights import E4M3, INT8
from tripool.models import Model, load_model
from tripool.quant import Techniques, quantize
from tripool.sequence import Work

SHARED = {"rope": rope(), "vocab": 208, "width": 96}
GQA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MLA = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
V2 = make_case("v2", "deepseek_v2", MLA, {"q_lora_rank": None}, **SHARED)
V3 = make_case("v3", "deepseek_v3", MLA, {"q_lora_rank": 32}, **SHARED)
LLAMA = make_case("llama", "llama", GQA, **SHARED, head_dim=16, attention_bias=True, mlp_bias=True)
QWEN = make_case("qwen3_moe", "qwen3_moe", GQA, MOE, **SHARED, head_dim=16)
TOKENS, PROMPT, END = list(range(3, 80)), 22, 27


def folder_of(case: Case, kind: str | None, folder: Path) -> Path:
    floats = save_case(case, folder / "floats")
    if kind == E4M3:
        to_fp8(floats, folder / "plain")
    if kind != INT8:
        return floats
    with open_checkpoint(floats) as checkpoint:
        quantize(checkpoint, folder / "int8", techniques=Techniques(keep=0), windows=[list(range(5, 60))])
    return folder / "int8"


def exact_model(folder: Path, kind: str | None, device: str) -> Model:
    quantized = quantized_ops_of(kind, fused=True, device=device, invariant=True) if kind else None
    table = cuda_table(torch.bfloat16, fused=True, quantized=quantized, invariant=Invariant.on(device))
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, torch.bfloat16, kernels=table, store=OnDevice(device))


def logits(runner: DeviceRunner, work: Sequence[Work]) -> torch.Tensor:
    """Of the rows of the first piece."""
    return runner.logits(runner.hidden(work)[: len(work[0].tokens)])


def piece(start: int, stop: int, table: list[int]) -> Work:
    return Work(TOKENS[start:stop], start, table, start >= PROMPT)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(V2, None, marks=pytest.mark.prove),
        (V2, INT8),
        pytest.param(V3, E4M3, marks=pytest.mark.prove),
        (LLAMA, None),
        pytest.param(QWEN, None, marks=pytest.mark.prove),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_row_has_the_same_bits_however_it_is_computed(
    device: str, tmp_path: Path, case: Case, kind: str | None
) -> None:
    model = exact_model(folder_of(case, kind, tmp_path), kind, device)

    def fresh() -> DeviceRunner:
        return DeviceRunner(model, num_blocks=6, device=device, dtype=torch.bfloat16)

    runner, mine, other = fresh(), [1, 4], [5, 0]
    alone = [logits(runner, [piece(0, PROMPT, mine)])]
    alone += [logits(runner, [piece(at, at + 1, mine)]) for at in range(PROMPT, END)]
    wanted, kv = torch.cat(alone), runner.kv.clone()

    runner = fresh()
    beside = [Work(TOKENS[::-1][:15], 0, other, False), Work([9], 15, other, True), Work([9, 8], 16, other, True)]
    together = [
        logits(runner, [piece(0, 9, mine)]),
        logits(runner, [piece(9, PROMPT, mine), beside[0]]),
        logits(runner, [piece(PROMPT, PROMPT + 2, mine), beside[1]]),  # as with a draft
        logits(runner, [piece(PROMPT + 2, END, mine), beside[2]]),  # as after a preemption
    ]
    assert torch.equal(torch.cat(together), wanted)
    slots = [mine[at // 64] * 64 + at % 64 for at in range(END)]
    assert torch.equal(runner.kv[:, slots], kv[:, slots])


def test_a_gate_of_float32_chooses_by_its_own_values(device: str) -> None:
    from tripool.kernels.cuda.make import Router
    from tripool.kernels.ref.route import RoutePlan
    from tripool.kernels.weights import MoeWeights, Norm

    gate = torch.randn(12, 64, device=device) / 8
    nothing = torch.empty(0)
    weights = MoeWeights(
        norm=Norm(torch.ones(64, device=device), 1e-6), gate=gate, gate_bias=None, gate_up=nothing, down=nothing,
        shared=None, plan=RoutePlan(3, "softmax"),
    )  # fmt: skip
    router = Router(weights, store=OnDevice(device), fused=True, invariant=Invariant.on(device))
    x = torch.randn(40, 64, device=device).bfloat16()
    rows, experts, shares = router(x)
    scores = (rows.double() @ gate.double().T).softmax(1)
    torch.testing.assert_close(shares.double(), scores.gather(1, experts.long()), rtol=1e-5, atol=0)
    assert torch.equal(experts.long(), scores.topk(3).indices)
    for one, all_rows in zip(router(x[7:8].clone()), (rows, experts, shares), strict=True):
        assert torch.equal(one[0], all_rows[7])


def test_what_has_no_exact_kernel_is_refused(tmp_path: Path) -> None:
    odd = make_case("odd", "llama", GQA | {"hidden_size": 60}, rope=rope(), vocab=208, width=96, head_dim=16)
    with pytest.raises(NotExact, match="60 columns"):
        exact_model(save_case(odd, tmp_path), None, "cpu")
