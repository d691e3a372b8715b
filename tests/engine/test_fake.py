"""The fake engine keeps an engine's contract."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tripool.core import BLOCK_TOKENS, Request, SamplingParams, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.text import Tokenizer

END = next(iter(fake_text().end_ids))


def request(id: str = "r", prompt: tuple[int, ...] = (5, 6, 7), seed: int = 1, **options: object) -> Request:
    params = SamplingParams.from_options(options)
    return Request(id=id, prompt_ids=prompt, params=params, seed=seed, end_ids=frozenset({END}))


def drain(engine: PagedFake) -> dict[tuple[str, int], list[TokenEvent]]:
    found = defaultdict(list)
    while engine.busy:
        for event in engine.step():
            found[event.request_id, event.choice].append(event)
    return found


def ids_of(*requests: Request, **options: int) -> dict[tuple[str, int], list[int]]:
    engine = PagedFake(fake_text(), **options)
    for one in requests:
        engine.add(one)
    found = drain(engine)
    for events in found.values():
        assert [event.index for event in events] == list(range(len(events)))
        assert [event.finish_reason is None for event in events] == [True] * (len(events) - 1) + [False]
    assert not engine.open_requests
    return {key: [event.token_id for event in events] for key, events in found.items()}


def test_tokens_do_not_depend_on_neighbours():
    many = [request(f"r{i}", (5, i), n=2) for i in range(20)]
    together = ids_of(*many, max_running=4)
    assert together == {key: ids for one in many for key, ids in ids_of(one).items()}
    assert len({tuple(ids) for ids in together.values()}) == 40


def test_seed_decides():
    assert ids_of(request(seed=1)) == ids_of(request(seed=1)) != ids_of(request(seed=2))


def test_limits():
    (natural,) = ids_of(request()).values()
    assert natural[-1] == END
    assert END not in natural[:-1]
    assert list(ids_of(request(max_tokens=3)).values()) == [natural[:3]]
    assert len(ids_of(request(ignore_eos=True, max_tokens=200))["r", 0]) == 200
    assert len(ids_of(request(ignore_eos=True), context_tokens=50)["r", 0]) == 47
    assert len(ids_of(request(min_tokens=60))["r", 0]) == 61
    assert list(ids_of(request(stop_token_ids=[natural[4]])).values()) == [natural[: natural.index(natural[4]) + 1]]


def test_refusals_come_before_any_work():
    engine = PagedFake(fake_text(), context_tokens=50)
    for bad, error in [
        (request(prompt=()), InvalidRequest),
        (request(prompt=(10**6,)), InvalidRequest),
        (request(prompt=(-1,)), InvalidRequest),
        (request(prompt=(1,) * 50), ContextOverflow),
    ]:
        with pytest.raises(error):
            engine.add(bad)
    assert not engine.busy


def test_cancel_is_idempotent_and_at_once():
    engine = PagedFake(fake_text())
    engine.add(request("a"))
    engine.add(request("b"))
    engine.step()
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("unknown")
    assert engine.open_requests == {"b"}
    assert {request_id for request_id, _ in drain(engine)} == {"b"}


def test_prefix_reuse_counts_whole_blocks_within_a_namespace():
    engine, size = PagedFake(fake_text()), BLOCK_TOKENS
    cached = []
    for prompt in [(1,) * (2 * size + 1)] * 2 + [(1,) * (2 * size), (1,) * size + (2,) * (size + 1)]:
        engine.add(request(prompt=prompt))
        cached.append(drain(engine)["r", 0][0].num_cached_tokens)
    assert cached == [0, 2 * size, size, size]
    engine.add(Request(id="r", prompt_ids=(1,) * (2 * size + 1), params=SamplingParams(), seed=1, namespace="other"))
    assert drain(engine)["r", 0][0].num_cached_tokens == 0


def test_logprobs():
    engine = PagedFake(fake_text())
    engine.add(request(logprobs=3, max_tokens=4))
    for event in drain(engine)["r", 0]:
        assert event.logprobs is not None
        assert event.logprobs.top[0] == (event.token_id, event.logprobs.chosen)
        scores = [score for _, score in event.logprobs.top]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)


def test_its_tokenizer_is_a_real_one():
    tokenizer = Tokenizer(fake_text())
    text = "A pool of tokens: é, 😀 and\n<|end|>?"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert len(tokenizer.encode(" decode")) == 1
