"""The word lists beside this file. A section is a list; entries are parted by semicolons, an entry's parts by bars;
a dash is nothing said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random

FILES = ("words.txt", "topics.txt", "feelings.txt", "tales.txt", "phrases.txt")
Entry = tuple[str, ...]


def parse(text: str) -> dict[str, tuple[Entry, ...]]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found = {}
    for section in re.split(r"^\[", lines, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("]")
        entries = [" ".join(entry.split()) for entry in body.split(";")]
        found[name] = tuple(tuple(_said(part) for part in entry.split("|")) for entry in entries if entry)
    return found


def _said(part: str) -> str:
    return "" if part.strip() == "-" else part.strip()


@cache
def sections() -> Mapping[str, tuple[Entry, ...]]:
    folder = Path(__file__).parent
    return {name: list_ for file in FILES for name, list_ in parse((folder / file).read_text("utf-8")).items()}


@cache
def words(section: str) -> tuple[str, ...]:
    """First parts alone."""
    return tuple(entry[0] for entry in sections()[section])


def pick(rng: Random, section: str) -> str:
    return rng.choice(words(section))


def pick_entry(rng: Random, section: str) -> Entry:
    return rng.choice(sections()[section])


def pick_name(rng: Random) -> tuple[str, str]:
    """A name and its pronoun, for a sentence about its bearer."""
    return (pick(rng, "names_f"), "she") if rng.random() < 0.5 else (pick(rng, "names_m"), "he")


def with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    return text if text.startswith(("I ", "I'")) else text[:1].lower() + text[1:]
