"""A sentence said another way, as asked: another tense, a question, fewer words, more politely. Exact."""

from __future__ import annotations

from random import Random

from tiny.distil.lists import pick, pick_entry, pick_name, upper_first
from tiny.distil.script import Script, exact


def rewrite(rng: Random) -> Script:
    if rng.random() < 0.25:
        asked = pick(rng, "requests")
        polite = rng.choice(
            (f"Could you please {asked}?", f"Would you please {asked}?", f"Please {asked}, if you can.")
        )
        user = rng.choice(("Make this more polite: {}", "Say this politely: {}", "Rewrite this in a friendly way: {}"))
        return exact("rewrite", (user.format(f"{upper_first(asked)}!"), polite))
    (name, pronoun), (base, third, past) = pick_name(rng), pick_entry(rng, "verbs")
    what, when = pick(rng, "verb_objects"), pick(rng, "times")
    now = f"{name} {third} {what} {when}."
    changes = {
        "in the past tense": f"{name} {past} {what} {when}.",
        "in the future tense": f"{name} will {base} {what} {when}.",
        "as a question": f"Does {name} {base} {what} {when}?",
        "as a negative sentence": f"{name} does not {base} {what} {when}.",
        "in fewer words": f"{name} {third} {what}.",
        f"with '{pronoun}' instead of the name": f"{upper_first(pronoun)} {third} {what} {when}.",
        "with the time first": f"{upper_first(when)}, {name} {third} {what}.",
    }
    how = rng.choice(list(changes))
    user = rng.choice(
        (
            "Write this {how}: {now}",
            "Rewrite {how}: {now}",
            "Please put this {how}: {now}",
            "{now} Write it {how}.",
            "Can you write this sentence {how}? {now}",
        )
    )
    return exact("rewrite", (user.format(how=how, now=now), changes[how]))
