"""Questions that nobody trained the model on: the corpus's own, with words exchanged between them.

To the questions of its corpus a model says what it was taught, and drafts of that come true nine times in ten. It is
where it has to find its own words that drafts fail. Pure: a seed gives the same questions, without end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from random import Random

from tripool.train.distil.lists import words
from tripool.train.distil.prompts import make_script
from tripool.train.distil.script import Script

_EXCHANGED = 0.5
_POOL = 2000
"""Questions whose words are given to others."""
_WORD = re.compile(r"[A-Za-z']{3,}")


def questions(seed: int) -> Iterator[str]:
    function_words, dice = set(words("function_words")), Random(f"{seed}/questions")
    scripts = (make_script(seed, number) for number in count())
    asked = (script.turns[0].user for script in scripts if _is_prose(script))
    first = [next(asked) for _ in range(_POOL)]
    pool = [word for text in first for word in _WORD.findall(text) if word.lower() not in function_words]

    def exchanged(found: re.Match[str]) -> str:
        stays = found[0].lower() in function_words or dice.random() >= _EXCHANGED
        return found[0] if stays else dice.choice(pool).lower()

    for text in first:
        yield _WORD.sub(exchanged, text)
    for text in asked:
        yield _WORD.sub(exchanged, text)


def _is_prose(script: Script) -> bool:
    """Not a story, whose plots are few, nor what has one right answer, which is ours."""
    return script.turns[0].answer is None and "story" not in script.kind
