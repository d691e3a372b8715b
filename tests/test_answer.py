"""Events into text: choices, stops and counts."""

from __future__ import annotations

import random

import pytest

from tripool.answer import Answer
from tripool.core import Request, SamplingParams, TokenEvent, TokenLogprobs, Usage
from tripool.engine.fake import fake_text
from tripool.text import StopFinder, Tokenizer

TOKENIZER = Tokenizer(fake_text())
(END,) = TOKENIZER.end_ids


def answer(**options: object) -> Answer:
    params = SamplingParams.from_options(options)
    return Answer(Request(id="r", prompt_ids=(1, 2, 3), params=params, seed=0, end_ids=TOKENIZER.end_ids), TOKENIZER)


def feed(it: Answer, text: str, choice: int = 0, finish: str | None = None) -> list[str]:
    """One event per token; the last one ends the choice if asked to."""
    ids = TOKENIZER.encode(text)
    texts = []
    for index, token_id in enumerate(ids):
        finish_reason = finish if index == len(ids) - 1 else None
        delta = it.take(TokenEvent("r", choice, index, token_id, finish_reason, None, 2))
        texts.append("" if delta is None else delta.text)
    return texts


def test_stop_strings_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every choice: long ones take milliseconds and megabytes each time."""
    prepared = []
    prepare = StopFinder.__init__
    monkeypatch.setattr(StopFinder, "__init__", lambda self, stops: prepared.append(stops) or prepare(self, stops))
    it = answer(n=128, stop=["b" * 1000, "."])
    assert prepared == [("b" * 1000, ".")]
    feed(it, "one.two", choice=0)
    feed(it, "b" * 500, choice=1, finish="length")
    assert it.stop_string(0) == "." and it.stop_string(1) is None, "and yet each has its own"


def test_characters_come_whole():
    it = answer()
    assert feed(it, "é😀!", finish="length") == ["", "é", "", "", "", "😀", "!"]
    assert it.done
    assert it.generation().text == "é😀!"


def test_half_a_character_at_the_end_is_not_lost():
    it = answer()
    ids = TOKENIZER.encode("é")
    delta = it.take(TokenEvent("r", 0, 0, ids[0], "length"))
    assert delta is not None
    assert delta.text == "\ufffd"


def test_end_token_is_counted_and_not_shown():
    it = answer(skip_special_tokens=False)
    feed(it, "ab")
    it.take(TokenEvent("r", 0, 2, END, "stop"))
    assert it.generation().text == "ab"
    assert it.generation().token_ids[-1] == END
    assert it.usage.completion_tokens == 3


def test_end_token_is_shown_on_request():
    it = answer(skip_special_tokens=False, include_stop_str_in_output=True)
    it.take(TokenEvent("r", 0, 0, END, "stop"))
    assert it.generation().text == "<|end|>"


def test_stop_string_across_tokens():
    it = answer(stop="pool of")
    feed(it, "A pool of tokens")
    assert it.done
    (choice,) = it.generation().choices
    assert (choice.text, choice.finish_reason) == ("A ", "stop")
    assert TOKENIZER.decode(choice.token_ids) == "A pool of"  # up to the token that completed it, and none after
    assert it.usage.completion_tokens == len(choice.token_ids)


def test_text_held_for_a_stop_string_comes_out_at_the_end():
    it = answer(stop="pool party")
    assert "".join(feed(it, "A pool", finish="length")) == "A pool"


@pytest.mark.parametrize("first", [0, 1])
def test_done_when_every_choice_is(first):
    it = answer(n=2)
    feed(it, "one", choice=first, finish="length")
    assert not it.done
    feed(it, "two", choice=1 - first, finish="length")
    assert it.done
    assert [choice.index for choice in it.generation().choices] == [0, 1]


def test_usage():
    it = answer(n=2)
    feed(it, "one", choice=0, finish="length")
    feed(it, "four", choice=1, finish="length")
    assert (it.usage.prompt_tokens, it.usage.completion_tokens, it.usage.cached_tokens) == (3, 7, 2)
    assert (it.usage.draft_tokens, it.usage.accepted_draft_tokens) == (0, 0)


def test_usage_counts_the_drafts_of_every_choice_up_to_its_last_token():
    it = answer(n=2, stop="b")
    a, b = TOKENIZER.encode("ab")
    it.take(TokenEvent("r", 0, 0, a, num_draft_tokens=1, num_accepted_draft_tokens=0))
    it.take(TokenEvent("r", 1, 0, a, num_draft_tokens=3, num_accepted_draft_tokens=2))
    it.take(TokenEvent("r", 0, 1, b, num_draft_tokens=4, num_accepted_draft_tokens=2))
    it.take(TokenEvent("r", 0, 2, a, num_draft_tokens=9, num_accepted_draft_tokens=9))  # after the stop string
    assert (it.usage.draft_tokens, it.usage.accepted_draft_tokens) == (7, 4)


def test_unfinished_is_an_abort():
    it = answer()
    feed(it, "half")
    assert it.generation().finish_reason == "abort"
    assert it.generation().text == "half"


def test_logprobs_only_when_asked_for():
    it = answer(logprobs=1)
    it.take(TokenEvent("r", 0, 0, 5, "length", TokenLogprobs(-0.5, ((5, -0.5),))))
    assert it.generation().logprobs == (TokenLogprobs(-0.5, ((5, -0.5),)),)
    assert answer().generation().logprobs is None


def test_a_lost_event_is_our_mistake():
    it = answer()
    with pytest.raises(AssertionError, match="lost"):
        it.take(TokenEvent("r", 0, 1, 5))


@pytest.mark.parametrize("seed", range(5))
def test_usage_is_the_sum_over_choices_after_every_token(seed):
    """Counted as they come; the plain way is to look at every choice's last event. A worker that takes over may count
    its drafts from the beginning."""
    rng, it, last = random.Random(seed), answer(n=5), dict[int, TokenEvent]()
    for _ in range(60):
        choice = rng.randrange(5)
        index = last[choice].index + 1 if choice in last else 0
        drafted = rng.randrange(20)
        event = TokenEvent("r", choice, index, 9, None, None, 2, drafted, rng.randint(0, drafted))
        it.take(event)
        last[choice] = event
        assert it.usage == Usage(
            prompt_tokens=3,
            completion_tokens=sum(one.index + 1 for one in last.values()),
            cached_tokens=2,
            draft_tokens=sum(one.num_draft_tokens for one in last.values()),
            accepted_draft_tokens=sum(one.num_accepted_draft_tokens for one in last.values()),
        )
