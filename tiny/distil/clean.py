"""What is kept of the teacher's answers. Pure functions of text: a reason for every answer that is dropped.

Prose is brought to one paragraph in plain characters; lists keep their lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from tiny.distil.script import Turn

PLAIN_CHARACTERS = str.maketrans(
    {
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u2022": "-",
    }
)
REFUSALS = re.compile(
    r"as an ai|language model|i'?m sorry,? but|i am sorry,? but|i apologi[sz]e|i can'?t (?:assist|help|provide|fulfill)"
    r"|i cannot (?:assist|help|provide|fulfill)|i'm not able to|i am not able to|unable to (?:assist|provide|fulfill)"
    r"|i don't have (?:personal|access|feelings)|i do not have (?:personal|access|feelings)"
    r"|as a (?:digital|virtual|computer)"
    r"|i'?m (?:just )?an? (?:ai|artificial|machine|chatbot|digital|computer|virtual)|my (?:programming|training data)"
    r"|i was (?:trained|programmed|created|developed)|real-time",
    re.IGNORECASE,
)
IDENTITIES = re.compile(
    r"smollm|hugging ?face|openai|chatgpt|gpt-?\d|anthropic|claude|gemini|llama|\bmeta\b|alexa|siri\b", re.IGNORECASE
)
MARKUP = re.compile(
    r"```|\]\(|https?:|www\.|\\[a-z(\[]|[|<>{}$_^~=]|^#|\[|\]|\b(?:user|assistant|system|question|answer)\s*:",
    re.IGNORECASE,
)
ABOUT_TASK = re.compile(
    r"\b(?:the user|this prompt|your prompt|the prompt|the given (?:text|sentence)|word count|in \d+ words"
    r"|revised version"
    r"|here'?s a (?:revised|rewritten)|i can help you (?:rewrite|write)|rewrite the|the original text|your name\b)",
    re.IGNORECASE,
)
SELF = re.compile(r"^(?:i|i'm|i'd|i've|i'll|as i|as a|my|we|our|the answer|answer|step)\b", re.IGNORECASE)
"""How the teacher begins where it takes the question for its own."""
PREAMBLE = re.compile(
    r"^(?:sure|certainly|of course|absolutely)[!,.]\s+(?:here(?:'s| is| are)[^.:\n]{0,80}[:.]\s+)?"
    r"|^here(?:'s| is| are) (?:a|the|some|my|your|three|four|five|\w+ short)[^.:\n]{0,80}:\s+"
    r"|^(?:title|story|once upon a time, a story):\s+",
    re.IGNORECASE,
)
ITEM = re.compile(r"^\d+[.)] +\S")
WORD = re.compile(r"[A-Za-z0-9']+")
MAX_WORDS = 190
REPEAT_WORDS = 6


class Judged(NamedTuple):
    """`text` is what is kept; where `reason` is not empty, nothing is."""

    text: str
    reason: str = ""


def tidy(text: str, *, items: int = 0) -> str:
    """`items`: that many numbered lines are wanted; what comes before and after them is left out."""
    text = text.translate(PLAIN_CHARACTERS).replace("\u2014", " - ").replace("**", "").replace("*", "").strip()
    if items:
        lines = [" ".join(line.split()) for line in re.sub(r"\s+(?=\d+[.)] )", "\n", text).splitlines()]
        return "\n".join([line for line in lines if ITEM.match(line)][:items])
    text = PREAMBLE.sub("", text, count=1)
    text = " ".join(text.split())
    return upper_first(text[1:-1] if text.startswith('"') and text.endswith('"') and text.count('"') == 2 else text)


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def judge(raw: str, turn: Turn, *, cut: bool, before: Sequence[str] = ()) -> Judged:
    """`cut`: the length limit ended it, so that its last sentence may be a half. `before`: what was said earlier."""
    text = tidy(raw, items=turn.items)
    words = [word.lower() for word in WORD.findall(text)]
    checks = (
        ("no list", turn.items > 0 and not is_list(text, turn.items, cut=cut, raw=raw)),
        ("empty", not words),
        ("refusal", bool(REFUSALS.search(text))),
        ("identity", bool(IDENTITIES.search(text))),
        ("symbols", not text.isascii()),
        ("markup", bool(MARKUP.search(text))),
        ("task", bool(ABOUT_TASK.search(text))),
        ("short", len(words) < turn.min_words),
        ("long", len(words) > MAX_WORDS),
        ("loop", loops(text)),
        ("missing", any(wanted.lower() not in words for wanted in turn.must_have)),
        ("off topic", bool(turn.about) and not is_about(words, turn.about)),
        ("list", not turn.items and len(re.findall(r"(?:^| )\d+[.)] ", text)) > 1),
        ("unfinished", not cut and not turn.items and text[-1:] not in ".!?\"'"),
        ("self", bool(SELF.match(text))),
        ("cut", cut and turn.whole),
        ("again", not turn.repeats and says_again(text, before)),
        ("echo", " ".join(words) == " ".join(word.lower() for word in WORD.findall(turn.user))),
    )
    return Judged(text, next((reason for reason, wrong in checks if wrong), ""))


def is_about(words: Sequence[str], about: Sequence[str]) -> bool:
    """Whether a word begins as one of those wanted does: "bees" as "bee", "freezing" as "freeze"."""
    stems = tuple(wanted[: max(3, min(5, len(wanted) - 1))] for wanted in about)
    return any(word.startswith(stems) for word in words)


def is_list(text: str, items: int, *, cut: bool, raw: str) -> bool:
    """The wanted number of lines, counted from one; the last of them whole, which a cut answer shows by going on."""
    numbers = [int(line.split(".")[0].split(")")[0]) for line in text.splitlines()]
    goes_on = re.search(rf"(?:^|\s){items + 1}[.)] ", raw) is not None
    return numbers == list(range(1, items + 1)) and (goes_on or not cut)


def sentences(text: str) -> list[str]:
    return [piece.strip() for piece in re.split(r"(?<=[.!?])\s+|\n", text) if piece.strip()]


def loops(text: str) -> bool:
    """A sentence said twice, a list item said twice, or six words in a row that come back."""
    said = Counter(normalised(sentence) for sentence in sentences(text))
    if any(count > 1 for sentence, count in said.items() if len(sentence) > 3):
        return True
    return repeated_share([word.lower() for word in WORD.findall(text)]) > 0


def says_again(text: str, before: Sequence[str]) -> bool:
    """A sentence of six words or more that was said earlier in the talk."""
    earlier = {normalised(sentence) for said in before for sentence in sentences(said)}
    return any(said in earlier for said in map(normalised, sentences(text)) if said.count(" ") >= REPEAT_WORDS - 1)


def repeated_share(words: list[str], length: int = REPEAT_WORDS) -> float:
    """Share of runs of `length` words that were said before in the same text."""
    runs = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def trimmed(text: str) -> str:
    """A cut text up to its last whole sentence; empty if it has none."""
    ends = [match.end() for match in re.finditer(r"[.!?][\"']?(?=\s|$)", text)]
    return text[: ends[-1]] if ends else ""


def normalised(text: str) -> str:
    return " ".join(WORD.findall(text.lower()))


class Copies:
    """Counts documents that say the same. A greeting may come often, an explanation once."""

    def __init__(self, allowed: dict[str, int], otherwise: int = 1) -> None:
        self._allowed, self._otherwise = allowed, otherwise
        self._counts: Counter[bytes] = Counter()

    def is_new(self, kind: str, texts: Iterable[str]) -> bool:
        key = blake2b(normalised(" / ".join(texts)).encode(), digest_size=8).digest()
        self._counts[key] += 1
        return self._counts[key] <= self._allowed.get(kind, self._otherwise)
