"""The cost model: what must hold for any shape, and what published tables of single operators say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost, footprint
from tripool.planner.cost.exchange import decode_exchange, nodes_touched, reduce_s
from tripool.planner.cost.layer import LayerModel, grouped_gemm_s
from tripool.planner.cost.setup import dense_precision, named_routing, place_experts
from tripool.planner.cost.skew import hottest, share_chosen
from tripool.planner.hardware import hardware_names, named_hardware
from tripool.planner.models import model_names, named_model

R1 = named_model("deepseek-r1")
ROUTING = named_routing()


def setup_of(draw: st.DrawFn, name: str, model_name: str) -> Setup:
    hardware, model = named_hardware(name), named_model(model_name)
    tp = draw(st.sampled_from((1, 2, 4, 8)))
    ep = tp * draw(st.sampled_from((1, 4, 16, 40))) if model.moe else tp
    precision = draw(st.sampled_from(sorted(hardware.flops)))
    drafts = draw(st.sampled_from((0, 1, 3))) if model.mtp_layers else 0
    balance = draw(st.sampled_from(("none", "balanced", "perfect")))
    microbatches = draw(st.sampled_from((1, 2))) if model.moe else 1
    return Setup(
        ep=ep,
        tp=tp,
        precision=precision,
        drafts=drafts,
        accept=0.7 if drafts else 0.0,
        balance=balance,
        microbatches=microbatches,
        attention_8bit=draw(st.booleans()),
        split_experts=model.moe is not None and tp == ep and microbatches == 1,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, Setup]:
    name, model = draw(st.sampled_from(hardware_names())), draw(st.sampled_from(model_names()))
    return name, model, setup_of(draw, name, model)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 300), st.floats(1, 50_000))
def test_more_work_takes_longer_and_batches_pay(case: tuple[str, str, Setup], requests: int, context: float) -> None:
    name, model_name, setup = case
    model = DecodeModel(named_hardware(name), named_model(model_name), setup)
    step = model.step(requests, context)
    assert step.seconds > 0 and all(seconds >= 0 for _, seconds in step.parts)
    assert model.step(requests, context * 1.5).seconds >= step.seconds
    assert model.step(requests + 1, context).seconds >= step.seconds * (1 - 1e-9)
    assert model.step_s(requests, requests * context) == pytest.approx(step.seconds)
    # Twice the batch never carries less: nothing in a step grows faster than its work.
    twice = model.step(2 * requests, context)
    assert twice.seconds <= 2 * step.seconds * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(64, 20_000), st.integers(2, 20_000), st.floats(0, 0.95))
def test_a_step_is_what_its_parts_say(case: tuple[str, str, Setup], tokens: int, prompt: int, share: float) -> None:
    name, model_name, setup = case
    hardware = named_hardware(name)
    step = PrefillModel(hardware, named_model(model_name), setup).step(tokens, prompt, share * (prompt - 1))
    total = sum(seconds for _, seconds in step.parts)
    assert step.compute_s + step.exchange_s == pytest.approx(total)
    if setup.microbatches == 1:
        assert step.seconds == pytest.approx(total)
    else:  # cores kept by communication make compute longer than its parts
        assert max(step.compute_s, step.exchange_s) <= step.seconds * (1 + 1e-9)
        assert step.seconds <= total / (1 - hardware.exchange.prefill_core_share) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(
    experts=st.sampled_from((16, 64, 128, 160, 256, 384)), ep=st.sampled_from((1, 2, 4, 8, 16, 32, 64, 144, 320)),
    tokens=st.floats(1, 1e5), popularity=st.floats(0.05, 1.0), drift=st.floats(0.05, 0.8),
)  # fmt: skip
def test_the_busiest_rank(experts: int, ep: int, tokens: float, popularity: float, drift: float) -> None:
    model = replace(R1, moe=replace(R1.moe, experts=experts))
    placed = place_experts(model, ep, 0.125, "balanced")
    bare = place_experts(model, ep, 0.125, "none")

    def hot(how: str, at: float = tokens) -> float:
        place = bare if how == "none" else placed
        return hottest(experts, place.slots, place.routed_ranks, at, popularity=popularity, drift=drift, balance=how)

    assert 1.0 - 1e-6 <= hot("perfect") <= hot("balanced") * 1.001 + 1e-6
    assert hot("perfect", 1e12) == pytest.approx(1.0, abs=1e-3), "only few tokens scatter"
    assert hot("balanced", tokens * 2) <= hot("balanced") + 1e-9, "many tokens scatter less than few"
    if ep <= experts // 2:  # enough experts a rank that packing matters
        assert hot("balanced") <= hot("none") * 1.02


def test_placement_is_the_published_one() -> None:
    ep32, ep320, ep144 = (place_experts(R1, ep, 0.125, "balanced") for ep in (32, 320, 144))
    assert (ep32.per_rank, ep32.shared_ranks) == (9, 0)
    assert (ep144.per_rank, ep144.shared_ranks) == (2, 0)
    assert (ep320.slots, ep320.per_rank, ep320.shared_ranks) == (288, 1, 32)


# Dispatch and combine on one node in microseconds, by tokens per rank: aiconfigurator, SGLang 0.5.12, DeepEP.
ONE_NODE = {
    ("h200", 8): {1: (12, 13), 64: (23, 39), 128: (35, 68), 256: (61, 125), 1024: (211, 481)},
    ("h100", 8): {1: (13, 14), 64: (25, 40), 128: (37, 67), 256: (63, 130), 1024: (224, 489)},
    ("b200", 8): {1: (22, 22), 64: (27, 32), 128: (33, 41), 256: (45, 63), 1024: (130, 189)},
    ("gb200-nvl72", 4): {1: (17, 18), 64: (22, 26), 128: (27, 36), 256: (38, 55), 1024: (113, 168)},
}


@pytest.mark.parametrize(("name", "ep"), ONE_NODE)
def test_dispatch_and_combine_on_one_node(name: str, ep: int) -> None:
    for tokens, told_us in ONE_NODE[name, ep].items():
        moved = decode_exchange(named_hardware(name), R1, "fp8", ep=ep, tokens=tokens, hot_tokens=tokens * 8)
        assert (moved.dispatch_s + moved.combine_s) * 1e6 == pytest.approx(sum(told_us), rel=0.2), tokens


# Grouped GEMMs of 4096 x 7168 by experts and rows each, in microseconds: DeepGEMM's README and pull 116, FlashInfer's
# pull 2503.
GROUPED = {
    ("h800", "fp8"): {(1, 1024): 48.8, (2, 512): 57.8, (4, 256): 64.5},
    ("gb200-nvl72", "fp4"): {(18, 56): 67, (18, 113): 72, (18, 227): 96, (18, 341): 123, (18, 455): 153},
}


@pytest.mark.parametrize(("name", "precision"), GROUPED)
def test_grouped_gemms(name: str, precision: str) -> None:
    for (experts, rows), told_us in GROUPED[name, precision].items():
        seconds = grouped_gemm_s(named_hardware(name), experts * 4096 * 7168, rows, precision)
        assert seconds * 1e6 == pytest.approx(told_us, rel=0.25), (experts, rows)


def test_experts_of_a_decode_step_are_read_as_measured() -> None:
    """aiconfigurator, SGLang 0.5.10: 355 us from 32 to 64 experts on H200, 457 us from 64 to 128 on GB200."""
    for name, more, told_us in (("h200", 32, 355), ("gb200-nvl72", 64, 457)):
        seconds = grouped_gemm_s(named_hardware(name), more * R1.expert_params, 1, "fp8")
        assert seconds * 1e6 == pytest.approx(told_us, rel=0.05)


# All-reduce in microseconds by GPUs and bytes: aiconfigurator 0.12, SGLang 0.5.14.
REDUCED = {
    ("h200", 2, 2**15): 2.9, ("h200", 8, 2**15): 5.0, ("h200", 8, 2**17): 8.0, ("h200", 8, 2**26): 563,
    ("b200", 2, 2**15): 4.7, ("b200", 8, 2**15): 6.2, ("b200", 8, 2**19): 15.0, ("b200", 8, 2**20): 18.9,
    ("b200", 8, 2**22): 36.2, ("b200", 8, 2**26): 397, ("b200", 2, 2**20): 8.7,
}  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "num_bytes"), REDUCED)
def test_reductions_of_a_tensor_parallel_group(name: str, tp: int, num_bytes: int) -> None:
    seconds = reduce_s(named_hardware(name), R1, tp=tp, tokens=num_bytes / (2 * R1.hidden))
    assert seconds * 1e6 == pytest.approx(REDUCED[name, tp, num_bytes], rel=0.35)


# Experts of DeepSeek-V3 split over 8 GPUs, in microseconds by tokens: aiconfigurator 0.12, SGLang 0.5.14.
SPLIT = {
    ("b200", "fp8"): {1: 35, 16: 102, 128: 205, 4096: 742, 16384: 2461},
    ("b200", "fp4"): {1: 19, 16: 63, 128: 136, 4096: 426, 16384: 1150},
    ("h200", "fp8"): {1: 37, 16: 191, 128: 351, 4096: 1151, 16384: 3767},
}


@pytest.mark.parametrize(("name", "precision"), SPLIT)
def test_split_experts_have_kernels_of_their_own(name: str, precision: str) -> None:
    chip = named_hardware(name)
    setup = Setup(ep=8, tp=8, precision=precision, split_experts=True)
    layer = LayerModel(chip, R1, setup, named_routing())
    fixed_s = chip.experts_fp4_s if precision == "fp4" else chip.experts_split_s or chip.experts_s
    for tokens, told_us in SPLIT[name, precision].items():
        found_us = (layer.experts(tokens / 8, 0.0).seconds + fixed_s) * 1e6
        assert found_us == pytest.approx(told_us, rel=0.3), tokens


def test_one_tensor_parallel_group_reduces_and_does_not_exchange() -> None:
    parts = {
        tp: dict(DecodeModel(named_hardware("b200"), R1, Setup(ep=8, tp=tp, precision="fp8")).step(4, 2048).parts)
        for tp in (1, 2, 8)
    }
    assert parts[1]["dispatch"] > 0 and parts[2]["dispatch"] > 0 == parts[8]["dispatch"]
    assert parts[1]["tensor parallel"] == 0 < parts[2]["tensor parallel"] < parts[8]["tensor parallel"]


def test_experts_that_get_no_token() -> None:
    assert share_chosen(256, 256, 0.0) == pytest.approx(1 - math.exp(-1))
    shares = [share_chosen(copies, 256, 0.8) for copies in (8, 128, 512, 10**6)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0, abs=1e-3)
    assert all(share_chosen(copies, 256, 0.8) < share_chosen(copies, 256, 0.2) for copies in (64, 512))


# Dispatch and combine in microseconds at 128 tokens per rank, by EP: arXiv:2506.12708 and DeepEP's second release.
TABLES = {
    ("ascend-910c", "int8"): {8: (116, 118), 256: (152, 149)},
    ("h800", "fp8"): {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)},
}


@pytest.mark.parametrize(("name", "precision"), TABLES)
def test_dispatch_and_combine_by_degree(name: str, precision: str) -> None:
    for ep, (dispatch_us, combine_us) in TABLES[name, precision].items():
        moved = decode_exchange(named_hardware(name), R1, precision, ep=ep, tokens=128, hot_tokens=128 * 8)
        assert moved.dispatch_s * 1e6 == pytest.approx(dispatch_us, rel=0.10), ep
        assert moved.combine_s * 1e6 == pytest.approx(combine_us, rel=0.10), ep


def test_a_token_crosses_to_few_nodes() -> None:
    """4 of 8 groups chosen, 2 groups on each of 4 nodes: 3.14 nodes on average."""
    assert nodes_touched(R1.moe, 4) == pytest.approx(4 * (1 - 15 / 70))
    assert nodes_touched(replace(R1.moe, groups=1), 1000) == pytest.approx(8, rel=0.01)


def test_attention_changes_its_limit() -> None:
    """Two query tokens per request turn MLA on the 910C from the edge of memory-bound to compute-bound."""
    chip = named_hardware("ascend-910c")

    def attention_s(drafts: int) -> float:
        setup = Setup(ep=320, precision="int8", drafts=drafts, accept=0.7 * drafts)
        step = DecodeModel(chip, R1, setup).step(48, 4096)
        return dict(step.parts)["attention"] / (61 + drafts)

    read_s = 48 * 4096 * 1152 / (1.6e12 * 0.841)
    assert attention_s(1) == pytest.approx(2 * attention_s(0)) and attention_s(0) > read_s


def test_iteration_time_is_concave_at_small_batches() -> None:
    """Published: 25.3, 41.8 and 84.0 ms at 4, 12 and 48 requests per die. A request adds less the more there are."""
    chip = named_hardware("ascend-910c")

    def iteration_s(requests: int) -> float:
        setups = (
            Setup(ep=320, precision="int8", drafts=1, accept=0.7, microbatches=microbatches) for microbatches in (1, 2)
        )
        return min(DecodeModel(chip, R1, setup).step(requests, 4224).seconds for setup in setups)

    times = [iteration_s(requests) for requests in (4, 12, 48)]
    first, second = (times[1] - times[0]) / 8, (times[2] - times[1]) / 36
    assert first > 1.1 * second
    assert [time * 1e3 for time in times] == pytest.approx([25.3, 41.8, 84.0], rel=0.12)


def test_memory_of_the_published_deployments() -> None:
    """EP320 on 64 GB dies leaves room for far more than 48 requests of 4 K; 16 dies do not hold the model."""
    chip = named_hardware("ascend-910c")
    wide = footprint(chip, R1, Setup(ep=320, precision="int8", drafts=1, accept=0.7))
    assert wide.max_requests(4096 + 256) > 48
    assert (
        footprint(chip, R1, Setup(ep=8, precision="int8")).kv
        < 0
        < footprint(chip, R1, Setup(ep=32, precision="int8")).kv
    )


def test_tensor_parallel_groups_trade_weights_for_cache() -> None:
    """MLA's cache is repeated in a group, grouped-query heads are split."""
    gpu = named_hardware("h100")
    latent = [footprint(gpu, R1, Setup(ep=32, tp=tp, precision="fp8")) for tp in (1, 4)]
    assert latent[1].weights < latent[0].weights and latent[1].kv_per_token == 4 * latent[0].kv_per_token
    llama = named_model("llama-3-70b")
    grouped = [footprint(gpu, llama, Setup(ep=tp, tp=tp, precision="fp8")) for tp in (2, 8)]
    assert grouped[0].kv_per_token == grouped[1].kv_per_token


def test_the_slowest_rank_of_many_is_slower() -> None:
    """Jitter grows with the instance; unequal contexts hurt small batches most, and equal ones not at all."""
    chip = named_hardware("ascend-910c")

    def step(ep: int, requests: int, spread: float = 0.0) -> StepCost:
        setup = Setup(ep=ep, precision="int8", balance="perfect")
        return DecodeModel(chip, R1, setup).step(requests, 4096, context_spread=spread)

    def share(ep: int) -> float:
        found = step(ep, 32)
        return dict(found.parts)["jitter"] / found.compute_s

    assert 0 < share(32) < share(256) < 0.03
    even, small, large = step(256, 4), step(256, 4, 0.5), step(256, 64, 0.5)
    attention = [dict(found.parts)["attention"] for found in (even, small, step(256, 64), large)]
    assert attention[1] / attention[0] > attention[3] / attention[2] > 1.1
    assert step(256, 4, 0.0) == even


def decode_s(name: str, model: str, requests: float, context: float, **options: object) -> float:
    setup = Setup(**({"ep": 32, "precision": "fp8"} | options))
    return DecodeModel(named_hardware(name), named_model(model), setup).step(requests, context).seconds


def test_sparse_attention_stops_growing_where_dense_goes_on() -> None:
    """V3.2 over V3: the same below 2,048 tokens but for its indexer, and far less of a long context."""
    names = ("deepseek-v3.2", "deepseek-v3")
    grown = [decode_s("h800", name, 32, 65536) - decode_s("h800", name, 32, 2048) for name in names]
    assert 0 < grown[0] < grown[1] / 4
    assert decode_s("h800", "deepseek-v3.2", 32, 1024) > decode_s("h800", "deepseek-v3", 32, 1024)


def test_hybrids_and_windows_read_less_of_a_long_context() -> None:
    for name in ("qwen3-next-80b-a3b", "gpt-oss-120b"):
        model = named_model(name)
        plain = replace(model, linear_layers=0, linear=None, windowed_layers=0)
        setup = Setup(ep=8, precision="fp8")
        steps = [DecodeModel(named_hardware("h200"), each, setup).step(64, 32768) for each in (model, plain)]
        assert steps[0].seconds < steps[1].seconds


def test_attention_in_eight_bits() -> None:
    """Published: about 70 % faster on Hopper, 1.8 times on Blackwell; BF16 where a chip has no such kernel."""
    for name, gain in (("h20", 1.7), ("gb200-nvl72", 1.8)):
        parts = []
        for eight in (False, True):
            setup = Setup(ep=16, precision="fp8", attention_8bit=eight, kv_element_bytes=1.0 if eight else 2.0)
            parts.append(dict(DecodeModel(named_hardware(name), R1, setup).step(64, 4096).parts)["attention"])
        assert parts[0] / parts[1] == pytest.approx(gain, rel=0.05)
    assert decode_s("ascend-910c", "deepseek-r1", 32, 4096, precision="int8", attention_8bit=True) == decode_s(
        "ascend-910c", "deepseek-r1", 32, 4096, precision="int8"
    )


def test_drafts_cost_a_layer_each() -> None:
    steps = [decode_s("h200", "deepseek-r1", 4, 4096, drafts=drafts) for drafts in range(5)]
    assert steps == sorted(steps)
    setup = Setup(ep=16, precision="fp8", drafts=3, accept=0.5)
    assert setup.tokens_per_step == 2.5 and setup.query_tokens == 4


def test_four_bit_experts_keep_the_rest_in_eight() -> None:
    """Or in BF16, or in as few, as the published checkpoint of a model has it."""
    rest = {
        name: dense_precision(named_model(name), Setup(ep=8, precision="fp4"))
        for name in ("deepseek-r1", "kimi-k2", "gpt-oss-120b", "qwen3-235b-a22b")
    }
    assert [*rest.values()] == ["fp8", "bf16", "bf16", "fp4"]
    assert dense_precision(named_model("llama-3-70b"), Setup(ep=1, precision="fp4")) == "fp4"
    assert dense_precision(R1, Setup(ep=8, precision="fp4", rest="bf16")) == "bf16"
    room = [footprint(named_hardware("gb200-nvl72"), R1, Setup(ep=8, precision=name)) for name in ("fp4", "fp8")]
    assert 0.5 < room[0].weights / room[1].weights < 0.7


def test_weights_of_four_bits_are_computed_with_in_bf16() -> None:
    """On any hardware: few tokens are faster than in BF16, many as fast, and experts alone have 4 bits."""
    for name in ("h200", "ascend-910c", "b200"):
        chip = named_hardware(name)
        few, many = (
            [
                DecodeModel(chip, R1, Setup(ep=32, precision=precision)).step_s(batch, batch * 100)
                for precision in ("int4", "bf16")
            ]
            for batch in (1, 2000)
        )
        assert few[0] < few[1] and many[0] == pytest.approx(many[1], rel=0.1)
    assert dense_precision(R1, Setup(ep=8, precision="int4")) == "bf16"
    assert dense_precision(named_model("llama-3-70b"), Setup(ep=1, precision="int4")) == "int4"


def test_split_experts_reduce_instead_of_dispatching() -> None:
    setup = Setup(ep=8, tp=8, precision="fp8", split_experts=True)
    parts = dict(DecodeModel(named_hardware("h200"), R1, setup).step(4, 4096).parts)
    assert parts["dispatch"] == parts["combine"] == 0 < parts["tensor parallel"]
    held = footprint(named_hardware("h200"), R1, setup)
    assert held.weights * 8 == pytest.approx(R1.total_params, rel=0.03)


def test_attention_and_experts_on_ranks_of_their_own() -> None:
    """As many ranks, a third of them for experts: the slower pool sets the pace, and attention has more room."""
    hardware = named_hardware("ascend-910c")
    both = Setup(ep=96, precision="int8", microbatches=2)
    apart = replace(both, expert_ranks=32)
    assert apart.attention_ranks == 64 and apart.holding_ranks == 32
    one, two = (DecodeModel(hardware, R1, setup).step(48, 4096) for setup in (both, apart))
    assert two.seconds > 0 and dict(two.parts)["experts"] > dict(one.parts)["experts"]
    attention = [dict(step.parts)["attention"] for step in (one, two)]
    assert attention[0] == attention[1], "a rank's requests are its own"
    assert two.seconds < sum(seconds for _, seconds in two.parts)
    assert footprint(hardware, R1, apart).kv > footprint(hardware, R1, both).kv


def test_ranks_with_requests_of_their_own_agree_on_a_step() -> None:
    """One tensor-parallel group has one scheduler, and agrees with none."""
    chip = named_hardware("h200")
    alone = replace(chip, agree_s=0.0)
    for tp, agrees in ((8, False), (4, True), (1, True)):
        setup = Setup(ep=8, tp=tp, precision="fp8")
        steps = [DecodeModel(each, R1, setup).step(4, 4096).seconds for each in (chip, alone)]
        assert steps[0] - steps[1] == pytest.approx(chip.agree_s if agrees else 0.0, abs=1e-9)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_chip_that_is_better_in_every_number_is_never_slower(precision: str) -> None:
    """H100 has the H800's compute and memory and more than twice its NVLink."""
    for ep in (8, 16, 32, 72):
        setup = Setup(ep=ep, precision=precision)
        strong, weak = (DecodeModel(named_hardware(name), R1, setup) for name in ("h100", "h800"))
        assert all(strong.step(size, 4096).seconds <= weak.step(size, 4096).seconds for size in (1, 16, 128))
        strong, weak = (PrefillModel(named_hardware(name), R1, setup) for name in ("h100", "h800"))
        assert all(strong.step_s(size, 4096) <= weak.step_s(size, 4096) for size in (512, 16384))


def test_a_layers_fixed_cost_counts_what_the_model_has() -> None:
    """Latent attention, 8-bit experts and a shared one are what descriptions have."""
    chip = named_hardware("b200")

    def fixed_us(model: str, precision: str = "fp8") -> float:
        return LayerModel(chip, named_model(model), Setup(ep=8, precision=precision), named_routing()).fixed_s * 1e6

    assert fixed_us("deepseek-r1") == pytest.approx(106)
    assert fixed_us("deepseek-r1", "fp4") == pytest.approx(106 - 15)
    assert fixed_us("deepseek-v3.2") == pytest.approx(106 + 70)
    assert fixed_us("glm-4.5") == pytest.approx(106 - 55 + 9 * 3)
    assert fixed_us("qwen3-235b-a22b") == pytest.approx(106 - 55 + 9 * 3 - 3 * 3)
    assert fixed_us("qwen3-235b-a22b", "bf16") == pytest.approx(106 - 55 + 9 * 3 - 3 * 3 - 15)
    assert fixed_us("gpt-oss-120b", "fp4") == pytest.approx(106 - 55 + 7 * 3 - 3 * 3 - 15)
    heads_split = Setup(ep=8, tp=8, precision="fp8")
    assert LayerModel(chip, R1, heads_split, named_routing()).fixed_s * 1e6 == pytest.approx(106 - 55 + 40)
