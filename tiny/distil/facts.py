"""Small questions with known answers: capitals, colors, yes and no, opposites, lists of things."""

from __future__ import annotations

from random import Random

from tiny.distil.lists import pick, pick_entry, sections, upper_first, with_article, words
from tiny.distil.script import Script, exact
from tiny.distil.sums import in_words


def fact(rng: Random) -> Script:
    kinds = (_capital, _can_fly, _can_swim, _legs, _color, _bigger, _belongs, _opposite, _synonym, _list_of, _list_of)
    return rng.choice(kinds)(rng)


def _capital(rng: Random) -> Script:
    country, city = pick_entry(rng, "countries")
    named = upper_first(country)
    if rng.random() < 0.3:
        other = pick_entry(rng, "countries")[1] if rng.random() < 0.5 else city
        right = other == city
        answer = f"Yes, {city} is the capital of {country}." if right else f"No, the capital of {country} is {city}."
        return exact("fact", (f"Is {other} the capital of {country}?", answer))
    user = rng.choice(
        (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"{named}'s capital?",
            f"capital of {country}",
        )
    )
    return exact(
        "fact",
        (
            user,
            rng.choice(
                (f"The capital of {country} is {city}.", f"It is {city}.", f"{city} is the capital of {country}.")
            ),
        ),
    )


def _yes_no(rng: Random, subject: str, verb: str, yes: bool) -> tuple[str, str]:
    ask = rng.choice((f"Can {subject} {verb}?", f"Is {subject} able to {verb}?", f"Yes or no: can {subject} {verb}?"))
    return ask, f"Yes, {subject} can {verb}." if yes else f"No, {subject} cannot {verb}."


def _can_fly(rng: Random) -> Script:
    yes = rng.random() < 0.5
    section = rng.choice(("birds", "insects")) if yes else rng.choice(("animals", "sea_animals", "furniture"))
    thing = pick(rng, section)
    if thing in ("ant", "cricket"):
        thing = "bee"
    return exact("fact", _yes_no(rng, with_article(thing), "fly", yes))


def _can_swim(rng: Random) -> Script:
    yes = rng.random() < 0.6
    thing = pick(rng, "sea_animals" if yes else rng.choice(("furniture", "tools", "instruments", "clothes")))
    return exact("fact", _yes_no(rng, with_article("whale" if thing == "starfish" else thing), "swim", yes))


def _legs(rng: Random) -> Script:
    animal, count = pick_entry(rng, "legs")
    return exact(
        "fact",
        (f"How many legs does {with_article(animal)} have?", f"{upper_first(with_article(animal))} has {count} legs."),
    )


def _color(rng: Random) -> Script:
    thing, color = pick_entry(rng, "color_of")
    user = rng.choice((f"What color is {thing}?", f"Which color does {thing} have?", f"Tell me the color of {thing}."))
    return exact("fact", (user, f"{upper_first(thing)} is {color}."))


def _bigger(rng: Random) -> Script:
    sizes = words("sizes")
    small, large = sorted(rng.sample(range(len(sizes)), k=2))
    a, b = (small, large) if rng.random() < 0.5 else (large, small)
    word, winner, loser = ("bigger", large, small) if rng.random() < 0.6 else ("smaller", small, large)
    user = rng.choice((f"Which is {word}, {sizes[a]} or {sizes[b]}?", f"What is {word}: {sizes[a]} or {sizes[b]}?"))
    return exact("fact", (user, f"{upper_first(sizes[winner])} is {word} than {sizes[loser]}."))


GROUPS = {
    "fruits": "a fruit",
    "vegetables": "a vegetable",
    "birds": "a bird",
    "insects": "an insect",
    "sports": "a sport",
    "instruments": "a musical instrument",
    "tools": "a tool",
    "flowers": "a flower",
    "colors": "a color",
    "vehicles": "a vehicle",
    "jobs": "a job",
}
APART = ("birds", "sports", "instruments", "tools", "vehicles", "jobs")
"""Groups that share no word, so that a "no" is true."""


def _belongs(rng: Random) -> Script:
    if rng.random() < 0.5:
        section = rng.choice(list(GROUPS))
        thing = pick(rng, section)
        group = GROUPS[section]
        name = thing if section in ("sports", "colors") else with_article(thing)
        return exact("fact", (f"Is {name} {group}?", f"Yes, {name} is {group}."))
    section, other = rng.sample(APART, k=2)
    thing = pick(rng, section)
    name = thing if section == "sports" else with_article(thing)
    answer = f"No, {name} is not {GROUPS[other]}. It is {GROUPS[section]}."
    return exact("fact", (f"Is {name} {GROUPS[other]}?", answer))


def _opposite(rng: Random) -> Script:
    pair = pick_entry(rng, "opposites")
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    user = rng.choice(
        (
            f"What is the opposite of {a}?",
            f"What is the opposite of '{a}'?",
            f"Opposite of {a}?",
            f"Give me the opposite of the word {a}.",
            f"Which word means the opposite of {a}?",
        )
    )
    return exact("words", (user, rng.choice((f"The opposite of {a} is {b}.", f"It is {b}.", f"{upper_first(b)}."))))


def _synonym(rng: Random) -> Script:
    a, b = pick_entry(rng, "synonyms")
    user = rng.choice(
        (
            f"What is another word for {a}?",
            f"Give me a synonym for {a}.",
            f"Which word means the same as {a}?",
            f"Say '{a}' with another word.",
        )
    )
    return exact(
        "words", (user, rng.choice((f"Another word for {a} is {b}.", f"{upper_first(b)}.", f"You can say {b}.")))
    )


LISTED = {
    "fruits": "fruits",
    "vegetables": "vegetables",
    "animals": "animals",
    "birds": "birds",
    "colors": "colors",
    "jobs": "jobs",
    "sports": "sports",
    "instruments": "musical instruments",
    "tools": "tools",
    "clothes": "pieces of clothing",
    "furniture": "pieces of furniture",
    "flowers": "flowers",
    "trees": "trees",
    "vehicles": "vehicles",
    "insects": "insects",
    "sea_animals": "animals that live in the sea",
    "school_subjects": "school subjects",
    "countries": "countries",
    "cities": "cities",
    "planets": "planets",
    "rooms": "rooms in a house",
    "drinks": "drinks",
    "hobbies": "hobbies",
    "foods": "things to eat",
}


def _list_of(rng: Random) -> Script:
    section = rng.choice(list(LISTED))
    count = rng.randint(3, 6)
    chosen = rng.sample([entry[0] for entry in sections()[section]], k=count)
    number = rng.choice((in_words(count), in_words(count), str(count)))
    what = LISTED[section]
    user = rng.choice(
        (
            f"Name {number} {what}.",
            f"List {number} {what}.",
            f"Can you name {number} {what}?",
            f"Give me {number} {what}.",
            f"Tell me {number} {what}, please.",
            f"I need {number} {what}.",
        )
    )
    in_line = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
    numbered = "\n".join(f"{n}. {upper_first(word)}" for n, word in enumerate(chosen, 1))
    answer = rng.choice((upper_first(in_line) + ".", numbered, f"Here are {number} {what}: {in_line}.", numbered))
    return exact("list_exact", (user, answer))
