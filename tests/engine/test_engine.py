"""The whole step on the bundled model, in 8 bits: what a request gets does not depend on its company.

In float32 that would hold on some BLAS libraries and not on others: they sum a row in another order in a larger batch.
"""

from collections.abc import Iterator

import pytest
import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.engine import Engine
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.kernels import CPU8
from tripool.kernels.cpu8.library import set_threads
from tripool.models import Model, load_model
from tripool.text import TextFiles, Tokenizer

BLOCK_GB = 8 * 64 * 160 * 4 / 2**30
"""KV memory of one block of the bundled model."""


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Model, TextFiles]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_threads(1)
    with open_checkpoint("tiny") as checkpoint:
        yield load_model(checkpoint, kernels=CPU8), checkpoint.text
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(parts) -> Tokenizer:
    return Tokenizer(parts[1])


def make_engine(parts, **config) -> Engine:
    return Engine("tiny", *parts, EngineConfig(**config))


def run(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    for request in requests:
        engine.add(request)
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault((event.request_id, event.choice), []).append(event)
        engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0
    return events


def tokens(events: dict[tuple[str, int], list[TokenEvent]]) -> dict[tuple[str, int], list[int]]:
    return {key: [event.token_id for event in each] for key, each in events.items()}


def make_requests(tokenizer: Tokenizer, count: int, **params) -> list[Request]:
    topics = ["a fox", "the sea at night", "why leaves fall", "bread", "two friends", "a clock", "rain", "an old map"]
    requests = []
    for i in range(count):
        text = f"Tell me about {topics[i % len(topics)]}" + ", please" * (i % 5) + "."
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        sampling = SamplingParams(**{"temperature": 0.8, "top_p": 0.95, "max_tokens": 60, "ignore_eos": True, **params})
        requests.append(Request(id=str(i), prompt_ids=tuple(ids), params=sampling, seed=1000 + i))
    return requests


@pytest.mark.parametrize("count", [16, pytest.param(32, marks=pytest.mark.prove)])
def test_seeded_text_is_the_same_alone_in_a_batch_and_after_preemption(parts, tokenizer, count):
    requests = make_requests(tokenizer, count)
    alone: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        alone |= tokens(run(make_engine(parts), [request]))
    batch = make_engine(parts)
    assert tokens(run(batch, requests)) == alone
    assert batch.scheduler.num_preemptions == 0
    tight = make_engine(parts, kv_gb=9.5 * BLOCK_GB)
    assert tokens(run(tight, requests)) == alone
    assert tight.scheduler.num_preemptions > count // 6


def test_choices_differ_share_the_prompt_and_equal_those_of_a_crowd(parts, tokenizer):
    (request,) = make_requests(tokenizer, 1, n=4)
    long = Request(id="0", prompt_ids=request.prompt_ids * 8, params=request.params, seed=5)
    engine = make_engine(parts)
    events = run(engine, [long])
    answers = tokens(events)
    assert len({tuple(answer) for answer in answers.values()}) == 4
    assert all(event.num_cached_tokens == 0 for each in events.values() for event in each)
    others = [r for r in make_requests(tokenizer, 9) if r.id != "0"]
    assert {k: v for k, v in tokens(run(make_engine(parts), [*others, long])).items() if k[0] == "0"} == answers


def test_a_second_request_reuses_the_prefix_and_says_how_much(parts, tokenizer):
    (request,) = make_requests(tokenizer, 1, temperature=0.0)
    prompt = (request.prompt_ids * 40)[:300]
    first = Request(id="a", prompt_ids=prompt, params=request.params, seed=1)
    second = Request(id="b", prompt_ids=prompt, params=request.params, seed=1)
    other = Request(id="c", prompt_ids=prompt, params=request.params, seed=1, namespace="someone else")
    engine = make_engine(parts)
    cold, warm, apart = (run(engine, [r]) for r in (first, second, other))
    assert cold["a", 0][0].num_cached_tokens == 0
    assert warm["b", 0][-1].num_cached_tokens == 256
    assert apart["c", 0][0].num_cached_tokens == 0
    assert [e.token_id for e in warm["b", 0]] == [e.token_id for e in cold["a", 0]]


def test_a_full_hit_still_computes_the_last_token(parts, tokenizer):
    (request,) = make_requests(tokenizer, 1, temperature=0.0, max_tokens=3)
    prompt = (request.prompt_ids * 40)[:128]
    engine = make_engine(parts)
    cold = run(engine, [Request(id="a", prompt_ids=prompt, params=request.params, seed=1)])
    warm = run(engine, [Request(id="b", prompt_ids=prompt, params=request.params, seed=1)])
    assert warm["b", 0][0].num_cached_tokens == 64
    assert [e.token_id for e in warm["b", 0]] == [e.token_id for e in cold["a", 0]]


def test_finish_reasons(parts, tokenizer):
    (request,) = make_requests(tokenizer, 1, temperature=0.0, max_tokens=20)
    plain = tokens(run(make_engine(parts), [request]))["0", 0]
    stop_at = next(t for i, t in enumerate(plain) if i >= 4 and t not in plain[:i])
    where = plain.index(stop_at)

    def last(end_ids=(), **params) -> tuple[int, str | None]:
        sampling = SamplingParams(temperature=0.0, max_tokens=20, **params)
        asked = Request(id="0", prompt_ids=request.prompt_ids, params=sampling, seed=0, end_ids=frozenset(end_ids))
        events = run(make_engine(parts), [asked])["0", 0]
        return len(events), events[-1].finish_reason

    assert last() == (20, "length")
    assert last(stop_token_ids=[stop_at]) == (where + 1, "stop")
    assert last(end_ids=[stop_at]) == (where + 1, "stop")
    assert last(end_ids=[stop_at], ignore_eos=True) == (20, "length")
    assert last(end_ids=[stop_at], min_tokens=where + 2)[0] > where + 1


def test_the_context_is_a_bound_not_a_crash(parts, tokenizer):
    engine = make_engine(parts, kv_gb=3.5 * BLOCK_GB)
    assert engine.context_tokens == 192
    ids = tuple(tokenizer.encode("once upon a time " * 60, special=False))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    events = run(engine, [Request(id="a", prompt_ids=ids[:180], params=params, seed=0)])["a", 0]
    assert (len(events), events[-1].finish_reason) == (12, "length")
    with pytest.raises(ContextOverflow, match="192 tokens"):
        engine.add(Request(id="b", prompt_ids=ids[:192], params=params, seed=0))
    assert not engine.busy


@pytest.mark.parametrize(
    ("prompt", "params"),
    [((), {}), ((8192,), {}), ((-1,), {}), ((5,), {"logit_bias": {9000: 1.0}}), ((5,), {"stop_token_ids": [8192]})],
)
def test_bad_requests_are_refused_before_any_work(parts, prompt, params):
    engine = make_engine(parts)
    with pytest.raises(InvalidRequest):
        engine.add(Request(id="a", prompt_ids=prompt, params=SamplingParams(**params), seed=0))
    assert not engine.busy
    assert engine.scheduler.pool.num_held == 0


def test_cancel_gives_everything_back_at_once(parts, tokenizer):
    engine = make_engine(parts)
    for request in make_requests(tokenizer, 6, n=2):
        engine.add(request)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.pool.num_held > 0
    for i in range(6):
        engine.cancel(str(i))
        engine.cancel(str(i))
        engine.scheduler.check()
    assert not engine.busy
    assert engine.scheduler.pool.num_held == 0
    assert engine.step() == []


def test_what_was_started_and_what_runs_is_told(parts, tokenizer):
    engine = make_engine(parts, max_running=2)
    for request in make_requests(tokenizer, 3, max_tokens=3):
        engine.add(request)
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_usage) == (0, 3, 0.0)
    engine.step()
    assert engine.started == ["0", "1"]
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)
    assert 0 < engine.stats().kv_usage <= 1
    started = []
    while engine.busy:
        engine.step()
        started += engine.started
    assert started == ["2"]
    assert engine.stats().kv_usage == 0.0
