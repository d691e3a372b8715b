"""What is kept of the teacher's answers and what is not, each for its own reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny.distil.clean import Copies, judge, loops, repeated_share, tidy, trimmed
from tiny.distil.script import Turn

ASK = Turn(user="Why is the sky blue?", min_words=6)
STORY = Turn(user="Tell me a story about Mira.", min_words=6, must_have=("Mira",), whole=True)
LIST = Turn(user="Name three fruits.", min_words=3, items=3)
GOOD = "The sky is blue because air scatters blue light more than red light."


def test_a_plain_answer_is_kept_as_it_is() -> None:
    assert judge(GOOD, ASK, cut=False) == (GOOD, "")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "empty"),
        ("As an AI language model, I cannot see the sky, but it is blue for many people.", "refusal"),
        ("I'm sorry, but I can't assist with questions about the sky today at all.", "refusal"),
        ("My name is SmolLM and I think that the sky is blue because of the air.", "identity"),
        ("The sky is blue because 空气 scatters the blue light more than the red.", "symbols"),
        ("The sky is blue because of this formula: $I \\propto 1/x$ for all light.", "markup"),
        ("See https://example.org for why the sky is blue on a sunny day.", "markup"),
        ("Blue light.", "short"),
        ("The sky is blue. The air is clear. The sky is blue. The sea is blue as well.", "loop"),
        ("I went to see how the light of the sun and the light of the sun went to see how.", "self"),
        ("The sky is blue because air scatters blue light more than", "unfinished"),
        ("There are reasons: 1. Air scatters light. 2. Blue is scattered most of all.", "list"),
        ("word " * 300 + ".", "long"),
    ],
)
def test_what_is_dropped_and_why(raw: str, reason: str) -> None:
    assert judge(raw, ASK, cut=False).reason == reason


def test_a_cut_answer_may_end_anywhere_unless_it_must_be_whole() -> None:
    half = "Mira the fox went to the river because she was thirsty and then"
    assert judge(half, ASK, cut=True).reason == ""
    assert judge(half, STORY, cut=True).reason == "cut"


def test_a_story_needs_its_hero_as_a_word() -> None:
    assert judge("A fox named Miranda walked to the river one fine day.", STORY, cut=False).reason == "missing"
    assert judge("A fox named Mira walked to the river one fine day.", STORY, cut=False).reason == ""


def test_an_answer_that_was_given_before_is_no_answer() -> None:
    assert judge(GOOD, ASK, cut=False, before=["Hello.", GOOD.upper()]).reason == "again"
    assert judge("Yes, it is. " + GOOD, ASK, cut=False, before=[GOOD]).reason == "again"
    assert judge(GOOD, Turn(user="Shorter!", min_words=5, repeats=True), cut=False, before=[GOOD]).reason == ""


def test_a_list_loses_what_is_around_it_and_what_is_too_much() -> None:
    raw = "Here are some fruits:\n\n1. **Apple**\n2. Pear\n3. Plum\n4. Fig\n5. Li"
    assert judge(raw, LIST, cut=True) == ("1. Apple\n2. Pear\n3. Plum", "")
    assert judge("1. Apple 2. Pear 3. Plum", LIST, cut=False) == ("1. Apple\n2. Pear\n3. Plum", "")
    assert judge("1. Apple\n2. Pear\n3. Pl", LIST, cut=True).reason == "no list"
    assert judge("1. Apple\n2. Pear", LIST, cut=False).reason == "no list"
    assert judge("1. Apple\n2. Apple\n3. Plum", LIST, cut=False).reason == "loop"


def test_an_answer_must_be_about_the_question() -> None:
    turn = Turn(user="How do bees freeze?", min_words=3, about=("bees", "freeze"))
    assert judge("A bee sleeps in winter.", turn, cut=False).reason == ""
    assert judge("Freezing is rare for them.", turn, cut=False).reason == ""
    assert judge("Puppies are the best friends.", turn, cut=False).reason == "off topic"


def test_tidying_gives_one_plain_paragraph() -> None:
    assert tidy("Sure! Here is a short answer:\n\nIt\u2019s **blue**\u2026\n\nReally.") == "It's blue... Really."
    assert tidy('"A quoted answer."') == "A quoted answer."
    assert tidy('"Yes," he said. "No."') == '"Yes," he said. "No."'


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_repeated_runs_are_counted_as_by_looking(words: list[str]) -> None:
    runs = [words[i : i + 6] for i in range(len(words) - 5)]
    again = sum(run in runs[:i] for i, run in enumerate(runs))
    assert repeated_share(words) == pytest.approx(again / len(runs) if runs else 0.0)


@given(st.text(alphabet="ab .!?\n", max_size=60))
def test_a_trimmed_text_is_a_beginning_that_ends_a_sentence(text: str) -> None:
    short = trimmed(text)
    assert text.startswith(short)
    assert not short or short[-1] in ".!?"


def test_six_words_that_come_back_are_a_loop_and_five_are_not() -> None:
    assert loops("one two three four five six and then one two three four five six again")
    assert not loops("one two three four five and then one two three four five again")


def test_copies_are_counted_by_what_is_said_and_by_kind() -> None:
    copies = Copies({"greeting": 2})
    assert [copies.is_new("greeting", ["Hi!", "Hello."]) for _ in range(3)] == [True, True, False]
    assert [copies.is_new("explain", [text]) for text in ("It is blue.", "it is BLUE", "It is red.")] == [
        True,
        False,
        True,
    ]
