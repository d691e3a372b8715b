"""What the model is asked: questions of its corpus as they are, and strange ones, with words exchanged between them.

To the questions of its corpus a model says what it was taught, and drafts of that come true nine times in ten. It is
where it has to find its own words that drafts fail, so most questions are strange; the others are there lest the layer
forgets what it knows. Pure: a seed gives the same questions, without end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count, takewhile
from random import Random

from tiny.distil.lists import words
from tiny.distil.prompts import make_script
from tiny.distil.script import Script
from tripool.core import Conversation

_STRANGE = 0.75
"""Of what is drawn; those that are not prose are then left out."""
_EXCHANGED = 0.5
_POOL = 2000
"""Scripts whose words are given to others."""
_WORD = re.compile(r"[A-Za-z']{3,}")


def questions(seed: int) -> Iterator[Conversation]:
    """Each ends with a user's turn."""
    function_words, rng = set(words("function_words")), Random(f"{seed}/questions")
    first = [make_script(seed, number) for number in range(_POOL)]
    asked = [script.turns[0].user for script in first if _is_prose(script)]
    pool = [word for text in asked for word in _WORD.findall(text) if word.lower() not in function_words]

    def exchanged(found: re.Match[str]) -> str:
        stays = found[0].lower() in function_words or rng.random() >= _EXCHANGED
        return found[0] if stays else rng.choice(pool).lower()

    for number in count():
        script = make_script(seed, number)
        if rng.random() >= _STRANGE:
            yield _as_it_is(script, rng)
        elif _is_prose(script):
            yield [{"role": "user", "content": _WORD.sub(exchanged, script.turns[0].user)}]


def _is_prose(script: Script) -> bool:
    """Not a story, whose plots are few, nor what has one right answer, which is ours."""
    return script.turns[0].answer is None and "story" not in script.kind


def _as_it_is(script: Script, rng: Random) -> Conversation:
    """Up to some turn before which nothing has to be made up."""
    known = len(list(takewhile(lambda turn: turn.answer is not None, script.turns)))
    last = rng.randrange(min(known + 1, len(script.turns)))
    messages = [{"role": "system", "content": script.system}] if script.system else []
    for turn in script.turns[:last]:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer or ""}]
    return [*messages, {"role": "user", "content": script.turns[last].user}]
