"""While tenants compete, whoever takes more than its share of the time has short steps, and everybody gets on."""

from __future__ import annotations

from collections import Counter

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled

from .scheduler_sim import Simulation
from .test_guided import Script

ROW_S, TOKEN_S, FIXED_S = 0.01, 0.002, 0.01


class Timed(Simulation):
    """Steps take the time that their rows and prompt tokens take."""

    now_s = 0.0
    scale = 1.0

    def step(self) -> float:
        tasks = self.tasks = self.begin()
        prompt = sum(len(task.work.tokens) for task in tasks if not task.work.decode)
        rows = sum(task.num_rows for task in tasks if task.work.decode)
        step_s = self.scale * (FIXED_S + ROW_S * rows + TOKEN_S * prompt)
        self.end()
        self.scheduler.timed(tasks, self.now_s, self.now_s + step_s)
        self.now_s += step_s
        return step_s

    def first_token_s(self, request: Request) -> float:
        """How long the step under way and those up to its first token take."""
        began_s = self.now_s
        self.step()  # it comes while this one runs
        self.add(request)
        while not any(s.num_events for s in self.shadows.values() if s.request is request):
            self.step()
        return self.now_s - began_s


def timed() -> Timed:
    config = SchedulerConfig(num_blocks=1000, block_tokens=16, max_running=24, step_tokens=256)
    return Timed(config, 400)


def request(request_id: str, tenant: str, *, n: int = 1, max_tokens: int = 4, prompt: int = 20) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
    ids = tuple((len(request_id) * 7 + i * i) % 5 for i in range(prompt))
    slo = Slo(tenant=tenant, job=request_id)
    return Request(id=request_id, prompt_ids=ids, params=params, seed=0, namespace=request_id, slo=slo)


def run_for(sim: Timed, seconds: float, count: int) -> None:
    """With a short request of the light tenant now and then."""
    for number in range(count):
        until_s = sim.now_s + seconds / count
        sim.add(request(f"light-{sim.num_steps}-{number}", "light"))
        while sim.now_s < until_s:
            if sim.scheduler.busy:
                sim.step()
            else:
                sim.now_s = until_s


def test_first_tokens_of_others_do_not_wait_for_a_full_batch() -> None:
    sim = timed()
    run_for(sim, 3.0, 6)
    sim.add(request("heavy", "heavy", n=24, max_tokens=300))
    run_for(sim, 3.0, 6)
    alone_s = FIXED_S + TOKEN_S * 20
    assert sim.first_token_s(request("one", "light")) < 2.5 * alone_s, "a full batch alone takes five times as long"
    assert sim.step() < 2 * alone_s


def test_long_prompts_of_others_are_cut_into_short_pieces() -> None:
    sim = timed()
    run_for(sim, 3.0, 6)
    for number in range(8):
        sim.add(request(f"heavy-{number}", "heavy", prompt=390, max_tokens=2))
    run_for(sim, 1.0, 2)
    assert sim.scheduler.prefill.running or sim.scheduler.prefill.waiting, "they are not done yet"
    assert sim.first_token_s(request("one", "light")) < 3 * (FIXED_S + TOKEN_S * 20)
    sim.drain()


def test_all_rows_of_a_heavy_tenant_get_on_alike() -> None:
    sim = timed()
    sim.add(request("heavy", "heavy", n=20, max_tokens=300))
    run_for(sim, 6.0, 12)
    tokens = [shadow.num_events for shadow in sim.shadows.values() if shadow.request.id == "heavy"]
    assert min(tokens) > 0 and max(tokens) - min(tokens) <= 8
    assert sum(tokens) > 60, "and most of the time is theirs"


def test_alone_nobody_is_heavy_also_after_the_others_have_left() -> None:
    sim = timed()
    sim.add(request("heavy", "heavy", n=24, max_tokens=300))
    for _ in range(20):
        sim.step()
    assert sim.step() > 24 * ROW_S
    sim.add(request("light", "light", max_tokens=2))
    for _ in range(20):
        sim.step()
    assert sim.step() < 12 * ROW_S
    while sim.now_s < 14.0:
        step_s = sim.step()
    assert step_s > 24 * ROW_S


def test_of_two_who_take_as_much_neither_is_heavy() -> None:
    sim = timed()
    sim.scale = 0.1  # of longer steps, a single one would be more than a tenant's share
    sim.add(request("a", "a", n=12, max_tokens=300))
    sim.add(request("b", "b", n=12, max_tokens=300))
    for _ in range(60):
        sim.step()
    rows: Counter[str] = Counter()
    for _ in range(60):
        sim.step()
        rows += Counter(task.seq.request.id for task in sim.tasks)
    assert rows["a"] == rows["b"] == 12 * 60


def test_a_heavy_tenant_is_not_starved_by_a_stream_of_short_prompts() -> None:
    sim = timed()
    sim.add(request("heavy", "heavy", n=12, max_tokens=300))
    run_for(sim, 3.0, 6)
    before = sum(s.num_events for s in sim.shadows.values() if s.request.id == "heavy")
    for number in range(60):
        sim.add(request(f"l{number}", "light", max_tokens=1))
        sim.step()
    after = sum(s.num_events for s in sim.shadows.values() if s.request.id == "heavy")
    assert after - before >= 60


def guided_scheduler(*, mask_s: float, count: int) -> tuple[Scheduler, list[Script]]:
    config = SchedulerConfig(num_blocks=1000, block_tokens=16, max_running=64, step_tokens=256)
    scheduler = Scheduler(config, model="m", context_tokens=400)
    guides = [Script([{4}] * 300, mask_s=mask_s) for _ in range(count)]
    scheduler.add(request("guided", "", n=count, max_tokens=300, prompt=4), guides)
    scheduler.add(request("plain", "", max_tokens=300, prompt=4))
    return scheduler, guides


def step(scheduler: Scheduler, now_s: float = 0.0, step_s: float = 0.0) -> Counter[str]:
    tasks = scheduler.schedule()
    scheduler.settle(tasks, [Sampled(4) if task.samples else None for task in tasks])
    scheduler.timed(tasks, now_s, now_s + step_s)
    return Counter(task.seq.request.id for task in tasks if task.work.decode)


def test_slow_masks_take_turns_so_that_a_step_stays_short() -> None:
    """On a server without keys as well, where everybody is one tenant."""
    scheduler, guides = guided_scheduler(mask_s=0.014, count=32)
    for _ in range(6):
        step(scheduler)
    before = [len(guide.seen) for guide in guides]
    steps = [step(scheduler) for _ in range(64)]
    assert {rows["guided"] for rows in steps} == {3}, "0.03 s and the last of them a little more"
    assert {rows["plain"] for rows in steps} == {1}, "who has no grammar does not wait for one"
    gained = [len(guide.seen) - seen for guide, seen in zip(guides, before, strict=True)]
    assert min(gained) >= 5 and max(gained) - min(gained) <= 2, "all get on alike"


def test_quick_masks_do_not() -> None:
    scheduler, _ = guided_scheduler(mask_s=0.0002, count=32)
    for _ in range(6):
        step(scheduler)
    assert step(scheduler) == {"guided": 32, "plain": 1}


def test_a_mask_that_takes_longer_than_a_step_may_still_gets_on() -> None:
    scheduler, guides = guided_scheduler(mask_s=1.0, count=2)
    for _ in range(20):
        step(scheduler)
    assert min(len(guide.seen) for guide in guides) >= 7


def test_the_time_of_masks_is_that_of_whoever_asked_for_the_grammar() -> None:
    config = SchedulerConfig(num_blocks=1000, block_tokens=16, max_running=64, step_tokens=256)
    scheduler = Scheduler(config, model="m", context_tokens=400)
    scheduler.add(request("a", "guided", max_tokens=300), [Script([{4}] * 300, mask_s=0.02)])
    scheduler.add(request("b", "plain", n=2, max_tokens=300))
    for number in range(20):
        step(scheduler, number * 0.03, 0.03)
    assert scheduler.time_shares.heavy() == {"guided"}, "though the other has more rows"


def test_newcomers_with_slow_masks_come_a_few_at_a_time_and_others_need_not_wait_for_them() -> None:
    config = SchedulerConfig(num_blocks=1000, block_tokens=16, max_running=64, step_tokens=256)
    scheduler = Scheduler(config, model="m", context_tokens=400)
    for number in range(30):
        scheduler.add(request(f"guided-{number}", "", max_tokens=1), [Script([{4}] * 9, mask_s=0.014)])
    scheduler.add(request("plain", "", max_tokens=1))
    started = []
    while scheduler.busy:
        tasks = scheduler.schedule()
        started.append([task.seq.request.id for task in tasks])
        scheduler.settle(tasks, [Sampled(4) if task.samples else None for task in tasks])
        scheduler.check()
    assert started[0] == ["guided-0", "guided-1", "guided-2", "plain"]
    assert [len(names) for names in started[1:]] == [3] * 9


def test_time_without_work_is_nobodys() -> None:
    """A prefill worker hands its sequences over between steps: until the next prompt comes it has nothing to do."""
    sim, scheduler = timed(), timed().scheduler
    for number in range(20):
        tenant = "once" if number == 0 else "steady"
        scheduler.add(request(f"r{number}", tenant))
        tasks = scheduler.schedule()
        scheduler.settle(tasks, [Sampled(7)] * len(tasks))
        scheduler.timed(tasks, sim.now_s, sim.now_s + 0.01)
        scheduler.release(scheduler.detach(f"r{number}", 0))
        assert scheduler.time_shares.active == (number > 0) and not scheduler.time_shares.heavy(), number
        sim.now_s += 0.2
