"""The mix: which kinds of document there are, how often each comes, and document number n of a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tiny.distil import asked, chats, facts, objects, rewrites, sums, talk
from tiny.distil.script import Script

MIX: tuple[tuple[float, Callable[[Random], Script]], ...] = (
    (26, asked.explain),
    (15, asked.story),
    (8, asked.how_to),
    (7, asked.feeling),
    (4, asked.advice),
    (5, asked.list_of),
    (7, chats.explained),
    (4, chats.told),
    (2, chats.helped),
    (4, chats.remembered),
    (4, talk.greeting),
    (3, talk.small_talk),
    (3, talk.identity),
    (1.5, talk.farewell),
    (4, sums.arithmetic),
    (4, objects.json_answer),
    (4, facts.fact),
    (2.5, rewrites.rewrite),
)
"""Shares of documents, not of tokens: what is ours is short."""


def make_script(seed: int, number: int) -> Script:
    """The same for the same numbers, whoever asks and in whatever order."""
    rng = Random(f"{seed}/{number}")
    (maker,) = rng.choices([maker for _, maker in MIX], weights=[share for share, _ in MIX])
    return maker(rng)
