"""Each row is predicted under its own conditions, or a reason says why it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tripool.planner.cost import DecodeModel, Setup
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.planner.rows import compare_rows, hardware_of, model_of, predict
from tripool.planner.rows.predicting import served_by

R1 = named_model("deepseek-r1")


def rate(row) -> float:
    predicted = predict(row, R1).predicted
    assert predicted is not None
    return predicted


@pytest.mark.parametrize(
    ("told", "name"),
    [("H20", "h20"), ("H200 SXM", "h200"), ("NVIDIA GB200 NVL72", "gb200-nvl72"), ("H800", "h800"),
     ("Ascend 910C (CloudMatrix384)", "ascend-910c"), ("8xH100", "h100"), ("H100-80GB", "h100"),
     ("Ascend910C", "ascend-910c"), ("4 x H800", "h800"), ("8xB200", "b200"), ("H20-3e", "h20-3e"),
     ("GB300 NVL72", "gb300-nvl72"), ("MI300X", "mi300x"), ("AMD MI355X", "mi355x")],
)  # fmt: skip
def test_hardware_by_the_name_tables_use(row_of, told: str, name: str) -> None:
    assert hardware_of(row_of(hardware=told)).name == name


@pytest.mark.parametrize("told", ["GH100", "H1000", "1910C", "Ascend 910B", "MI250X", ""])
def test_other_hardware_is_not_taken_for_ours(row_of, told: str) -> None:
    assert hardware_of(row_of(hardware=told)) is None


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"hardware": "Abacus"}, "hardware"), ({"batch_per_device": ""}, "batch"), ({"precision": "FP4"}, "precision"),
        ({"precision": ""}, "precision"), ({"mtp": ""}, "MTP"), ({"mtp": "3 drafts"}, "accepted length"),
        ({"model": ""}, "model"), ({"model": "LongCat-Flash"}, "LongCat"), ({"context_len": ""}, "context"),
        ({"ep": "", "n_devices": ""}, "devices"), ({"batch_per_device": 4096}, "does not fit"),
        ({"tok_s_per_device": ""}, "no rate"),
    ],
)  # fmt: skip
def test_what_is_not_stated_is_shown_with_its_reason(row_of, cells: dict[str, str], reason: str) -> None:
    (compared,) = compare_rows([row_of(**cells)], R1)
    assert compared.role == "shown" and reason in compared.prediction.reason


def test_prefill_does_not_ask_about_drafts(row_of) -> None:
    row = row_of(phase="prefill", ep=32, batch_per_device=16384, context_len=4096, mtp="")
    assert predict(row, R1).error is not None


def test_a_model_without_a_draft_layer_needs_no_word_about_it(row_of) -> None:
    assert predict(row_of(model="Qwen3-235B-A22B", mtp=""), R1).error is not None


@pytest.mark.parametrize(
    ("told", "name"),
    [("Kimi K2", "kimi-k2"), ("moonshotai/Kimi-K2-Instruct", "kimi-k2"), ("DeepSeek-R1-0528", "deepseek-r1"),
     ("DeepSeek V3.1", "deepseek-v3"), ("DeepSeek-V3.2-Exp", "deepseek-v3.2"), ("Qwen3-235B", "qwen3-235b-a22b"),
     ("Qwen3-Next", "qwen3-next-80b-a3b"), ("GLM-4.6", "glm-4.5"), ("gpt-oss-120b", "gpt-oss-120b"),
     ("Llama-3.3-70B", "llama-3-70b")],
)  # fmt: skip
def test_models_by_the_names_tables_use(row_of, told: str, name: str) -> None:
    assert model_of(row_of(model=told), R1).name == name


@pytest.mark.parametrize(
    "told",
    ["LongCat-Flash", "DeepSeek-V4", "Kimi-K3", "Qwen4", "MiniMax-M2", "Mixtral-8x7B", "GLM-4.5-Air", "GLM-4.5V",
     "GLM-4.7-Flash", "DeepSeek-R1-Distill-Qwen-32B", "gpt-oss", "gpt-oss-20b", "Qwen3.5-35B-A3B", "Qwen3-32B",
     "Llama-3.1-405B", "DeepSeek-Coder-V2", "Kimi-Linear-48B-A3B"],
)  # fmt: skip
def test_another_model_is_never_taken_for_ours(row_of, told: str) -> None:
    assert model_of(row_of(model=told), R1) is None


def test_a_row_of_kimi_is_predicted_as_kimi(row_of) -> None:
    row = row_of(system="Kimi-K2 on xLLM", hardware="H200", ep=96)
    assert rate(row) == predict(row_of(hardware="H200", ep=96), named_model("kimi-k2")).predicted != rate(row_of())


def test_conditions_change_predictions(row_of) -> None:
    plain = rate(row_of())
    assert rate(row_of(system="no TBO")) < plain == rate(row_of(system="with TBO"))
    assert rate(row_of(system="perfect EPLB")) > plain > rate(row_of(system="no EPLB"))
    assert rate(row_of(precision="FP8, FP8 attention")) > rate(row_of(precision="FP8 weights, FP8 KV")) >= plain
    fp4 = {"hardware": "GB200", "ep": 48}
    assert rate(row_of(precision="NVFP4 + FP8", **fp4)) > rate(row_of(precision="FP8", **fp4))


def test_several_drafts_count_their_accepted_length(row_of) -> None:
    few = {"batch_per_device": 4}
    one, three = row_of(mtp="1 draft, 0.8", **few), row_of(mtp="3 drafts, accepted length 3.4", **few)
    assert rate(three) > rate(one) > rate(row_of(**few))
    assert rate(row_of(mtp="3 drafts, accepted length 1.2", **few)) < rate(one)


def test_a_batch_per_die_is_twice_that_of_the_chip(row_of) -> None:
    chip = {"hardware": "Ascend 910C", "precision": "INT8", "ep": 320, "context_len": 4096}
    per_die = row_of(batch_per_device="48 per die", tok_s_per_device="970 per die", **chip)
    assert rate(per_die) == rate(row_of(batch_per_device=96, **chip))
    assert predict(per_die, R1).published == 1940


def test_a_batch_that_does_not_fit_says_by_how_much(row_of) -> None:
    assert "GB" in predict(row_of(batch_per_device=2000, context_len=8000), R1).reason
    assert predict(row_of(hardware="GB200", ep=48, batch_per_device=1408, context_len=2050), R1).reason
    eight = row_of(hardware="GB200", ep=48, batch_per_device=1408, context_len=2050, precision="NVFP4, FP8 KV")
    assert not predict(eight, R1).reason


def test_tensor_parallel_rows(row_of) -> None:
    """A TP degree without an EP degree splits experts; a dense model has no experts to place."""
    split = row_of(system="prefill TP8", hardware="H20", n_devices=8, ep="", phase="prefill", batch_per_device=2048)
    found = predict(split, R1)
    assert dict(found.step.parts)["dispatch"] == 0 < dict(found.step.parts)["tensor parallel"]
    dense = predict(row_of(model="Llama-3.1-70B", tp=8, ep="", batch_per_device=1), R1)
    assert dict(dense.step.parts)["tensor parallel"] > 0


def test_software_is_apart_from_hardware(row_of) -> None:
    """A row of DeepSeek's own system has its own constant; the chip it ran on plans without it."""
    h800, h100 = named_hardware("h800"), named_hardware("h100")
    served = served_by(row_of(system="DeepSeek profile-data"), h800)
    assert served.prefill_stack != h800.prefill_stack == h100.prefill_stack
    assert served_by(row_of(system="DeepSeek-R1 on vLLM"), h800) == h800
    sglang = served_by(row_of(system="DeepSeek-R1 on SGLang"), h800)
    assert sglang.draft_s > 0 == h800.draft_s
    assert sglang.prefill_stack == h800.prefill_stack
    assert served_by(row_of(system="SGLang", mtp="simulated 0.6"), h800).draft_s == 0


def test_an_old_version_has_constants_of_its_own(row_of) -> None:
    """By the version that a row states, or else by its date; what states neither runs the newest."""
    chip = named_hardware("b200")

    def served(source: str):
        return served_by(row_of(system="SGLang", hardware="B200", source=source), chip)

    old, between, new = served("SGLang 0.5.6.post1"), served("SGLang 0.5.8: x"), served("SGLang 0.5.8.post1")
    assert old.agree_s > 0 == between.agree_s == new.agree_s == chip.agree_s
    assert old.experts_split_s == between.experts_split_s > new.experts_split_s == chip.experts_split_s
    assert served("lmsys.org 2025-05-05").agree_s == served("arXiv:2506.12708v3 Tab.3").agree_s == old.agree_s
    assert served("lmsys.org 2026-02-19").agree_s == served("a blog").agree_s == 0


def test_kernels_of_other_software_are_its_own(row_of) -> None:
    """aiconfigurator: split over 8 H200, experts of DeepSeek-V3 take 37 us in SGLang, 100 to 127 us in TensorRT-LLM."""
    cells = {"hardware": "H200", "n_devices": 8, "tp": 8, "ep": "", "batch_per_device": 1, "model": "DeepSeek-R1"}
    rates = [predict(row_of(**cells, system=name), R1).predicted for name in ("SGLang", "vLLM", "TensorRT-LLM")]
    assert rates[0] > 1.15 * rates[1] and rates[0] > 1.2 * rates[2]


def test_prompts_between_the_steps_take_their_time(row_of) -> None:
    cells = {"hardware": "H200", "n_devices": 8, "tp": 8, "ep": "", "batch_per_device": 8, "output_len": 1024}
    apart = predict(row_of(**cells, model="DeepSeek-R1"), R1)
    together = predict(row_of(**cells, model="DeepSeek-R1", source="prompts computed between the steps"), R1)
    assert 0.7 * apart.predicted < together.predicted < 0.95 * apart.predicted
    unknown = row_of(**(cells | {"output_len": ""}), model="DeepSeek-R1", source="colocated")
    assert "length of answers" in predict(unknown, R1).reason


def test_prompts_that_come_in_one_step_are_computed_together(row_of) -> None:
    """Once one after the other, each waiting for its own launches: 70 % too slow at thousands of requests."""
    cells = {"hardware": "B200", "n_devices": "8", "precision": "NVFP4", "ep": "8", "mtp": "0", "context_len": "1024"}
    rows = [
        row_of(**cells, output_len=answer, batch_per_device="384", model="DeepSeek-R1", source="colocated")
        for answer in ("2048", "1024")
    ]
    few, many = (predict(row, R1).predicted for row in rows)
    assert many > 0.9 * few, "twice the prompts, in batches twice as large"


def test_experts_on_ranks_of_their_own(row_of) -> None:
    cells = {"hardware": "Ascend 910C", "n_devices": 40, "precision": "INT8", "ep": 80, "context_len": 4096}
    row = row_of(**cells, batch_per_device="32 per die", system="vLLM-Ascend 64A16F")
    found = predict(row, R1)
    assert row.expert_ranks == 16 and found.microbatches == 2 and found.predicted
    alone = predict(replace(row, expert_ranks=0), R1)
    assert found.predicted != alone.predicted


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"tp": 16, "ep": "", "n_devices": 16, "hardware": "H100"}, "across nodes"),
        ({"model": "DeepSeek-V3.2", "hardware": "Ascend 910C", "precision": "INT8"}, "sparse attention"),
    ],
)
def test_what_nobody_published_is_shown(row_of, cells: dict[str, object], said: str) -> None:
    assert said in predict(row_of(**cells), R1).reason


def test_a_layer_has_the_kernels_of_its_attention() -> None:
    """Latent attention has the most; measured on B200: 9.2 ms of 61 layers, 10.1 ms of 94 without it."""
    chip = named_hardware("b200")
    times = {
        name: DecodeModel(chip, named_model(name), Setup(ep=8, tp=8, precision="bf16", split_experts=True)).step(1, 800)
        for name in ("deepseek-r1", "deepseek-v3.2", "qwen3-235b-a22b")
    }
    layers = {name: dict(step.parts)["layer"] / named_model(name).layers for name, step in times.items()}
    assert layers["qwen3-235b-a22b"] < 0.8 * layers["deepseek-r1"] < layers["deepseek-v3.2"]
