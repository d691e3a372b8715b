"""A fault inside the engine ends the request it concerns; the others go on as alone, and nothing stays held."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tripool import LLM, SamplingParams
from tripool.core import Request
from tripool.engine.engine import Engine
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.thread import EngineThread
from tripool.errors import RankFenced, RequestFailed
from tripool.kernels import CPU8
from tripool.kernels.cpu8.library import set_threads
from tripool.sequence import Guide, Sampled, Seq, Task

from .mtp_traffic import Bundled, bundled, mixed_request, run

DEADLINE_S = 60.0
TEXT = fake_text()


class Poison(RuntimeError):
    pass


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    set_threads(1)
    with bundled(CPU8) as model:
        yield model


def poison_sampler(engine: Engine, victim: str, calls: int) -> None:
    """The victim's `calls`-th choice raises."""
    left, choose = [calls], engine.executor.sampler._sample_row

    def sample_row(row: Any, seq: Seq) -> Any:
        if seq.request.id == victim:
            left[0] -= 1
            if left[0] < 0:
                raise Poison
        return choose(row, seq)

    engine.executor.sampler._sample_row = sample_row  # type: ignore[method-assign]


class PoisonedGuide:
    def __init__(self, guide: Guide, what: str, calls: int) -> None:
        self._guide, self._what, self._left = guide, what, calls

    def __getattr__(self, name: str) -> Any:
        if name == self._what:
            self._left -= 1
            if self._left < 0:
                raise Poison
        return getattr(self._guide, name)


def poison_guides(engine: Engine, victim: str, what: str, calls: int) -> None:
    make = engine._guides

    def guides(request: Request, answers: Any) -> Any:
        made = make(request, answers)
        return [PoisonedGuide(guide, what, calls) for guide in made] if request.id == victim else made

    engine._guides = guides  # type: ignore[method-assign]


def run_with_a_victim(engine: Engine, requests: list[Request], victim: str) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    failed = []
    while engine.busy:
        for event in engine.step():
            tokens.setdefault((event.request_id, event.choice), []).append(event.token_id)
        failed += engine.take_failed()
        engine.scheduler.check()
    engine.step()  # drafts, if any are due
    assert failed == [victim] and engine.take_failed() == []
    assert engine.scheduler.pool.num_held == 0
    return {key: said for key, said in tokens.items() if key[0] != victim}


GUIDED, PENALISED, SEVERAL = "10", "4", "8"


def traffic(tiny: Bundled) -> list[Request]:
    return [mixed_request(number, tiny, longest=20) for number in (0, 1, 4, 8, 10)]


@pytest.fixture(scope="module")
def alone(tiny: Bundled) -> dict[tuple[str, int], list[int]]:
    """What each of them says when nothing goes wrong."""
    return run(tiny.engine(), traffic(tiny)).tokens()


@pytest.mark.parametrize("calls", [0, 4])
@pytest.mark.parametrize(
    ("what", "victim"),
    [("sampler", PENALISED), ("sampler", SEVERAL), ("mask", GUIDED), ("accept", GUIDED), ("spent", GUIDED)],
)
def test_a_fault_in_one_sequence_is_its_own(tiny: Bundled, alone, caplog, what: str, victim: str, calls: int) -> None:
    requests = [_long(r) if r.id == victim else r for r in traffic(tiny)]
    expected = {key: said for key, said in alone.items() if key[0] != victim}
    engine = tiny.engine()
    if what == "sampler":
        poison_sampler(engine, victim, calls)
    else:
        poison_guides(engine, victim, what, calls)
    with caplog.at_level(logging.ERROR, "tripool.engine"):
        assert run_with_a_victim(engine, requests, victim) == expected
    # A draft that could not be made is told as well, and harms nobody.
    assert any(f"request {victim} failed" in record.message for record in caplog.records)
    assert all(record.exc_info for record in caplog.records)


def _long(request: Request) -> Request:
    """So that it is still there when its fault comes."""
    long = {"max_tokens": 30, "stop_token_ids": (), "min_tokens": 8, "ignore_eos": True}
    return replace(request, params=replace(request.params, **long))


def test_a_batch_that_fails_takes_its_requests_along_and_no_others(tiny: Bundled, monkeypatch) -> None:
    engine = tiny.engine(max_running=4)
    requests = [mixed_request(number, tiny, longest=20) for number in range(6)]
    for request in requests:
        engine.add(request)
    engine.step()
    expected = run(tiny.engine(), [requests[5]]).tokens()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "submit", lambda *_: (_ for _ in ()).throw(Poison()))
        in_batch = {seq.request.id for seq in engine.scheduler.holders()}
        assert engine.step() == []
    failed = set(engine.take_failed())
    assert failed == in_batch and "5" not in failed
    engine.scheduler.check()
    said: list[int] = []
    while engine.busy:
        said += [event.token_id for event in engine.step() if event.request_id == "5"]
    assert said == expected["5", 0]
    assert engine.take_failed() == []


def test_an_engine_that_only_fails_stops(monkeypatch) -> None:
    engine = PagedFake(TEXT)
    monkeypatch.setattr(engine, "_compute", lambda task: (_ for _ in ()).throw(Poison()))
    for number in range(2):
        engine.add(ask(str(number)))
        assert engine.step() == [] and engine.take_failed() == [str(number)]
    engine.add(ask("2"))
    with pytest.raises(Poison):
        engine.step()


def test_a_success_in_between_forgives(monkeypatch) -> None:
    engine = PagedFake(TEXT)
    for number in range(6):
        with monkeypatch.context() as patch:
            if number % 3 < 2:
                patch.setattr(engine, "_compute", lambda task: (_ for _ in ()).throw(Poison()))
            engine.add(ask(str(number), max_tokens=1))
            engine.step()
    assert engine.take_failed() == ["0", "1", "3", "4"]


def test_drafts_that_fail_cost_nothing_but_drafts(tiny: Bundled, monkeypatch) -> None:
    requests = [mixed_request(number, tiny, longest=20) for number in range(5)]
    expected = run(tiny.engine(), requests).tokens()
    engine = tiny.engine()
    calls, guesses = [0], engine.executor.drafter._draft

    def sometimes(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2:
            raise Poison
        return guesses(*args)

    monkeypatch.setattr(engine.executor.drafter, "_draft", sometimes)
    assert run(engine, requests).tokens() == expected
    assert engine.take_failed() == [] and calls[0] > 4


# ---- whoever drives an engine is told --------------------------------------------------------------------------------


class PoisonedFake(PagedFake):
    """Fails for requests whose seed is 13: at their third token, or when they are added."""

    def __init__(self, *, adding: bool = False) -> None:
        super().__init__(TEXT)
        self._adding = adding

    def add(self, request: Request) -> None:
        super().add(request)
        if self._adding and request.seed == 13:
            raise Poison("a secret")

    def _sample(self, task: Task) -> Sampled:
        if task.seq.request.seed == 13 and task.seq.num_generated == 2:
            raise Poison("a secret")
        return super()._sample(task)


def ask(name: str, seed: int = 1, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | params)
    return Request(id=name, prompt_ids=(9, 9), params=sampling, seed=seed, end_ids=TEXT.end_ids)


@pytest.mark.parametrize("adding", [False, True])
def test_a_stream_ends_with_500_and_its_neighbours_go_on(adding: bool) -> None:
    engine = PoisonedFake(adding=adding)
    thread = EngineThread(engine)

    async def collect(request: Request) -> int:
        async with aclosing(thread.stream(request)) as events:
            return len([event async for event in events])

    async def main() -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            asked = [ask("a"), ask("bad", 13, n=2), ask("b")]
            return await asyncio.gather(*map(collect, asked), return_exceptions=True)

    try:
        first, bad, last = asyncio.run(main())
        assert (first, last) == (8, 8) and thread.alive
        assert isinstance(bad, RequestFailed)
        assert (bad.status, bad.code) == (500, "internal_error")
        assert "bad" in bad.message and "secret" not in str(bad)
        assert not engine.open_requests
    finally:
        assert thread.close(DEADLINE_S)


def test_a_program_is_told_by_an_exception() -> None:
    llm = LLM(PoisonedFake())
    with pytest.raises(RequestFailed):
        llm.generate("one pool", SamplingParams(seed=13, ignore_eos=True, max_tokens=8))
    with pytest.raises(RequestFailed):
        list(llm.stream("one pool", SamplingParams(seed=13, ignore_eos=True, max_tokens=8)))
    assert len(llm.generate("one pool", SamplingParams(seed=1, ignore_eos=True, max_tokens=8))[0].token_ids) == 8


@pytest.mark.parametrize("call", ["hidden", "step", "step_and_guess", "draft_tokens", "draft_logits"])
def test_a_rank_that_others_have_given_up_is_contained_by_nothing(
    tiny: Bundled, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a step, nor by drafts, nor by one request: its process ends."""
    engine = tiny.engine()

    def fenced(*_: object) -> None:
        raise RankFenced

    monkeypatch.setattr(engine.executor.runner, call, fenced)
    with pytest.raises(RankFenced) as ended:
        run(engine, traffic(tiny))
    assert ended.value.code == 0 and engine.take_failed() == []
