"""Talk whose answers are ours: greetings, small talk, thanks and goodbyes, and who the assistant is.

The teacher would name itself and its makers here, and a small student needs these to be right.
"""

from __future__ import annotations

from random import Random

from tiny.distil.lists import pick, pick_entry, pick_name, upper_first
from tiny.distil.script import Script, exact

ABOUT_IT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("chatgpt",), ("other_model", "maker")),
    (("where",), ("home", "name_it")),
    (("robot", "person", "human", "an ai", "feelings", "old"), ("not_human", "name_it")),
    (("made", "built", "created"), ("maker", "name_it")),
    (("big", "mistakes", "everything"), ("name_it", "limit")),
    (("can you do", "good at", "ask you"), ("can", "limit")),
    (("",), ("name_it", "maker")),
)
"""What a question about the assistant may hold, and which facts answer it; the first that fits."""


def greeting(rng: Random) -> Script:
    name, _ = pick_name(rng)
    called = rng.random() < 0.25
    user, more = pick(rng, "hello"), pick(rng, "hello_more")
    introduced = rng.choice((f"I'm {name}.", f"My name is {name}.", f"This is {name}.", f"{name} here."))
    if user[-1].isalpha() and (more or called):
        user += rng.choice(("!", "."))
    user = " ".join(part for part in (user, more, introduced if called else "") if part)
    opening = pick(rng, "open_hello")
    hour = next((hour for hour in ("morning", "evening", "afternoon") if f"Good {hour}" in user), None)
    if hour:
        opening = f"Good {hour}!"
    if called:
        opening = f"{opening.rstrip('!')}, {name}!"
    middle = pick(rng, "well") if "How" in more or "up" in more else pick(rng, "glad") if rng.random() < 0.8 else ""
    return exact("greeting", (user, " ".join(part for part in (opening, middle, pick(rng, "offer")) if part)))


def identity(rng: Random) -> Script:
    user = pick(rng, "who")
    facts = next(facts for holds, facts in ABOUT_IT if any(word in user.lower() for word in holds))
    more = [fact for fact in ("home", "can", "maker", "limit") if fact not in facts]
    facts = (*facts, *rng.sample(more, k=rng.choice((0, 1, 1, 2))))
    said = [pick(rng, fact) for fact in facts]
    if rng.random() < 0.4:
        said.append(pick(rng, "offer"))
    before = rng.choice(("", "", "", "Hi! ", "Hello. ", "Hey! ", "Tell me: "))
    return exact("identity", (before + user, " ".join(said)))


def thanked(rng: Random) -> tuple[str, str]:
    return pick(rng, "thanks"), f"{pick(rng, 'welcome')} {pick(rng, 'welcome_more')}".strip()


def farewell(rng: Random) -> Script:
    if rng.random() < 0.5:
        return exact("thanks", thanked(rng))
    return exact("goodbye", (pick(rng, "bye"), f"{pick(rng, 'bye_back')} {pick(rng, 'bye_more')}".strip()))


def small_talk(rng: Random) -> Script:
    topic = rng.randrange(4)
    if topic == 0:
        user, answer = pick_entry(rng, "weather")
        question = pick(rng, "weather_ask")
    elif topic == 1:
        user, answer = pick_entry(rng, "asked")
        question = pick(rng, "asked_back")
    else:
        section, talk = ("hobbies", "likes") if topic == 2 else ("foods", "food")
        thing = pick(rng, section)
        user = pick(rng, f"{talk}_say").format(x=thing)
        answer = pick(rng, f"{talk}_back").format(x=thing, X=upper_first(thing))
        question = pick(rng, f"{talk}_ask")
    return exact("small_talk", (user, f"{answer} {question}"))
