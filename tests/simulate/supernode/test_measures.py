"""The steady state of a run apart from ramp and drain; reasons of failures; what a trace does not say."""

from __future__ import annotations

import pytest

from tests.simulate.supernode.small import small_layout
from tests.simulate.supernode.test_runs import alike, run
from tripool.bench.trace import TraceRequest
from tripool.core import Request, SamplingParams
from tripool.errors import Overloaded
from tripool.simulate.request_table import DONE, REFUSED, Arrival, Open, RequestTable
from tripool.simulate.supernode.links import Slices
from tripool.simulate.supernode.measures import is_good, steady_state
from tripool.simulate.supernode.page import render_run
from tripool.simulate.supernode.rows import NOT_IN_TRACE, compared_rows, summary_rows


def opened(arrived_s: float, tokens: int, first_s: float | None = None) -> Open:
    request = Request(id="r", prompt_ids=(0,) * 10, params=SamplingParams(max_tokens=tokens), seed=0)
    return Open(Arrival(arrived_s, request), arrived_s, first_s=first_s)


def table_of(rows: list[tuple[float, float, float, int]]) -> RequestTable:
    """(arrived, first token, last token, tokens), all done."""
    table = RequestTable()
    for arrived_s, first_s, last_s, tokens in rows:
        table.close(opened(arrived_s, tokens, first_s), DONE, last_s)
    return table


def test_a_steady_load_has_its_rate_without_ramp_and_drain() -> None:
    # One per second, each takes ten: a run of 110 s whose ends are half empty.
    table, layout = table_of([(float(n), n + 1.0, n + 10.0, 91) for n in range(101)]), small_layout()
    found = steady_state(table, layout, Slices(1.0), set(range(0, 101, 2)))
    assert found is not None and (found["begin_s"], found["end_s"], found["requests"]) == (10.0, 100.0, 91)
    assert found["requests_per_s"] == pytest.approx(1.0, rel=0.02)
    assert found["output_tokens_per_s"] == pytest.approx(91.0, rel=0.02)
    assert found["ttft_ms"]["p50"] == 1000.0 and found["tpot_ms"]["p50"] == 100.0
    assert found["goodput"]["share"] == pytest.approx(0.5, abs=0.02)
    assert found["goodput"]["requests_per_s"] == pytest.approx(0.5, rel=0.05)


def test_slow_first_requests_are_no_part_of_it() -> None:
    rows = [(0.1 * n, 0.1 * n + 5.0, 0.1 * n + 6.0, 11) for n in range(10)]
    rows += [(1.0 + n, 1.5 + n, 3.5 + n, 11) for n in range(200)]
    found = steady_state(table_of(rows), small_layout(), Slices(1.0), set())
    assert found is not None and found["ttft_ms"]["max"] == 500.0


def test_a_short_trace_has_none() -> None:
    layout = small_layout()
    assert steady_state(table_of([]), layout, Slices(1.0), set()) is None
    assert steady_state(table_of([(0.0, 1.0, 99.0, 5)] * 50), layout, Slices(1.0), set()) is None
    assert dict(summary_rows(run(alike(5, 0.01))))["steady state"].startswith("none")


def test_refused_requests_count_against_goodput_and_have_their_reason() -> None:
    table, layout = table_of([(float(n), n + 0.1, n + 1.0, 91) for n in range(60)]), small_layout()
    for number in range(60):
        table.close(opened(float(number), 5), REFUSED, float(number), Overloaded(f"{number} tokens wait"))
    good = {number for number in range(60) if is_good(table, layout, number)}
    found = steady_state(table, layout, Slices(1.0), good)
    assert len(good) == 60 and found is not None and found["goodput"]["share"] == pytest.approx(0.5)
    assert table.errors == {(REFUSED, "overloaded"): 60}
    assert table.examples == {(REFUSED, "overloaded"): "0 tokens wait"}


def test_a_report_names_why_requests_were_refused() -> None:
    data = run(alike(1200, 0.0005, prompt=300))
    assert data["requests"]["refused"] > 0
    assert sum(each["requests"] for each in data["errors"]) == data["requests"]["refused"] + data["requests"]["failed"]
    worst = data["errors"][0]
    assert worst["example"] in dict(summary_rows(data))[f"{worst['outcome']}, {worst['code']}"]
    assert worst["code"] in render_run(data)


def test_pools_are_in_use_in_the_steady_state() -> None:
    data = run(alike(300, 0.05))
    steady = data["steady"]
    assert steady is not None and 0 < steady["use"]["prefill"] <= 1 and 0 < steady["use"]["decode batch"] <= 1
    assert steady["requests_per_s"] == pytest.approx(20.0, rel=0.1)
    assert "steady state" in dict(summary_rows(data)) and "time to first token, steady" in dict(summary_rows(data))


def test_hits_are_not_zero_where_a_trace_does_not_name_blocks() -> None:
    silent, named = run(alike(5, 0.1)), run([TraceRequest(0.0, 129, 4, tuple(range(9)), "", 16)])
    assert silent["hits"] == {"prefill memory": None, "cache pool": None}
    assert named["hits"] == {"prefill memory": 0.0, "cache pool": 0.0}
    assert dict(summary_rows(silent))["prompt tokens found"] == NOT_IN_TRACE and NOT_IN_TRACE in render_run(silent)
    assert dict(summary_rows(named))["prompt tokens found"] == "0.0% in prefill memory, 0.0% in cache pool"
    rows = {name: cells for name, *cells in compared_rows(silent, named)}
    assert rows["found in the cache pool"] == [NOT_IN_TRACE, "0.00%", "-"]


def test_a_report_of_an_older_version_is_still_compared() -> None:
    data = run(alike(5, 0.1))
    old = {name: value for name, value in data.items() if name not in ("steady", "notes")}
    rows = {name: cells for name, *cells in compared_rows(old, data)}
    assert rows["requests per second, steady"] == ["-", "-", "-"]
