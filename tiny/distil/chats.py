"""Chats of two to four turns whose later turns need the earlier ones."""

from __future__ import annotations

from random import Random
from typing import Any

from tiny.distil.asked import feeling, how_to, maybe_system, question, question_turn, story_turn
from tiny.distil.lists import pick, pick_name, with_article
from tiny.distil.script import BRIEF, FEW, SOME, Script, Turn
from tiny.distil.talk import greeting, thanked


def _thanks(rng: Random) -> Turn:
    user, answer = thanked(rng)
    return Turn(user=user, answer=answer)


def _asked(user: str, wish: str = FEW, **how: Any) -> Turn:
    return Turn(user=user, asked=f"{user} {wish}", **how)


def _follow_up(rng: Random) -> Turn:
    """Said after an explanation; the teacher answers with the whole talk before it."""
    kind = rng.random()
    if kind < 0.35:
        return _asked(pick(rng, "more"))
    if kind < 0.5:
        return _asked(pick(rng, "example"))
    if kind < 0.65:
        return _asked(
            pick(rng, "shorter"),
            "Say your last answer again in one short sentence.",
            max_tokens=60,
            min_words=5,
            repeats=True,
        )
    if kind < 0.8:
        return _asked(pick(rng, "simpler"), min_words=8)
    return _asked(pick(rng, "why_so"))


def explained(rng: Random) -> Script:
    turns = [question_turn(rng, question(rng))]
    turns += [_follow_up(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    if rng.random() < 0.25:
        turns.append(_thanks(rng))
    if rng.random() < 0.15:
        turns.insert(0, greeting(rng).turns[0])
    return Script(kind="chat", turns=tuple(turns[:4]), system=maybe_system(rng))


def told(rng: Random) -> Script:
    """A story, then a question about it."""
    turn, told_of = story_turn(rng)
    name, hero = told_of.name, told_of.kind
    kind = rng.random()
    if kind < 0.45:
        ask, told = pick(rng, "hero_asked").format(hero=hero), pick(rng, "hero_told").format(hero=hero, name=name)
        after = Turn(user=ask, answer=told)
    elif kind < 0.65:
        after = _asked(pick(rng, "moral_asked"), BRIEF, min_words=6)
    elif kind < 0.8:
        after = _asked(pick(rng, "next_asked"), SOME, min_words=20, temperature=0.55)
    else:
        after = _asked(
            pick(rng, "story_shorter"), "Answer in two short sentences.", min_words=8, max_tokens=90, repeats=True
        )
    turns = (turn, after, _thanks(rng)) if rng.random() < 0.2 else (turn, after)
    return Script(kind="chat_story", turns=turns, system=maybe_system(rng))


def helped(rng: Random) -> Script:
    first = (feeling if rng.random() < 0.6 else how_to)(rng)
    after = _thanks(rng) if rng.random() < 0.6 else _asked(pick(rng, "what_else"))
    return Script(kind="chat", turns=(*first.turns, after), system=first.system)


FACTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("name", "My name is {}.", ("What is my name?", "Do you remember my name?", "Who am I?", "Your name is {}.")),
    ("name", "I'm {}.", ("What's my name?", "How am I called?", "You are {}.")),
    ("colors", "My favorite color is {}.", ("What is my favorite color?", "Your favorite color is {}.")),
    ("cities", "I live in {}.", ("Where do I live?", "Which city do I live in?", "You live in {}.")),
    ("foods", "I like {}.", ("What food do I like?", "What do I like to eat?", "You like {}.")),
    ("hobbies", "My hobby is {}.", ("What is my hobby?", "What do I like to do?", "Your hobby is {}.")),
    ("pet_names", "My dog is called {}.", ("What is the name of my dog?", "Your dog is called {}.")),
    ("pet_names", "My cat is called {}.", ("What is my cat called?", "Your cat is called {}.")),
    ("jobs", "I work as {}.", ("What is my job?", "What do I do for work?", "You work as {}.")),
)
"""A list, how one of it is told, and the questions for it; the last is the answer."""


def remembered(rng: Random) -> Script:
    """Something about the user, said first and asked for later; often with another question in between."""
    section, telling, (*asks, back) = rng.choice(FACTS)
    fact = pick_name(rng)[0] if section == "name" else pick(rng, section)
    if section == "jobs":
        fact = with_article(fact)
    opening = rng.choice(("Hi!", "Hello.", "", "", "Please remember:", "Just so you know:"))
    said = f"{opening} {telling.format(fact)}".strip()
    turns = [Turn(user=said, answer=f"{pick(rng, 'noted')} {pick(rng, 'noted_more')}".strip())]
    if rng.random() < 0.4:
        turns.append(question_turn(rng, question(rng)))
    answer = " ".join((rng.choice(("", "", "Of course.", "Yes, I remember.")), back.format(fact))).strip()
    turns.append(Turn(user=rng.choice(asks), answer=answer))
    return Script(kind="memory", turns=tuple(turns))
