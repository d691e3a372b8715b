"""Sums of two numbers, bare and as small stories, answered exactly."""

from __future__ import annotations

from random import Random

from tiny.distil.lists import pick, pick_name, upper_first
from tiny.distil.script import Script, exact

ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """0 to 9,999."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    head, rest = divmod(number, size)
    return f"{in_words(head)} {name}" + (f" {in_words(rest)}" if rest else "")


SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def _numbers(rng: Random) -> tuple[int, str, int, int]:
    sign = rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        return a, sign, b, a * b
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if sign == "-" and a < b:
        a, b = b, a
    return a, sign, b, a + b if sign == "+" else a - b


def arithmetic(rng: Random) -> Script:
    return (_word_problem if rng.random() < 0.4 else _sum)(rng)


def _sum(rng: Random) -> Script:
    a, sign, b, result = _numbers(rng)
    shown = rng.choice((sign, f" {sign} "))
    if rng.random() < 0.3:
        sum_ = f"{in_words(a)} {SIGNS[sign]} {in_words(b)}"
        answer = f"{upper_first(sum_)} is {in_words(result)}."
    else:
        sum_ = rng.choice((f"{a}{shown}{b}", f"{a} {SIGNS[sign]} {b}"))
        answer = rng.choice((f"{a} {sign} {b} = {result}", f"{sum_} is {result}.", f"The answer is {result}."))
    user = rng.choice(
        (
            "What is {}?",
            "How much is {}?",
            "{} = ?",
            "Calculate {}.",
            "Please compute {}.",
            "{}?",
            "Can you tell me what {} is?",
            "Hi, what is {}?",
            "what is {}",
            "Work out {}.",
        )
    )
    return exact("arithmetic", (upper_first(user.format(sum_)), answer))


def _word_problem(rng: Random) -> Script:
    name, pronoun = pick_name(rng)
    things, other = pick(rng, "small_things"), pick_name(rng)[0]
    if rng.random() < 0.5:
        a, b = rng.randint(2, 60), rng.randint(2, 39)
        text = rng.choice(
            (
                f"{name} has {a} {things} and gets {b} more.",
                f"{name} has {a} {things}. {other} gives {name} {b} more.",
                f"{name} finds {a} {things} on Monday and {b} {things} on Tuesday.",
            )
        )
        result, how = a + b, f"{a} + {b} = {a + b}"
    else:
        a, b = sorted((rng.randint(3, 99), rng.randint(2, 50)), reverse=True)
        a += a == b
        text = rng.choice(
            (
                f"{name} has {a} {things} and gives {b} to {other}.",
                f"{name} had {a} {things} and lost {b}.",
                f"{name} bought {a} {things} and used {b} of them.",
            )
        )
        result, how = a - b, f"{a} - {b} = {a - b}"
    ask = rng.choice(
        (
            f"How many {things} does {name} have now?",
            f"How many {things} are there now?",
            f"How many {things} does {pronoun} have in the end?",
        )
    )
    answer = rng.choice(
        (f"{how}, so {name} has {result} {things}.", f"{name} has {result} {things} now, because {how}.")
    )
    return exact("arithmetic", (f"{text} {ask}", answer))
