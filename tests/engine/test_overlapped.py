"""The overlapped engine against the plain one: the same answers to the last token.

On a CUDA device if there is one, else with the CPU for a device. In float32 a row's last bits depend on the batch (on a
CPU, too: BLAS adds in another order for another number of rows), and a near tie between two experts or two tokens then
has another winner: one answer in a hundred may differ. In 8 bits on a CPU, and in the exact mode on CUDA, none may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

import pytest
import torch

from tripool.config import EngineConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.device import DeviceSpec, load_on
from tripool.engine.engine import Engine
from tripool.engine.overlapped import OverlappedEngine
from tripool.text import Tokenizer

from .mtp_traffic import CROWDED, ROOMY, Bundled, ask, mixed_request

SPEC = DeviceSpec(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
MOST_DIFFERENT = 0.01
GARBAGE = 1e4
Told = dict[tuple[str, int], list[object]]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, text, model = load_on(SPEC, "tiny")
    yield Bundled(model, text, Tokenizer(text))
    torch.set_num_threads(threads)


Built = TypeVar("Built", bound=Engine)


def build(kind: type[Built], tiny: Bundled, *, mtp: bool = False, **config: float) -> Built:
    return kind("tiny", tiny.model, tiny.text, EngineConfig(mtp=mtp, **config), SPEC)  # type: ignore[arg-type]


def run(engine: Engine, requests: Sequence[Request], *, cancelled: bool = False) -> Told:
    """Requests arrive a few at a time; every eleventh is cancelled when it has five tokens."""
    told: Told = {}
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


def assert_same(ours: Told, plain: Told, *, cancelled: bool = False) -> None:
    """`cancelled`: see `run`. How far the other choices of such a request come depends on the steps."""
    different = []
    for key in ours.keys() | plain.keys():
        mine, theirs = ours.get(key, []), plain.get(key, [])
        length = min(len(mine), len(theirs)) if cancelled and int(key[0]) % 11 == 0 else None
        if mine[:length] != theirs[:length]:
            different.append(key)
    assert len(different) <= MOST_DIFFERENT * len(plain), different


def _seen(event: TokenEvent) -> object:
    return event.index, event.token_id, event.finish_reason, event.logprobs is not None


def test_mixed_requests_get_the_same_answers(tiny: Bundled) -> None:
    """Several choices, grammars, stops, log-probabilities, penalties, seeds, preemptions."""
    requests = [mixed_request(number, tiny, longest=8) for number in range(20)]
    plain, overlapped = build(Engine, tiny, **CROWDED), build(OverlappedEngine, tiny, **CROWDED)
    assert_same(run(overlapped, requests), run(plain, requests))
    assert overlapped.scheduler.num_preemptions


@pytest.mark.prove
@pytest.mark.parametrize("config", [CROWDED, ROOMY], ids=["crowded", "roomy"])
def test_three_hundred_mixed_requests_get_the_same_answers(tiny: Bundled, config: dict[str, float]) -> None:
    """Several choices, grammars, stops, log-probabilities, penalties, seeds, cancellations, preemptions."""
    requests = [mixed_request(number, tiny, longest=40) for number in range(1000, 1300)]
    engines = build(OverlappedEngine, tiny, **config), build(Engine, tiny, **config)
    ours, plain = (run(engine, requests, cancelled=True) for engine in engines)
    assert_same(ours, plain, cancelled=True)
    assert all(bool(engine.scheduler.num_preemptions) == (config is CROWDED) for engine in engines)


class Alternating:
    """For a draft switch: changes every few steps."""

    def __init__(self) -> None:
        self._random, self._drafts = Random(5), True

    def choose(self, num_seqs: int) -> bool:
        self._drafts ^= self._random.random() < 0.2
        return self._drafts

    def measured(self, num_seqs: int, num_tokens: int, step_s: float) -> None:
        assert num_tokens >= num_seqs and step_s >= 0


@pytest.mark.prove
def test_drafts_that_come_and_go_change_no_answer(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [mixed_request(number, tiny, longest=8) for number in range(40, 46)]
    requests += [ask(tiny, number, max_tokens=24) for number in range(3)]
    ahead, accepted = list[str](), 0
    for config in (CROWDED, ROOMY):
        engine = build(OverlappedEngine, tiny, mtp=True, **config)
        monkeypatch.setattr(engine, "draft_switch", Alternating())
        noting(monkeypatch, engine.executor, "submit_ahead", ahead)
        poison_mtp(engine)
        assert_same(run(engine, requests), run(build(Engine, tiny, **config), requests))
        assert not (mtp_slots_of_published(engine) == GARBAGE).any()
        accepted += engine.scheduler.num_accepted
    assert len(ahead) > 20 and accepted > 5


def noting(patch: pytest.MonkeyPatch, owner: object, method: str, calls: list[str]) -> list[str]:
    """From now on its name is appended to `calls` whenever it is called."""
    do = getattr(owner, method)

    def noted(*args: object) -> object:
        calls.append(method)
        return do(*args)

    patch.setattr(owner, method, noted)
    return calls


def poison_mtp(engine: Engine) -> None:
    engine.executor.runner.kv[-1] = GARBAGE


def mtp_slots_of_published(engine: Engine) -> torch.Tensor:
    """Of every block that others may find; without the first slot, which a prompt's first token does not have."""
    engine.draft()
    layer = engine.executor.runner.kv[-1].view(-1, BLOCK_TOKENS, engine.executor.runner.kv.shape[2])
    return layer[list(engine.scheduler.pool._key_of), 1:]


def test_prompts_keep_their_drafts_where_steps_overlap(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MTP layer's KV of a prompt is the same whether its step proposes drafts or not."""
    layers = []
    for drafts in (True, False):
        engine = build(OverlappedEngine, tiny, mtp=True, **ROOMY)
        monkeypatch.setattr(engine, "_drafts", drafts)
        monkeypatch.setattr(engine, "draft_switch", None)
        run(engine, [ask(tiny, 1, repeat=60, max_tokens=2)])
        layers.append(mtp_slots_of_published(engine))
    assert layers[0].numel() and layers[0].abs().sum() > 0
    torch.testing.assert_close(layers[0], layers[1])


def test_sequences_from_another_engine_run_ahead_too(tiny: Bundled) -> None:
    """As in a decode worker: blocks are filled while steps run."""
    requests = [mixed_request(number, tiny, longest=8) for number in range(60, 67)]
    whole = run(build(Engine, tiny, **ROOMY), requests)
    for mtp in (False, True):
        assert_same(handed_over(tiny, requests, mtp=mtp), whole)


def handed_over(tiny: Bundled, requests: Sequence[Request], *, mtp: bool) -> Told:
    """First tokens from one engine, the rest from an overlapped one."""
    first, second = build(Engine, tiny, mtp=mtp, **ROOMY), build(OverlappedEngine, tiny, mtp=mtp, **ROOMY)
    told: Told = {}
    data = memoryview(bytearray(first.block_bytes))
    for request in requests:
        first.add(request)
        while first.busy:
            for event in first.step():
                told[event.request_id, event.choice] = [_seen(event)]
                if event.finish_reason is None:
                    left = first.detach(event.request_id, event.choice)
                    # Choices of a request are known by one name: here each is a request of its own.
                    renamed = replace(request, id=f"{request.id}.{event.choice}")
                    seq = second.attach(renamed, event.choice, [event.token_id], left.num_computed)
                    assert seq is not None
                    for source, target in zip(left.table, seq.table, strict=False):
                        first.export_block(source, data)
                        second.import_block(target, data)
                    first.release(left)
                    second.start(seq)
        tell(second.step(), told)
    while second.busy:
        tell(second.step(), told)
    second.scheduler.check()
    assert first.num_held_blocks == second.num_held_blocks == 0 and not second.take_failed()
    return told


def tell(events: Iterable[TokenEvent], told: Told) -> None:
    for event in events:
        told[event.request_id.partition(".")[0], event.choice].append(_seen(event))


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
        noting(monkeypatch, engine.executor, "submit_ahead", order)
        noting(monkeypatch, engine, "settle_each", order)
        run(engine, [ask(tiny, 1, max_tokens=10, **params)])
        assert (order[:3] == ["submit_ahead", "submit_ahead", "settle_each"]) is ahead


def test_a_batch_that_fails_ends_its_requests_and_no_others(tiny: Bundled, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(OverlappedEngine, tiny, **ROOMY)
    engine.add(ask(tiny, 1, max_tokens=30))
    for _ in range(5):
        engine.step()
    submit = engine.executor.submit_ahead

    def fail(tasks: Sequence[object]) -> None:
        monkeypatch.setattr(engine.executor, "submit_ahead", submit)
        raise RuntimeError("the device fell")

    monkeypatch.setattr(engine.executor, "submit_ahead", fail)
    engine.step()
    engine.add(ask(tiny, 2, max_tokens=6))
    said = []
    while engine.busy:
        said += [event.request_id for event in engine.step()]
        engine.scheduler.check()
    assert engine.take_failed() == ["1"]
    assert said == ["2"] * 6 and engine.num_held_blocks == 0
