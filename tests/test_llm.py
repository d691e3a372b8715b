"""The Python surface over the deterministic engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tripool
from tripool import LLM, SamplingParams
from tripool.answer import Generation
from tripool.core import TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import ContextOverflow, InvalidRequest

PROMPTS = ["one pool", "two pools", "three pools"]
CHAT = [{"role": "user", "content": "hello"}]
ENDLESS = SamplingParams(ignore_eos=True)


@pytest.fixture
def engine() -> PagedFake:
    return PagedFake(fake_text())


@pytest.fixture
def llm(engine: PagedFake) -> LLM:
    return LLM(engine)


class InterruptedEngine(PagedFake):
    """Ctrl-C arrives in the third step."""

    def step(self) -> list[TokenEvent]:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 3:
            raise KeyboardInterrupt
        return super().step()


def test_results_in_input_order_and_as_alone(llm):
    lengths = [SamplingParams(seed=1, max_tokens=n, ignore_eos=True) for n in (30, 5, 10)]
    together = llm.generate(PROMPTS, lengths)
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, lengths, strict=True)]
    assert [g.text for g in together] == [g.text for g in alone]
    assert [len(g.token_ids) for g in together] == [30, 5, 10]
    assert [g.usage.prompt_tokens for g in together] == [len(llm.tokenizer.encode(p)) for p in PROMPTS]
    assert {g.finish_reason for g in together} == {"length"}


def test_text_and_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(seed=1)
    texts = [llm.generate(p, params)[0].text for p in (PROMPTS[0], ids, tuple(ids), [PROMPTS[0]], [ids])]
    assert len(set(texts)) == 1


def test_no_prompts(llm):
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_one_conversation_or_several(llm):
    params = SamplingParams(seed=1)
    (one,) = llm.chat(CHAT, params)
    first, second = llm.chat([CHAT, [{"role": "user", "content": "bye"}]], params)
    assert one.text == first.text != second.text
    assert one.prompt_ids == tuple(llm.tokenizer.encode_chat(CHAT))


def test_streams_say_the_same(llm):
    params = SamplingParams(seed=1)
    stream = llm.stream(PROMPTS[0], params)
    assert stream.generation is None
    assert "".join(stream) == llm.generate(PROMPTS[0], params)[0].text == stream.generation.text
    chat = llm.stream_chat(CHAT, params)
    assert "".join(chat) == llm.chat(CHAT, params)[0].text == chat.generation.text


def test_open_streams_go_on_while_others_are_read(llm, engine):
    params = SamplingParams(seed=1)
    first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
    pieces = [next(first), next(second)]
    (third,) = llm.generate(PROMPTS[2], params)
    want = [g.text for g in llm.generate(PROMPTS, params)]
    assert [pieces[0] + "".join(first), pieces[1] + "".join(second), third.text] == want
    assert not engine.open_requests


def test_stop_strings(llm, engine):
    (plain,) = llm.generate(PROMPTS[0], SamplingParams(seed=1))
    stop = plain.text[8:12]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(seed=1, stop=(stop,)))
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    assert stop in llm.tokenizer.decode(cut.token_ids)
    assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])
    assert cut.usage.completion_tokens == len(cut.token_ids)
    assert not engine.open_requests


def test_seeds_are_drawn_per_request(llm):
    texts = {g.text for g in llm.generate([PROMPTS[0]] * 5)}
    assert len(texts) == 5


def test_progress(llm):
    seen: list[tuple[int, int]] = []
    llm.generate(PROMPTS, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_prompt_too_long_stops_the_call_before_any_work(llm, engine):
    with pytest.raises(ContextOverflow) as caught:
        llm.run([llm.request("fine", id="first"), llm.request("x" * 5000, id="second")])
    assert caught.value.__notes__ == ["request second"]
    assert not engine.open_requests


def test_wrong_number_of_params(llm):
    with pytest.raises(InvalidRequest, match="2 params for 3 prompts"):
        llm.generate(PROMPTS, [SamplingParams()] * 2)


def test_a_stream_is_of_one_choice(llm):
    with pytest.raises(InvalidRequest, match="n is 2"):
        next(llm.stream(PROMPTS[0], SamplingParams(n=2)))


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_interrupt_cancels(verb):
    engine = InterruptedEngine(fake_text())
    llm = LLM(engine)
    with pytest.raises(KeyboardInterrupt):
        list(getattr(llm, verb)(PROMPTS[0], ENDLESS))
    assert not engine.open_requests


def test_an_exception_in_the_callers_callback_cancels(llm, engine):
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, [SamplingParams(max_tokens=1), ENDLESS, ENDLESS], on_progress=fail)
    assert not engine.open_requests


@pytest.mark.parametrize("how", ["close", "drop"])
def test_leaving_a_stream_cancels(llm, engine, how):
    stream = llm.stream(PROMPTS[0], ENDLESS)
    next(stream)
    assert engine.open_requests
    if how == "close":
        stream.close()
    else:
        del stream
    assert not engine.open_requests


def test_close(llm, engine):
    stream = llm.stream(PROMPTS[0], ENDLESS)
    next(stream)
    with llm:
        pass
    assert not engine.open_requests
    llm.close()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate(PROMPTS[0])
    with pytest.raises(InvalidRequest, match="closed"):
        list(stream)


def test_the_package_lists_its_names():
    assert {name for name in tripool.__all__ if not hasattr(tripool, name)} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tripool.nothing


def test_requests_may_be_begun_one_by_one_while_others_end() -> None:
    with LLM(PagedFake(fake_text())) as llm:
        requests = [llm.request(f"prompt {n}", SamplingParams(max_tokens=3 + n, seed=n), id=str(n)) for n in range(6)]
        for request in requests[:4]:
            llm.begin(request)
        found = dict(llm.finished())
        for request in requests[4:]:
            llm.begin(request)
        while len(found) < 6:
            found |= llm.finished()
        assert llm.finished() == {}
        for request, alone in zip(requests, llm.run([replace(one, id=f"{one.id}!") for one in requests]), strict=True):
            answer = found[request.id]
            assert isinstance(answer, Generation) and answer.text == alone.text
