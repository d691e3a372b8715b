"""Questions for the teacher, asked barely and with a wish for a short answer: explanations, steps, lists, stories.

The student's document holds the question as a user would put it.
"""

from __future__ import annotations

import re
from random import Random

from tiny.distil.lists import lower_first, pick, pick_entry, pick_name, upper_first, with_article, words
from tiny.distil.script import BRIEF, FEW, SOME, STEPS, STORY, Script, Turn, exact
from tiny.distil.sums import in_words
from tiny.distil.tales import Hero, tell

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Tripool Tiny, a small assistant.",
    "You are a kind teacher for children.",
    "Use simple words.",
    "Be helpful and polite.",
    "Be friendly.",
    "You are a helpful, honest and friendly assistant.",
)
BRIEF_SYSTEMS = ("Answer briefly.", "Keep your answers short.", "Answer in one sentence.")


def maybe_system(rng: Random) -> str | None:
    return rng.choice(SYSTEMS) if rng.random() < 0.12 else None


def dressed(rng: Random, question: str) -> str:
    """As people ask: with a greeting before it, a wish after it, in lower case, or bare."""
    opening = pick(rng, "openings") if rng.random() < 0.5 else ""
    ending = pick(rng, "endings") if rng.random() < 0.5 else ""
    if opening:
        question = f"{opening} {lower_first(question) if opening.endswith(',') else question}"
    elif not ending and rng.random() < 0.08:
        question = lower_first(question).rstrip("?.")
    return question if not ending else f"{question} {ending}"


def question(rng: Random) -> str:
    """Something to explain in a few sentences."""
    kind = rng.random()
    if kind < 0.16:
        return f"Why {pick(rng, 'why')}?"
    if kind < 0.28:
        return f"How {pick(rng, 'how')}?"
    if kind < 0.31:
        return f"What would happen if {pick(rng, 'whatif')}?"
    if kind < 0.35:
        return pick(rng, "advice")
    thing, other = pick(rng, "things"), pick(rng, "things")
    if kind < 0.57:
        return pick(rng, "about_one").format(thing)
    if kind < 0.63:
        return f"Tell me about {thing}: {pick(rng, 'aspects')}."
    if kind < 0.67:
        return pick(rng, "about_two").format(thing, other)
    if kind < 0.86:
        return pick(rng, "about_topic").format(pick(rng, "topics"))
    return pick(rng, "about_many").format(pick(rng, "plurals"))


def explain(rng: Random) -> Script:
    asks = question(rng)
    if rng.random() < 0.04:
        turn = Turn(user=dressed(rng, asks), asked=f"{asks} {BRIEF}", max_tokens=60, min_words=5)
        return Script(kind="brief", turns=(turn,), system=rng.choice(BRIEF_SYSTEMS))
    return Script(kind="explain", turns=(question_turn(rng, asks),), system=maybe_system(rng))


def question_turn(rng: Random, asks: str) -> Turn:
    wish = rng.choice((FEW, SOME, SOME))
    return Turn(user=dressed(rng, asks), asked=f"{asks} {wish}", min_words=20, about=content_words(asks))


def content_words(question: str) -> tuple[str, ...]:
    """What a question is about, without the words that every question has."""
    plain = {*words("function_words"), *words("asking_words")}
    return tuple(word for word in re.findall(r"[a-z]{3,}", question.lower()) if word not in plain)


def how_to(rng: Random) -> Script:
    what = pick(rng, "howto")
    user, asks = dressed(rng, pick(rng, "how_to_asked").format(what)), f"How do I {what}?"
    about = content_words(what)
    if rng.random() < 0.5:
        turn = Turn(user=user, asked=f"{asks} {STEPS}", items=rng.randint(3, 5), min_words=15, about=about)
    else:
        turn = Turn(user=user, asked=f"{asks} {SOME}", min_words=15, about=about)
    return Script(kind="how_to", turns=(turn,), system=maybe_system(rng))


def list_of(rng: Random) -> Script:
    topic, count = pick(rng, "list_topics"), rng.randint(3, 5)
    number = rng.choice((in_words(count), str(count)))
    user = pick(rng, "list_asked").format(f"{number} {topic}")
    asks = f"Give me {in_words(count)} {topic}. Write a numbered list of short items."
    turn = Turn(user=dressed(rng, user), asked=asks, items=count, min_words=6)
    return Script(kind="list", turns=(turn,), system=maybe_system(rng))


def story_turn(rng: Random) -> tuple[Turn, Hero]:
    """Most stories are ours, some the teacher's."""
    name, pronoun = pick_name(rng)
    trait, kind, place, thing = (pick(rng, section) for section in ("traits", "heroes", "places", "objects"))
    hero = Hero(name=name, pronoun=pronoun, trait=trait, kind=kind, place=place, thing=thing)
    who = f"{with_article(hero.trait)} {hero.kind}"
    named = rng.choice((f"{who} named {name}", f"{who} called {name}", f"{name}, {who}", f"{name} the {hero.kind}"))
    ours = rng.random() < 0.7
    abouts = [f"{named}", f"{named} {hero.place}", f"{named} who lives {hero.place}", f"{named} and {hero.thing}"]
    if not ours:
        theme = pick(rng, "themes")
        abouts += [f"{named}. It is about {theme}", f"{named} and {theme}", f"{named} who finds {hero.thing}"]
    user = pick(rng, "tell_asked").format(rng.choice(abouts))
    if ours:
        return Turn(user=user, answer=tell(rng, hero)), hero
    turn = Turn(
        user=user,
        asked=f"{user} {STORY}",
        max_tokens=200,
        temperature=0.55,
        min_words=40,
        must_have=(name,),
        whole=True,
    )
    return turn, hero


def story(rng: Random) -> Script:
    turn, _ = story_turn(rng)
    return Script(kind="story", turns=(turn,), system=maybe_system(rng))


def feeling(rng: Random) -> Script:
    """Answers are ours: the teacher takes a sad user for a complaint to an office."""
    bad = rng.random() < 0.65
    why, comment, *advised = pick_entry(rng, "bad_news" if bad else "good_news")
    how = pick(rng, "bad_feelings" if bad else "good_feelings")
    what = upper_first(why)
    said = (
        f"I feel {how} because {why}.",
        f"I feel {how}. {what}.",
        f"{what}, and I feel {how}.",
        f"{what}.",
        f"{what}.",
    )
    if bad:
        first = pick(rng, "sorry") if rng.random() < 0.7 else ""
        parts = [first, comment, *advised, pick(rng, rng.choice(("comfort", "ask_back")))]
    else:
        parts = [pick(rng, "joy"), comment, pick(rng, "joy_more"), pick(rng, "joy_ask") if rng.random() < 0.6 else ""]
    asks = pick(rng, "bad_asks" if bad else "good_asks")
    user = " ".join(part for part in (rng.choice(("", "", "Hi.", "Hello.")), rng.choice(said), asks) if part)
    return exact("feeling", (user, " ".join(part for part in parts if part)), system=maybe_system(rng))


def advice(rng: Random) -> Script:
    return Script(kind="advice", turns=(question_turn(rng, pick(rng, "advice")),), system=maybe_system(rng))
