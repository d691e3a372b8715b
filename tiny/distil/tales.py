"""Short stories of ours: a plot of some sentences, each said in one of several ways, about the hero that was asked for.

The teacher's stories wander and forget their hero; a small student needs some that begin, turn and end.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tiny.distil.lists import pick, sections, upper_first, with_article

PLOTS = ("tale_found", "tale_lost", "tale_learn", "tale_help", "tale_storm", "tale_share", "tale_truth", "tale_fear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hero:
    name: str
    pronoun: str
    trait: str
    kind: str
    place: str
    """With its preposition: "on the moon"."""
    thing: str

    @property
    def object_pronoun(self) -> str:
        return "her" if self.pronoun == "she" else "him"


def tell(rng: Random, hero: Hero) -> str:
    """Six to eight sentences that hold the hero's name."""
    (start,), (end,) = (sections()[name] for name in ("tale_start", "tale_end"))
    plot = sections()[rng.choice(PLOTS)]
    ways = [rng.choice(start), *(rng.choice(entry) for entry in plot), rng.choice(end)]
    friend = rng.choice([kind for kind in FRIENDS if kind != hero.kind])
    words = {
        "name": hero.name,
        "she": hero.pronoun,
        "friend": friend,
        "who": f"{with_article(hero.trait)} {hero.kind} named {hero.name}",
        "a_friend": with_article(friend),
        "a_hero": with_article(hero.kind),
        "trait": hero.trait,
        "place": hero.place,
        "thing": hero.thing,
        "skill": pick(rng, "skills"),
        "fear": pick(rng, "fears"),
    }
    words |= {upper_first(key): upper_first(value) for key, value in words.items()}
    possessive = "her" if hero.pronoun == "she" else "his"
    told = []
    for way in ways:
        filled = way
        for key, value in words.items():
            filled = filled.replace(f"{{{key}}}", value)
        told.append(_pronouns(filled, hero.object_pronoun, possessive))
    text = " ".join(told)
    assert "{" not in text, text
    return text


def _pronouns(text: str, object_: str, possessive: str) -> str:
    """`{her}` before a word that can be owned is a possessive, else an object: "{her} home", "thanked {her}"."""
    pieces = text.split("{her}")
    said = pieces[0]
    for piece in pieces[1:]:
        after = piece[1:].split(" ")[0].strip('.,!?"') if piece.startswith(" ") else ""
        said += (possessive if after in OWNED else object_) + piece
    return said


OWNED = frozenset(("own", "home", "heart", "hand", "door", "strength", "friend", "eyes", "lunch", "house", "window"))
FRIENDS = (
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "cat",
    "dog",
    "owl",
    "squirrel",
    "hedgehog",
    "turtle",
    "frog",
    "duck",
    "donkey",
    "crow",
    "sparrow",
    "snail",
    "goat",
    "sheep",
    "otter",
    "beaver",
    "badger",
    "mole",
    "deer",
    "swan",
)
