"""One engine with a measured step time: what its clients see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tripool.cli.simulate_real import Measured
from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams
from tripool.decode import StepFacts
from tripool.simulate.request_table import Arrival
from tripool.simulate.supernode.colocated import simulate_colocated

CONFIG = SchedulerConfig(num_blocks=64, max_running=8, step_tokens=128)
MEASURED = Measured(((1, 0.002), (2, 0.003), (4, 0.004)), 0.0, 1e-4, 0.0, 0.0, 0.005)


def prompt(arrival_s: float, length: int, answer: int, first: int = 0) -> Arrival:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    ids = tuple(range(first, first + length))
    return Arrival(arrival_s, Request(id=f"{arrival_s} {first}", prompt_ids=ids, params=params, seed=0))


def test_alone_a_request_takes_its_prompt_its_steps_and_what_is_around() -> None:
    table = simulate_colocated([prompt(1.0, 50, 11)], CONFIG, MEASURED.step_s, MEASURED.around_s, 2048)
    assert table.first_s[0] - table.arrived_s[0] == pytest.approx(0.005 + 50e-4)
    assert table.last_s[0] - table.first_s[0] == pytest.approx(10 * 0.002)


def test_two_at_once_share_steps_and_a_known_prefix_is_not_computed() -> None:
    both = [prompt(0.0, 64, 41), prompt(0.0, 64, 41, first=1000)]
    table = simulate_colocated(both, CONFIG, MEASURED.step_s, MEASURED.around_s, 2048)
    assert table.last_s[1] - table.first_s[1] == pytest.approx(40 * 0.003, rel=0.1)
    again = [prompt(0.0, 130, 2), prompt(1.0, 130, 2)]
    table = simulate_colocated(again, CONFIG, MEASURED.step_s, MEASURED.around_s, 2048)
    assert table.local_tokens[1] == 128
    assert table.first_s[1] - table.arrived_s[1] < table.first_s[0] - table.arrived_s[0] - 0.01


def test_a_request_whose_client_leaves_gives_way_to_the_next() -> None:
    alone = replace(CONFIG, max_running=1)
    long, short = prompt(0.0, 20, 500), prompt(0.1, 20, 2, first=1000)
    waits = simulate_colocated([long, short], alone, MEASURED.step_s, MEASURED.around_s, 2048)
    table = simulate_colocated([replace(long, cancel_s=0.2), short], alone, MEASURED.step_s, MEASURED.around_s, 2048)
    assert list(table.input_tokens) == [20] and table.last_s[0] < 0.3 < waits.last_s[0] < waits.last_s[1]


def test_a_step_lies_on_the_measured_lines() -> None:
    assert MEASURED.rows_s(1) == 0.002 and MEASURED.rows_s(3) == pytest.approx(0.0035)
    assert MEASURED.rows_s(8) == pytest.approx(0.006)
    mixed = MEASURED.step_s(StepFacts(2, 0, 100, 10, 0), StepFacts(), 0)
    assert mixed == pytest.approx(0.003 + 10e-4)
    slower = Measured(MEASURED.batches, 0.0, 1e-4, 5e-5, 0.001, 0.005)
    assert slower.step_s(StepFacts(2, 0, 100, 0, 0), StepFacts(0, 0, 0, 20, 0), 1) == pytest.approx(0.003 + 1e-3 + 1e-3)
    assert MEASURED.mean(slower).later_token_s == pytest.approx(2.5e-5)
