"""Scripts: the same for the same numbers, varied, and right wherever the answer is ours."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny.distil import asked, chats, facts, objects, rewrites, sums, talk
from tiny.distil.clean import judge
from tiny.distil.lists import parse, sections, words
from tiny.distil.prompts import MIX, make_script
from tiny.distil.script import Script
from tiny.distil.tales import PLOTS, Hero, tell

SEEDS = st.integers(0, 2**32)


def many(count: int = 3000) -> list[Script]:
    return [make_script(5, number) for number in range(count)]


def test_a_number_always_makes_the_same_script() -> None:
    assert [make_script(3, n) for n in range(60)] == [make_script(3, n) for n in range(60)]
    assert [make_script(3, n) for n in range(60)] != [make_script(4, n) for n in range(60)]


def test_every_kind_comes_about_as_often_as_the_mix_says() -> None:
    scripts, total = many(), sum(share for share, _ in MIX)
    kinds = Counter(script.kind for script in scripts)
    shares = {"explain": 26 * 0.96, "how_to": 8, "arithmetic": 4, "greeting": 4, "feeling": 7}
    for kind, share in shares.items():
        assert kinds[kind] / len(scripts) == pytest.approx(share / total, rel=0.3), kind


def test_large_kinds_hardly_repeat() -> None:
    users = defaultdict(list)
    for script in many():
        users[script.kind].append(script.turns[0].user)
    for kind in ("story", "json", "arithmetic", "chat"):
        assert len(set(users[kind])) > 0.9 * len(users[kind]), kind
    assert len(set(users["explain"])) > 0.8 * len(users["explain"])


def test_texts_are_clean() -> None:
    for script in many():
        for text in (
            part for turn in script.turns for part in (turn.user, turn.answer or "fine", turn.asked or "fine")
        ):
            assert text == text.strip() and text and text.isascii(), text
            assert "  " not in text and (script.kind == "json" or not re.search(r"[{}|]", text)), text
            assert not re.search(r"\ba [aeio]", text.replace("a one", "")), text


def test_what_is_ours_would_be_kept_if_the_teacher_had_said_it() -> None:
    first = [script.turns[0] for script in many() if script.kind in ("story", "chat_story", "feeling")]
    judged = [judge(turn.answer, turn, cut=False).reason for turn in first if turn.answer]
    odd = [reason for reason in judged if reason not in ("", "self", "short")]
    assert len(odd) < 0.01 * len(judged), odd


@given(SEEDS)
def test_sums_are_right(seed: int) -> None:
    (turn,) = sums.arithmetic(Random(seed)).turns
    assert turn.answer is not None
    if found := re.search(r"(\d+) ([-+*]) (\d+) = (\d+)", turn.answer):
        a, sign, b, result = found.groups()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
        assert a in turn.user and b in turn.user


def test_numbers_in_words() -> None:
    told = {
        0: "zero",
        13: "thirteen",
        40: "forty",
        95: "ninety-five",
        120: "one hundred twenty",
        144: "one hundred forty-four",
    }
    assert {number: sums.in_words(number) for number in told} == told
    assert len({sums.in_words(number) for number in range(2000)}) == 2000


@given(SEEDS)
def test_json_answers_parse_fit_their_schema_and_hold_what_was_said(seed: int) -> None:
    (turn,) = objects.json_answer(Random(seed)).turns
    assert turn.answer is not None
    answer = json.loads(turn.answer)
    for value in answer.values():
        for part in value if isinstance(value, list) else [value]:
            assert isinstance(part, bool) or str(part) in turn.user
    if '{"type":"object"' in turn.user:
        schema, _ = json.JSONDecoder().raw_decode(turn.user[turn.user.index("{") :])
        jsonschema = pytest.importorskip("jsonschema")
        jsonschema.validate(answer, schema)
        assert list(answer) == schema["required"]


@given(SEEDS)
def test_a_tale_holds_its_hero_and_no_loop(seed: int) -> None:
    rng = Random(seed)
    hero = Hero(name="Mira", pronoun="she", trait="old", kind="fox", place="on the moon", thing="a ring")
    text = tell(rng, hero)
    assert "Mira" in text and "{" not in text
    assert not re.search(r"\bhe\b|\bhim\b|\bhis\b", text)
    assert judge(text, asked.Turn(user="?", must_have=("Mira",)), cut=False).reason == ""


def test_every_plot_can_be_told_both_ways() -> None:
    assert all(len(sections()[plot]) == 6 for plot in PLOTS)
    assert all(len(ways) == 4 for plot in PLOTS for ways in sections()[plot])


@given(SEEDS)
def test_memory_answers_what_was_said_first(seed: int) -> None:
    script = chats.remembered(Random(seed))
    last = script.turns[-1].answer
    assert last is not None
    fact = (
        last.rstrip(".").split(" is ")[-1].split(" called ")[-1].split(" in ")[-1].split(" like ")[-1].split(" as ")[-1]
    )
    assert fact.removeprefix("You are ").split(". You are ")[-1] in script.turns[0].user


@given(SEEDS)
def test_the_assistant_says_its_own_name(seed: int) -> None:
    (turn,) = talk.identity(Random(seed)).turns
    assert turn.answer is not None
    if any(word in turn.user for word in ("Who are you", "name", "Introduce", "Which model")):
        assert "Tripool Tiny" in turn.answer


def test_a_question_is_about_its_content() -> None:
    assert asked.content_words("Why is the sky blue?") == ("sky", "blue")
    assert asked.content_words("What should I know about it?") == ()


@given(SEEDS)
def test_exact_makers_answer_every_turn(seed: int) -> None:
    rng = Random(seed)
    for maker in (talk.greeting, talk.small_talk, talk.farewell, facts.fact, rewrites.rewrite, asked.feeling):
        assert all(turn.answer for turn in maker(rng).turns)


def test_lists_are_read() -> None:
    assert parse("# no\n[a]\nx; y z;\nw | v; -\n[b]\nq") == {"a": (("x",), ("y z",), ("w", "v"), ("",)), "b": (("q",),)}
    assert len(words("things")) == len(set(words("things")))
