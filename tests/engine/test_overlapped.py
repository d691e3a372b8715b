"""The overlapped engine against the plain one, with the CPU for a device: the same answers to the last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch

from tripool.config import EngineConfig
from tripool.core import Request, TokenEvent
from tripool.engine.device import DeviceSpec, load_on
from tripool.engine.engine import Engine
from tripool.engine.overlapped import OverlappedEngine
from tripool.text import Tokenizer

from .mtp_traffic import CROWDED, ROOMY, Bundled, ask, mixed_request

SPEC = DeviceSpec(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, text, model = load_on(SPEC, "tiny")
    yield Bundled(model, text, Tokenizer(text))
    torch.set_num_threads(threads)


def build(kind: type[Engine], tiny: Bundled, **config: float) -> Engine:
    return kind("tiny", tiny.model, tiny.text, EngineConfig(mtp=False, **config), SPEC)  # type: ignore[arg-type]


def run(engine: Engine, requests: Sequence[Request], *, cancelled: bool = False) -> dict[tuple[str, int], list[object]]:
    """Requests arrive a few at a time; every eleventh is cancelled when it has five tokens."""
    told: dict[tuple[str, int], list[object]] = {}
    arriving, random = list(requests), Random(3)
    while arriving or engine.busy:
        for _ in range(random.randrange(4)):
            if arriving:
                engine.add(arriving.pop(0))
        for event in engine.step():
            told.setdefault((event.request_id, event.choice), []).append(_seen(event))
            if cancelled and int(event.request_id) % 11 == 0 and event.index == 4:
                engine.cancel(event.request_id)
        engine.scheduler.check()
    assert engine.num_held_blocks == 0 and not engine.take_failed()
    return told


def _seen(event: TokenEvent) -> object:
    return event.index, event.token_id, event.finish_reason, event.logprobs is not None


def test_mixed_requests_get_the_same_answers(tiny: Bundled) -> None:
    """Several choices, grammars, stops, log-probabilities, penalties, seeds, preemptions."""
    requests = [mixed_request(number, tiny, longest=8) for number in range(20)]
    plain, overlapped = build(Engine, tiny, **CROWDED), build(OverlappedEngine, tiny, **CROWDED)
    assert run(overlapped, requests) == run(plain, requests)
    assert overlapped.scheduler.num_preemptions


@pytest.mark.prove
@pytest.mark.parametrize("config", [CROWDED, ROOMY], ids=["crowded", "roomy"])
def test_three_hundred_mixed_requests_get_the_same_answers(tiny: Bundled, config: dict[str, float]) -> None:
    requests = [mixed_request(number, tiny, longest=40) for number in range(1000, 1300)]
    assert run(build(OverlappedEngine, tiny, **config), requests) == run(build(Engine, tiny, **config), requests)


def test_a_cancelled_answer_ends_and_the_others_go_on(tiny: Bundled) -> None:
    requests = [ask(tiny, number, repeat=number % 5, max_tokens=15) for number in range(24)]
    whole = run(build(Engine, tiny, **ROOMY), requests)
    told = run(build(OverlappedEngine, tiny, **ROOMY), requests, cancelled=True)
    assert {key: len(seen) for key, seen in told.items() if int(key[0]) % 11 == 0} == {
        (name, 0): 5 for name in ("0", "11", "22")
    }
    assert all(seen == whole[key][: len(seen)] for key, seen in told.items())


def test_a_step_is_submitted_before_the_last_one_is_settled(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone greedy request: one step is always ahead. One with a grammar waits for each of its tokens."""
    for params, ahead in (({}, True), ({"structure": {"regex": "[a-z ]{30}"}}, False)):
        engine, order = build(OverlappedEngine, tiny, **ROOMY), list[str]()
        submit, settle = engine.executor.submit, engine.settle_each
        monkeypatch.setattr(engine.executor, "submit", lambda *a, do=submit, o=order: (o.append("submit"), do(*a))[1])
        monkeypatch.setattr(engine, "settle_each", lambda *a, do=settle, o=order: (o.append("settle"), do(*a))[1])
        run(engine, [ask(tiny, 1, max_tokens=10, **params)])
        assert (order[:3] == ["submit", "submit", "settle"]) is ahead


def test_a_batch_that_fails_ends_its_requests_and_no_others(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(OverlappedEngine, tiny, **ROOMY)
    engine.add(ask(tiny, 1, max_tokens=30))
    for _ in range(5):
        engine.step()
    submit = engine.executor.submit

    def fail(tasks: Sequence[object]) -> None:
        monkeypatch.setattr(engine.executor, "submit", submit)
        raise RuntimeError("the device fell")

    monkeypatch.setattr(engine.executor, "submit", fail)
    engine.step()
    engine.add(ask(tiny, 2, max_tokens=6))
    said = []
    while engine.busy:
        said += [event.request_id for event in engine.step()]
        engine.scheduler.check()
    assert engine.take_failed() == ["1"]
    assert said == ["2"] * 6 and engine.num_held_blocks == 0
