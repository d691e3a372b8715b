"""What a simulated deployment shows: load, hits, faults and recovery, and the report of it all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.supernode.small import small_layout
from tripool.bench.trace import TraceRequest
from tripool.decode.worker import DecodeWorker
from tripool.errors import InvalidRequest
from tripool.planner.cost import DecodeModel
from tripool.planner.deployment import read_deployment
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.prefill.worker import PrefillWorker
from tripool.simulate.supernode import lay_out, parse_fault, simulate_trace
from tripool.simulate.supernode.page import render_comparison, render_run
from tripool.simulate.supernode.rows import compared_rows, summary_rows
from tripool.simulate.supernode.run import TraceRun
from tripool.simulate.supernode.step_times import DecodeTimes, Line, span_fs, steps_in, steps_within

DEPLOYMENT = """
version = 1
model = "deepseek-r1"
hardware = "ascend-910c"
chips = 40
shared = false
[prefill]
instances = 1
chips = 16
ep = 32
tp = 1
precision = "int8"
microbatches = 2
drafts = 0
accept = 0
batch = 1024
[decode]
instances = 1
chips = 24
ep = 48
tp = 2
precision = "int8"
microbatches = 1
drafts = 1
accept = 0.7
batch = 20
[cache]
gb = 800
[slo]
ttft_ms = 2000
tpot_ms = 50
[workload]
input_tokens = 4096
output_tokens = 256
cached_share = 0
[expected]
requests_per_s = 1
"""


def alike(count: int, gap_s: float, *, prompt: int = 64, answer: int = 30) -> list[TraceRequest]:
    return [TraceRequest(number * gap_s, prompt, answer, (), "", 16) for number in range(count)]


def run(asks: list[TraceRequest], *faults: str, **sizes: Any) -> dict[str, Any]:
    layout = small_layout(**sizes)
    return simulate_trace(layout, asks, trace="t", faults=[parse_fault(f, layout) for f in faults], slice_s=0.5)


def test_every_request_ends_and_alone_each_takes_what_the_model_says() -> None:
    data = run(alike(5, 10.0))
    assert data["requests"] == {"done": 5, "refused": 0, "failed": 0}
    step_s = [0.004 + 5e-4 + (65 + number) * 2e-6 for number in range(29)]
    handed_s = 64 * 64 / 1e6  # the prompt's KV crosses between the first token and the second
    assert data["tpot_ms"]["p50"] == pytest.approx(1e3 * (handed_s + sum(step_s)) / 29, rel=0.02)
    prefill_s = 0.002 + 64e-4 + 64 * 32 * 1e-7
    assert data["ttft_ms"]["p50"] == pytest.approx(1e3 * prefill_s, rel=0.02)
    assert data["goodput"]["share"] == 1.0


def test_more_load_fills_the_pools_and_slows_first_tokens() -> None:
    low, high = run(alike(40, 0.5)), run(alike(40, 0.002))
    assert high["use"]["prefill"] > low["use"]["prefill"] and high["use"]["decode batch"] > low["use"]["decode batch"]
    assert high["ttft_ms"]["p99"] > 2 * low["ttft_ms"]["p99"]
    assert high["tpot_ms"]["p50"] > low["tpot_ms"]["p50"]


def test_prefixes_are_found_here_or_in_the_pool_and_only_by_their_tenant() -> None:
    same = [TraceRequest(number * 2.0, 129, 4, tuple(range(9)), "", 16) for number in range(10)]
    found = run(same, prefills=2)["hits"]
    assert found["prefill memory"] + found["cache pool"] == pytest.approx(0.9 * 128 / 129, rel=0.01)
    assert found["cache pool"] > 0
    foreign = [replace(ask, tenant=f"t{number}") for number, ask in enumerate(same)]
    assert run(foreign)["hits"] == {"prefill memory": 0.0, "cache pool": 0.0}


def test_a_lost_chip_delays_its_answers_and_loses_none() -> None:
    asks = alike(12, 0.05, answer=200)
    calm, struck = run(asks, blocks=60), run(asks, "chip:decode-0.1@0.8s+0.5s", blocks=60)
    (told,) = struck["faults"]
    assert struck["requests"] == calm["requests"] == {"done": 12, "refused": 0, "failed": 0}
    assert told["requests"] > 0 and told["recovered"] == told["requests"] and told["failed"] == 0
    assert 50 <= told["recovery_ms"]["max"] < 2000
    assert struck["tpot_ms"]["max"] > calm["tpot_ms"]["max"]


def test_a_lost_node_is_noticed_by_silence() -> None:
    asks = alike(12, 0.05, answer=400)
    (chip,) = run(asks, "chip:decode-0.0@0.8s+9s", blocks=60)["faults"]
    (node,) = run(asks, "node:decode-0.0@0.8s+9s", blocks=60)["faults"]
    assert node["requests"] >= chip["requests"] > 0
    assert node["recovery_ms"]["p50"] > 400 + chip["recovery_ms"]["p50"]


def test_a_lost_prefill_instance_a_slow_rank_and_a_hot_expert() -> None:
    asks = alike(40, 0.02)
    calm = run(asks)
    assert run(asks, "chip:prefill-0@0.1s+0.5s")["requests"]["done"] == 40
    slow, hot = run(asks, "slow:decode-0@0.1s+5sx3"), run(asks, "hot:decode-0@0.1s+5sx3")
    assert slow["tpot_ms"]["p50"] > hot["tpot_ms"]["p50"] > calm["tpot_ms"]["p50"]


def test_a_cut_link_and_a_lost_cache_member() -> None:
    asks = [TraceRequest(number * 0.2, 129, 20, tuple(range(9)), "", 16) for number in range(20)]
    calm = run(asks, workers=1)
    cut = run(asks, "link:decode-0@1s+2s", workers=1)
    assert cut["requests"]["done"] == 20 and cut["tpot_ms"]["max"] > 10 * calm["tpot_ms"]["max"]
    without = run(asks, "cache:cache-0@0s+60s", "cache:cache-1@0s+60s")
    assert without["hits"]["cache pool"] == 0.0 and without["requests"]["done"] == 20


def test_a_cut_link_to_the_pool_is_a_miss_after_a_bounded_wait() -> None:
    asks = [TraceRequest(number * 0.5, 129, 4, tuple(range(9)), "", 16) for number in range(10)]
    calm, cut = run(asks, prefills=1), run(asks, "link:prefill-0@0.4s+20s", prefills=1)
    assert calm["ttft_ms"]["max"] == pytest.approx(cut["ttft_ms"]["max"]) and cut["requests"]["done"] == 10
    lost = run(asks, "chip:prefill-0@1.2s+0.1s", "link:prefill-0@1.4s+20s", prefills=1)
    assert lost["requests"]["done"] == 10 and lost["hits"]["cache pool"] == 0.0 < calm["hits"]["prefill memory"]


def test_the_workers_are_those_that_serve() -> None:
    fleet = TraceRun(small_layout(), []).fleet
    workers = [keeper.process.worker for keeper in fleet.prefills if keeper is not None]
    assert {type(worker) for worker in workers} == {PrefillWorker}
    ranks = [rank for instance in fleet.decodes for rank in instance.ranks if rank is not None]
    assert {type(rank.process.worker) for rank in ranks} == {DecodeWorker} and len(ranks) == 3


@pytest.mark.parametrize(
    "text", ["chip", "chip:decode-0@1+2", "chip:decode-7.0@1+2", "cache:decode-0@1+2", "hot:prefill-0@1+2",
             "chip:decode-0.99@1+2", "flood:decode-0@1+2", "slow:decode-0@1+0"],
)  # fmt: skip
def test_faults_that_strike_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="fault"):
        parse_fault(text, small_layout())


def test_a_fault_says_itself_as_it_was_said() -> None:
    assert str(parse_fault("chip:decode-0.1@2s+3s", small_layout())) == "chip:decode-0.1@2s+3s"
    assert str(parse_fault("slow:decode-0@2+3x4", small_layout())) == "slow:decode-0@2s+3sx4"


def test_after_a_run_nothing_is_held() -> None:
    layout = small_layout(blocks=12)
    run = TraceRun(layout, alike(60, 0.01, answer=60))
    run.run()
    run.timeline.over = False
    assert run.timeline.run(2000)
    world, fleet = run.world, run.fleet
    assert world.router is not None
    world.router.check()
    fleet.pool.check()
    assert not len(world.router.ledger) and world.admission.idle
    for instance in fleet.decodes:
        assert all(rank is not None and rank.process.worker.heartbeat().blocks_held == 0 for rank in instance.ranks)
    for keeper in fleet.prefills:
        assert keeper is not None and keeper.process.worker.heartbeat().blocks_held == 0


# ---- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_line_is_the_cost_model(rows: int) -> None:
    hardware, model = named_hardware("ascend-910c"), named_model("deepseek-r1")
    setup = read_deployment(DEPLOYMENT, "test").decode.setup
    cost = DecodeModel(hardware, model, setup)
    times = DecodeTimes.of(cost)
    for each in (10, 1500, 9000, 40_000):
        line = times.line(rows, each * rows)
        expected_s = cost.step_s(rows / 48, each * rows / 48) / setup.tokens_per_step
        assert line.step_fs(each * rows) / 1e15 == pytest.approx(expected_s, rel=0.01)
    slow = times.line(rows, 100 * rows, (2.0, 1.0)).step_fs(100 * rows)
    assert slow == pytest.approx(2 * times.line(rows, 100 * rows).step_fs(100 * rows), rel=1e-6)


def test_a_span_is_the_sum_of_its_steps() -> None:
    line = Line(1_000_003, 17, 5000)
    total, context = 0, 100
    for count in range(1, 50):
        total += line.step_fs(context)
        context += 7
        assert span_fs(line, 100, 7, count) == total
        assert steps_in(line, 100, 7, 60, total) == count
        assert steps_in(line, 100, 7, 60, total - 1) == count - 1
    most = steps_within(line, 100, 7)
    assert 100 + 7 * (most - 1) < 5000 <= 100 + 7 * most


@given(
    st.integers(1, 10**13), st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 300), st.integers(0, 300),
    st.integers(0, 10**16),
)  # fmt: skip
def test_whole_steps_in_a_span_are_those_that_a_count_finds(
    fixed_fs: int, token_fs: int, context: int, grows: int, most: int, span: int
) -> None:
    line = Line(fixed_fs, token_fs, 2**80)
    counted = sum(span_fs(line, context, grows, count) <= span for count in range(1, most + 1))
    assert steps_in(line, context, grows, most, span) == counted


def test_a_deployment_file_becomes_a_layout_and_runs() -> None:
    file = read_deployment(DEPLOYMENT, "test")
    layout = lay_out(file, named_hardware("ascend-910c"), named_model("deepseek-r1"))
    assert (layout.prefill.instances, layout.decode.workers, layout.num_members) == (1, 24, 5)
    assert layout.decode.config.max_running == 40
    data = simulate_trace(layout, [TraceRequest(0.5 * n, 3000, 100) for n in range(20)], trace="t")
    assert data["requests"]["done"] == 20 and 5 < data["tpot_ms"]["p50"] < 50
    with pytest.raises(InvalidRequest, match="both prefill and decode"):
        lay_out(replace(file, shared=True), named_hardware("ascend-910c"), named_model("deepseek-r1"))


def test_pages_and_rows_show_what_the_report_says() -> None:
    one, other = run(alike(20, 0.1), "chip:decode-0.1@0.8s+0.5s"), run(alike(20, 0.02))
    page = render_run(one)
    assert page.count("<svg") == 6 and "chip:decode-0.1@0.8s+0.5s" in page and "NaN" not in page
    assert render_comparison(one, other, ("first", "second")).count("<svg") == 6
    assert dict(summary_rows(one))["requests"] == "20: 20 done"
    rows = {name: cells for name, *cells in compared_rows(one, other)}
    assert rows["requests done"] == ["20", "20", "+0.0%"]
    assert json.loads(json.dumps(one)) == one
