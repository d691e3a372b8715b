"""Traces in their published formats: what is read, what is drawn, and what is refused by name."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tripool.bench.trace import BadTrace, TraceRequest, measure_trace, parse_trace
from tripool.errors import InvalidRequest
from tripool.simulate.rng import Rng
from tripool.simulate.supernode.pool import chain_keys
from tripool.simulate.traces import Synthetic, draw_clients, mean_rate, parse_azure, parse_clients
from tripool.simulate.traces.azure import nanoseconds

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_times_are_since_the_first_and_sorted() -> None:
    lines = [
        HEADER,
        "2023-11-16 18:17:04.0319600,3180,8",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-17 00:00:03.9799600,7,1",
    ]
    asks = parse_azure(lines)
    assert [(ask.input_tokens, ask.output_tokens) for ask in asks] == [(4808, 10), (3180, 8), (7, 1)]
    assert [ask.arrival_s for ask in asks] == [0.0, 0.052, 5 * 3600 + 43 * 60]


def test_a_calendar_with_leap_years_and_zones() -> None:
    day = 86400 * 10**9
    assert nanoseconds("2024-03-01 00:00:00") - nanoseconds("2024-02-28 00:00:00") == 2 * day
    assert nanoseconds("2023-03-01 00:00:00") - nanoseconds("2023-02-28 00:00:00") == day
    assert nanoseconds("2024-01-01 00:00:00.5+00:00") - nanoseconds("2023-12-31T23:59:59Z") == 1_500_000_000


@pytest.mark.parametrize(
    ("lines", "told"),
    [([], "first line"), (["time,in,out"], "first line"), ([HEADER], "no requests"), ([HEADER, "noon,3"], "line 2")],
)
def test_a_broken_azure_trace_is_refused_by_line(lines: list[str], told: str) -> None:
    with pytest.raises(BadTrace, match=told):
        parse_azure(lines)


def client(rate: float, pattern: str, shape: float) -> dict[str, str]:
    windows = [f"{begin},{rate},{1 / shape**0.5},{pattern},{shape},1.0" for begin in (0, 600, 1200)]
    table = {"0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}}
    return {"trace.csv": "\n".join(windows), "dataset.json": json.dumps(table)}


def files(*clients: dict[str, str]) -> dict[str, str]:
    return {f"set/chunk-{n}-{name}": text for n, each in enumerate(clients) for name, text in each.items()}


def test_servegen_clients_come_at_their_rates_with_their_lengths() -> None:
    clients = parse_clients(files(client(2.0, "Gamma", 0.5), client(1.0, "Weibull", 1.5)))
    asks = list(draw_clients(clients, seed=3, length_s=1800.0))
    assert mean_rate(clients, 0.0, 1800.0) == pytest.approx(3.0)
    assert len(asks) == pytest.approx(3.0 * 1800, rel=0.1)
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(asks))
    assert {ask.tenant for ask in asks} == {"client-0", "client-1"}
    assert {ask.output_tokens for ask in asks} == {7}
    assert sum(ask.input_tokens for ask in asks) / len(asks) == pytest.approx(200, rel=0.05)
    assert asks == list(draw_clients(clients, seed=3, length_s=1800.0))
    assert asks != list(draw_clients(clients, seed=4, length_s=1800.0))


def test_servegen_windows_that_are_silent_stay_silent() -> None:
    quiet = client(1.0, "Gamma", 1.0)
    quiet["trace.csv"] = "0,0,0,,0,0\n600,1.0,1.0,Gamma,1.0,1.0\n1200,0,0,,0,0"
    asks = list(draw_clients(parse_clients(files(quiet)), seed=1, length_s=1800.0))
    assert asks and all(600 <= ask.arrival_s < 1200 for ask in asks)


def test_broken_client_sets_are_refused() -> None:
    with pytest.raises(BadTrace, match="no client"):
        parse_clients({"chunk-1-trace.csv": "0,1,1,Gamma,1,1"})
    broken = client(1.0, "Pareto", 1.0)
    with pytest.raises(BadTrace, match="Pareto"):
        parse_clients(files(broken))
    broken = client(1.0, "Gamma", 1.0)
    broken["dataset.json"] = '{"0": {"input_tokens": "{1: 1}"}}'
    with pytest.raises(BadTrace, match="output_tokens"):
        parse_clients(files(broken))


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_draws_have_the_mean_and_spread_of_their_distribution(shape: float) -> None:
    rng = Rng(9)
    drawn = [rng.gamma(shape) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(shape, rel=0.06)
    assert sum((value - mean) ** 2 for value in drawn) / len(drawn) == pytest.approx(shape, rel=0.15)
    if shape == 1.0:  # then it is an exponential, too
        other = [rng.weibull(shape) for _ in range(20_000)]
        assert sum(other) / len(other) == pytest.approx(1.0, rel=0.05)


def test_synthetic_requests_keep_their_numbers() -> None:
    made_up = Synthetic(
        requests=4000, rate_per_s=20.0, input_tokens=1000, output_tokens=100, prefix_share=0.5, tenants=3,
        block_tokens=64,
    )  # fmt: skip
    asks = list(made_up.draw())
    found = measure_trace(asks)
    assert found.num_requests == 4000 and found.span_s == pytest.approx(200, rel=0.1)
    assert found.input_tokens == pytest.approx(1000, rel=0.05) and found.output_tokens == pytest.approx(100, rel=0.05)
    assert found.cached_share == pytest.approx(0.5, abs=0.05)
    assert {ask.tenant for ask in asks} == {"tenant-0", "tenant-1", "tenant-2"}
    assert asks == list(made_up.draw())
    with pytest.raises(InvalidRequest, match="prefix-share"):
        Synthetic(requests=1, rate_per_s=1.0, prefix_share=1.5)


def test_ideal_reuse_counts_leading_blocks_only() -> None:
    lines = [
        {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 10, "input_length": 1536, "output_length": 1, "hash_ids": [1, 9, 3]},
        {"timestamp": 20, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    ]
    found = measure_trace(parse_trace(map(json.dumps, lines)))
    assert found.cached_block_share == pytest.approx(3 / 8)
    assert found.cached_share == pytest.approx((512 + 1023) / (1536 + 1536 + 1024))
    assert found.num_blocks == 8


def test_equal_ids_are_equal_keys_in_one_namespace_only() -> None:
    one, other = TraceRequest(0.0, 40, 1, (5, 6), "", 32), TraceRequest(0.0, 64, 1, (5, 7), "", 32)
    assert chain_keys(one, 0, 16, "a")[:2] == chain_keys(other, 1, 16, "a")[:2]
    assert len(chain_keys(one, 0, 16, "a")) == 2 and len(chain_keys(other, 1, 16, "a")) == 4
    assert not set(chain_keys(one, 0, 16, "a")) & set(chain_keys(one, 0, 16, "b"))
    large = [chain_keys(TraceRequest(0.0, 32, 1, (each,), "", 32), 0, 32, "") for each in (5, 2**64 + 5, 2**64 - 5, -5)]
    assert len({key for (key,) in large}) == 4 and chain_keys(other, 1, 64, "a") == [chain_keys(other, 1, 32, "a")[1]]
    alone = TraceRequest(0.0, 64, 1)
    assert not set(chain_keys(alone, 0, 16, "")) & set(chain_keys(alone, 1, 16, ""))
