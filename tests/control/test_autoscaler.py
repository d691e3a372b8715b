"""The autoscaler: pools follow their load within bounds, roles change before workers start, and nothing flaps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.control.flowing import CEILING, EVERY_S, TOKEN_S, Flow, Traffic, drawn_traffic
from tripool.config import AutoscaleConfig
from tripool.control.autoscaler import Autoscaler
from tripool.control.scaling import Convert, Decision, GiveUp, Load, Start, Stop, Worker, flaps
from tripool.errors import InvalidRequest

HOURS_S = 5400


def steady(rate: float, answers_s: float = 40.0) -> Traffic:
    return lambda second: (rate, answers_s)


def soon(rng: Random) -> float:
    return 120.0


def drawn_run(seed: int, config: AutoscaleConfig | None = None) -> Flow:
    rng = Random(seed)
    least = (rng.randrange(1, 3), rng.randrange(1, 3), 0)
    config = config or AutoscaleConfig(
        least=least, most=(rng.randrange(4, 20), rng.randrange(8, 60), 4), most_workers=rng.choice([6, 16, 64]),
        start_deadline_s=rng.choice([240.0, 900.0]),
    )  # fmt: skip
    flow = Flow(
        config, drawn_traffic(rng, HOURS_S), rng, workers=least[:2], deaths=rng.choice([0.0, 0.0, 0.002]),
        converts=rng.random() < 0.8, prompt_tokens=rng.choice([300.0, 1500.0, 8000.0]),
    )  # fmt: skip
    flow.run(HOURS_S)
    return flow


def check_drawn(seed: int) -> int:
    """How many decisions there were."""
    flow = drawn_run(seed)
    config = flow.config
    for decision in flow.decisions:
        for number, pool in enumerate(("prefill", "decode", "cache")):
            assert config.least[number] <= decision.after[pool] <= config.most[number], f"seed {seed}: {decision}"
        assert decision.after["prefill"] + decision.after["decode"] <= config.most_workers
    assert flaps(flow.decisions, config.cooldown_s, config.dead_band) == [], f"seed {seed}"
    return len(flow.decisions)


def test_bounds_hold_and_nothing_flaps_on_drawn_traffic():
    assert sum(check_drawn(seed) for seed in range(50)) > 150


@pytest.mark.prove
def test_bounds_hold_and_nothing_flaps_on_a_thousand_shapes():
    assert sum(check_drawn(seed) for seed in range(1000)) > 3000


def test_without_a_cool_down_there_would_be_flaps():
    """A demand about whole workers, a little above and a little below: the count of flaps finds what is done then."""

    def found(config: AutoscaleConfig) -> int:
        flow = Flow(config, lambda s: (7.5 * (1.04 if s // 240 % 2 else 0.96), 40.0), Random(1), start_s=soon)
        flow.run(HOURS_S)
        return len(flaps(flow.decisions, 300.0, 0.1))

    assert found(AutoscaleConfig(cooldown_s=1e-3, hold_s=1.0)) > 0
    assert found(AutoscaleConfig()) == 0


def test_no_more_workers_than_there_are():
    config = AutoscaleConfig(most_workers=5)
    flow = Flow(config, steady(60.0, 60.0), Random(1), start_s=soon, prompt_tokens=2000.0)
    most = 0
    while flow.now_s < 3600:
        flow.run(flow.now_s + EVERY_S)
        most = max(most, len(flow.units))
    assert most == 5
    assert "5 workers are all there are" in " ".join(decision.bound for decision in flow.decisions)


def test_a_steady_load_gets_what_it_needs_and_keeps_it():
    rate, answers_s = 12.0, 40.0
    flow = Flow(AutoscaleConfig(), steady(rate, answers_s), Random(2), start_s=soon)
    flow.run(HOURS_S)
    need = rate * answers_s / CEILING
    late = [(prefill, decode) for at_s, prefill, decode in flow.sizes if at_s > HOURS_S / 2]
    assert all(prefill == 1 and need <= decode <= need + 2 for prefill, decode in late)
    assert not [decision for decision in flow.decisions if decision.at_s > HOURS_S / 2]


def test_no_traffic_is_data():
    flow = Flow(AutoscaleConfig(), lambda s: (12.0 if s < 1800 else 0.0, 40.0), Random(3), start_s=soon)
    flow.run(1800)
    assert len(flow.ready("decode")) >= 4
    flow.run(4500)
    assert (len(flow.ready("prefill")), len(flow.ready("decode"))) == (1, 1)


def test_a_shift_from_prompts_to_answers_converts_before_it_starts():
    """Many long prompts with short answers, then short prompts with long answers."""
    flow = Flow(AutoscaleConfig(), lambda s: (20.0, 3.0 if s < 3000 else 20.0), Random(4), workers=(4, 1), start_s=soon)
    flow.prompt_tokens = 8000.0
    flow.run(3000)
    assert len(flow.ready("prefill")) >= 3
    flow.prompt_tokens = 300.0
    before = len(flow.decisions)
    flow.run(3600)
    first = next(decision for decision in flow.decisions[before:] if decision.actions)
    assert first.actions and all(isinstance(action, Convert) and action.to == "decode" for action in first.actions)
    assert any("a start for decode" in each.what for each in first.considered)
    assert len(flow.ready("decode")) >= 4


def test_a_worker_that_cannot_convert_is_not_asked_to():
    flow = Flow(AutoscaleConfig(), lambda s: (20.0, 3.0 if s < 1500 else 20.0), Random(4), workers=(4, 1), start_s=soon)
    flow.converts = False
    for unit in flow.units.values():
        unit.worker = replace(unit.worker, converts=False)
    flow.run(3000)
    actions = [action for decision in flow.decisions for action in decision.actions]
    assert any(isinstance(action, Start) for action in actions)
    assert not any(isinstance(action, Convert) for action in actions)


def test_a_start_that_never_comes_is_given_up_at_its_deadline():
    starts = iter([None, *[60.0] * 20])
    config = AutoscaleConfig(start_deadline_s=300.0)
    flow = Flow(config, steady(8.0), Random(5), start_s=lambda rng: next(starts))
    flow.run(3000)
    given_up = [d for d in flow.decisions for action in d.actions if isinstance(action, GiveUp)]
    assert flow.given_up == len(given_up) == 1
    assert "has been starting for" in given_up[0].bound
    assert any(isinstance(action, Start) for action in given_up[0].actions), "nobody else was started"
    assert len(flow.ready("decode")) >= 8.0 * 40.0 / CEILING


def test_first_samples_do_not_count():
    """A fresh worker's SLO controller knows no batch above four."""
    autoscaler = Autoscaler(AutoscaleConfig(first_samples_s=30.0))

    def report(now_s: float, ceiling: int, since_s: float) -> None:
        worker = Worker(
            name="d", pool="decode", stage="ready", since_s=since_s, contexts=80, ceiling=ceiling, slots=128
        )
        autoscaler.observe(Load(now_s=now_s, first_tokens=10, answers=10), [worker])

    report(15.0, 4, 0.0)
    assert autoscaler.demand.workers["decode"] == 80 / 128
    for number in range(40):
        report(30.0 + 15.0 * number, CEILING, 0.0)
    assert autoscaler.demand.workers["decode"] == pytest.approx(80 / CEILING)
    report(645.0, 4, 640.0)
    assert autoscaler.demand.workers["decode"] == pytest.approx(80 / CEILING)


def test_memory_may_bind_before_the_ceiling():
    autoscaler = Autoscaler(AutoscaleConfig())
    worker = Worker(
        name="d", pool="decode", stage="ready", since_s=0.0, contexts=10, ceiling=100, slots=128, memory=0.9
    )
    autoscaler.observe(Load(now_s=60.0), [worker])
    assert autoscaler.demand.workers["decode"] == pytest.approx(1.0)
    assert "KV" in autoscaler.demand.bound["decode"]


def test_what_waits_asks_for_workers_until_it_is_worked_off_not_for_ever():
    """At twice its capacity a pool needs twice the workers, however much has piled up meanwhile."""
    autoscaler = Autoscaler(AutoscaleConfig())
    worker = Worker(name="d", pool="decode", stage="ready", since_s=-100.0, contexts=100, ceiling=100, slots=100)
    for number in range(1, 40):
        waiting = 75 * number
        autoscaler.observe(Load(now_s=15.0 * number, first_tokens=150, answers=75, waiting_contexts=waiting), [worker])
    assert 2.0 <= autoscaler.demand.workers["decode"] < 5.0


def test_a_member_is_added_where_lost_hits_cost_more_than_it_does():
    config = AutoscaleConfig(least=(1, 1, 1))
    member = Worker(name="c", pool="cache", stage="ready", since_s=0.0, memory=1.0)

    def decided(lost: float) -> Decision | None:
        autoscaler, decision = Autoscaler(config), None
        rest = [Worker(name=pool, pool=pool, stage="ready", since_s=0.0, slots=100) for pool in ("prefill", "decode")]
        for number in range(1, 80):
            load = Load(now_s=15.0 * number, prompt_cost_s=(0.0, TOKEN_S), lost_hit_tokens=lost)
            autoscaler.observe(load, [member, *rest])
            decision = decision or autoscaler.decide(load.now_s, [member, *rest])
        return decision

    rate = 15.0 / TOKEN_S
    found = decided(0.5 * rate)
    assert found is not None and found.actions == (Start("cache"),) and "evicted" in found.bound
    assert decided(0.001 * rate) is None


def test_missed_objectives_make_it_cautious_and_kept_ones_lean():
    autoscaler = Autoscaler(AutoscaleConfig())
    assert autoscaler.caution("decode") == pytest.approx(1.0)
    for number in range(1, 200):
        autoscaler.observe(Load(now_s=15.0 * number, answers=100, late_answers=3), [])
    assert autoscaler.caution("decode") > 2.0 > autoscaler.caution("prefill")
    for number in range(200, 3000):
        autoscaler.observe(Load(now_s=15.0 * number, answers=100), [])
    assert autoscaler.caution("decode") < 0.5


def test_a_pool_whose_workers_are_wanted_back_keeps_them_longer():
    """Ten minutes high, ten minutes low."""
    traffic = lambda s: (10.0 if s // 600 % 2 else 4.0, 40.0)  # noqa: E731
    flow = Flow(AutoscaleConfig(), traffic, Random(6), workers=(1, 4), start_s=soon)
    flow.run(18000)
    stops = [d.at_s for d in flow.decisions for action in d.actions if isinstance(action, Stop)]
    assert len([at_s for at_s in stops if at_s > 9000]) <= len([at_s for at_s in stops if at_s <= 9000])
    assert len([at_s for at_s in stops if at_s > 9000]) <= 3


def test_a_dead_worker_is_replaced():
    flow = Flow(AutoscaleConfig(), steady(8.0), Random(7), workers=(1, 4), start_s=soon)
    flow.run(1800)
    count = len(flow.ready("decode"))
    del flow.units[flow.ready("decode")[0].worker.name]
    flow.run(2100)
    assert len(flow.ready("decode")) == count


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_s": 0.0}, {"kept_share": 1.0}, {"least": (2, 1, 0), "most": (1, 8, 8)}, {"costs": (1.0, 0.0, 1.0)},
        {"least": (3, 3, 0), "most_workers": 5}, {"cooldown_s": -1.0},
    ],
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(wrong):
    with pytest.raises(InvalidRequest) as refused:
        AutoscaleConfig(**wrong)
    assert refused.value.hint
