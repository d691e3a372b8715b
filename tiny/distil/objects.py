"""Sentences to be turned into JSON, with a schema or with the names of the keys; the answer is compact and exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tiny.distil.lists import pick, pick_name, with_article, words
from tiny.distil.script import Script, exact


def _person(rng: Random) -> tuple[str, dict[str, Any]]:
    name, _ = pick_name(rng)
    facts: dict[str, Any] = {
        "name": name,
        "age": rng.randint(5, 90),
        "city": pick(rng, "cities"),
        "job": pick(rng, "jobs"),
        "hobby": pick(rng, "hobbies"),
    }
    wanted = ["name", *rng.sample(["age", "city", "job", "hobby"], k=rng.randint(1, 3))]
    said = {
        "age": f"is {facts['age']} years old",
        "city": f"lives in {facts['city']}",
        "job": f"works as {with_article(facts['job'])}",
        "hobby": f"likes {facts['hobby']}",
    }
    parts = [said[key] for key in wanted[1:]]
    text = f"{name} " + (parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}") + "."
    return text, {key: facts[key] for key in wanted}


def _item(rng: Random) -> tuple[str, dict[str, Any]]:
    things, count, color = pick(rng, "small_things"), rng.randint(2, 40), pick(rng, "colors")
    item = {"item": things, "count": count, "color": color}
    return f"I bought {count} {color} {things}.", item


def _pet(rng: Random) -> tuple[str, dict[str, Any]]:
    pet, name, age = pick(rng, "pets"), pick(rng, "pet_names"), rng.randint(1, 14)
    return f"My {pet} {name} is {age} years old.", {"animal": pet, "name": name, "age": age}


def _flag(rng: Random) -> tuple[str, dict[str, Any]]:
    name, likes, food = pick_name(rng)[0], rng.random() < 0.5, pick(rng, "foods")
    return f"{name} {'likes' if likes else 'does not like'} {food}.", {"name": name, "food": food, "likes": likes}


def _list(rng: Random) -> tuple[str, dict[str, Any]]:
    name, fruit = pick_name(rng)[0], rng.sample(words("fruits"), k=rng.randint(2, 3))
    many = [with_article(one) for one in fruit]
    return f"{name} bought {', '.join(many[:-1])} and {many[-1]}.", {"name": name, "items": fruit}


def _type_of(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    return {"type": "array", "items": {"type": "string"}} if isinstance(value, list) else {"type": "string"}


def json_answer(rng: Random) -> Script:
    makers: tuple[Callable[[Random], tuple[str, dict[str, Any]]], ...] = (_person, _person, _item, _pet, _flag, _list)
    text, facts = rng.choice(makers)(rng)
    keys = ", ".join(facts)
    answer = json.dumps(facts, separators=(",", ":"))
    if rng.random() < 0.4:
        schema = {
            "type": "object",
            "properties": {key: _type_of(value) for key, value in facts.items()},
            "required": list(facts),
        }
        user = rng.choice(
            (
                "{text} Answer as JSON that fits this schema: {schema}",
                "Schema: {schema} Text: {text} JSON:",
                "Fill this JSON schema from the text. {schema} Text: {text}",
            )
        )
        return exact("json", (user.format(text=text, schema=json.dumps(schema, separators=(",", ":"))), answer))
    user = rng.choice(
        (
            "{text} Give me the {keys} as JSON.",
            "Extract {keys} as JSON: {text}",
            "{text} Answer in JSON with {keys}.",
            "Turn this into a JSON object with the keys {keys}: {text}",
            "Write JSON with {keys} for: {text}",
            "{text} Return only JSON with the keys {keys}.",
        )
    )
    system = rng.choice((None, None, None, "You answer in JSON only."))
    return exact("json", (user.format(text=text, keys=keys), answer), system=system)
