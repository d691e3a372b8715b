"""What a plan leaves behind: the deployment file, the page, the numbers of a trace; and that none of it needs torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser

import pytest

from tripool.bench.trace import TraceRequest, measure_trace
from tripool.errors import InvalidRequest
from tripool.planner import Plan, PlanGoal, make_plan, named_hardware, named_model
from tripool.planner.deployment import read_deployment, write_deployment
from tripool.planner.errors import BadDescription
from tripool.planner.page import render_plan
from tripool.planner.report import plan_data
from tripool.simulate.supernode import lay_out


@lru_cache(maxsize=1)
def planned() -> tuple[PlanGoal, Plan]:
    ask = PlanGoal(
        model=named_model("deepseek-r1"), hardware=named_hardware("h800"), chips=96, input_tokens=4000,
        output_tokens=500, ttft_s=5.0, tpot_s=0.05, price_per_hour=2.0, currency="EUR",
    )  # fmt: skip
    return ask, make_plan(ask)


def test_a_deployment_file_reads_back() -> None:
    ask, plan = planned()
    assert plan.best_split is not None
    best = plan.best_split.main
    read = read_deployment(write_deployment(ask, plan.best_split), "d.toml")
    assert (read.model, read.hardware, read.chips) == ("deepseek-r1", "h800", 96)
    assert read.decode.setup == best.decode.setup and read.prefill.setup == best.prefill.setup
    assert (read.decode.instances, read.decode.batch) == (best.decode_instances, best.decode.batch)
    assert (read.prefill.instances, read.prefill.batch) == (best.prefill_instances, best.prefill.tokens)
    assert read.requests_per_s == pytest.approx(best.requests_per_s, rel=1e-3)


def test_each_cell_has_a_file_of_its_own() -> None:
    ask, plan = planned()
    cells = [found.main for found in plan.deployments[:2]]
    mixed = replace(plan.deployments[0], cells=tuple(cells))
    read = [read_deployment(write_deployment(ask, mixed, cell), "d.toml") for cell in cells]
    assert [file.chips for file in read] == [cell.chips for cell in cells]
    assert sum(file.requests_per_s for file in read) == pytest.approx(mixed.requests_per_s, rel=1e-3)
    assert sum(file.cache_gb for file in read) == pytest.approx(mixed.cache_bytes / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [("version = 1", "version = 2"), ("[decode]", "[encode]"), ("ep = ", "epp = "), ("chips = 96", 'chips = "many"'),
     ("microbatches = ", "microbatches = 7 #"), ("[cache]", "[cache"), ("instances = ", "instances = 1.5 #"),
     ("accept = ", "accept = nan #"), ("shared = false", 'shared = "no"'), ("tp = ", "tp = 7 #")],
)  # fmt: skip
def test_odd_deployment_files_are_refused(old: str, new: str) -> None:
    ask, plan = planned()
    text = write_deployment(ask, plan.deployments[0])
    assert old in text
    with pytest.raises(BadDescription, match=r"d\.toml"):
        read_deployment(text.replace(old, new), "d.toml")


def test_the_data_is_plain_and_adds_up() -> None:
    ask, plan = planned()
    data = json.loads(json.dumps(plan_data(ask, plan)))
    best = data["deployments"][0]
    assert best["currency"] == "EUR" and best["levers"]
    assert best["output_tokens_per_s_per_chip"] * best["chips"] == pytest.approx(best["requests_per_s"] * 500)
    assert best["chips"] + best["spare_chips"] == 96 and best["kwh_per_million_output_tokens"] > 0
    assert sum(cell["requests_per_s"] for cell in best["cells"]) == pytest.approx(best["requests_per_s"])
    assert sum(best["decode"]["parts_ms"].values()) >= best["decode"]["step_ms"] * 0.99
    assert len(data["front"]) == len(plan.front)


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else() -> None:
    ask, plan = planned()
    page = render_plan(ask, plan)
    seen = _Seen()
    seen.feed(page)
    assert not any({"src", "href"} & attrs.keys() for _, attrs in seen.tags), "nothing is fetched"
    assert not re.search(r"url\(|@import|<script", page)
    figures = [tag for tag, _ in seen.tags if tag == "figure"]
    assert len(figures) == 3 and "H800" in page and "EUR" in page
    points = [attrs for tag, attrs in seen.tags if tag == "circle"]
    assert len(points) > len(plan.front)
    assert all(0 <= float(p["cx"]) <= 560 and 0 <= float(p["cy"]) <= 240 for p in points), "inside the plot"


def test_a_trace_in_few_numbers() -> None:
    requests = [
        TraceRequest(0.0, 1100, 10, (1, 2, 3)),
        TraceRequest(1.0, 1100, 30, (1, 2, 4)),  # two blocks known
        TraceRequest(2.0, 512, 20, (1,)),  # known whole: one token is computed all the same
        TraceRequest(4.0, 1100, 20, (9, 2, 3)),  # another beginning: what follows is no prefix
    ]
    work = measure_trace(requests)
    assert work.input_tokens == pytest.approx(3812 / 4) and work.output_tokens == 20
    assert work.cached_share == pytest.approx((1024 + 511) / 3812)
    assert work.requests_per_s == pytest.approx(0.75)
    assert measure_trace(requests[:1]).requests_per_s is None


def test_planning_needs_no_torch() -> None:
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, NoTorch())
from tripool.planner import PlanGoal, make_plan, named_hardware, named_model
import tripool.planner.deployment, tripool.planner.page, tripool.planner.rows, tripool.bench.trace
ask = PlanGoal(model=named_model("llama-3-8b"), hardware=named_hardware("h100"), chips=4, input_tokens=500,
          output_tokens=100, ttft_s=2.0, tpot_s=0.05)
print(len(make_plan(ask).deployments))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_a_deployment_file_of_two_kinds_of_hardware_reads_back() -> None:
    pr, dt = named_hardware("ascend-950pr"), named_hardware("ascend-950dt")
    ask = PlanGoal(
        model=named_model("deepseek-r1"), hardware=pr, decode_hardware=dt, chips=64, input_tokens=2000,
        output_tokens=500, ttft_s=5.0, tpot_s=0.05, price_per_hour=2.0,
    )  # fmt: skip
    plan = make_plan(ask)
    read = read_deployment(write_deployment(ask, plan.deployments[0]), "d.toml")
    assert (read.hardware, read.decode_hardware) == ("ascend-950pr", "ascend-950dt")
    parted = plan.best_parted
    assert parted is not None
    setup = read_deployment(write_deployment(ask, parted), "d.toml").decode.setup
    assert setup == parted.main.decode.setup and setup.expert_ranks
    data = plan_data(ask, plan)
    assert data["decode_hardware"] == "ascend-950dt" and data["error"]["words"] == "assumed, no published row"
    assert "ranks of attention" in render_plan(ask, plan)
    with pytest.raises(InvalidRequest, match="two kinds of hardware are not simulated"):
        lay_out(read, pr, ask.model)
