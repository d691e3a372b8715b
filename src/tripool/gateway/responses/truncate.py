"""Truncation: drops the oldest turns of a conversation that does not fit into the context. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Messages = Sequence[dict[str, Any]]


def turns(messages: Messages) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The leading system messages, which always stay, and the turns after them. A turn begins with a message of the
    user: a call and its result are never apart."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    grouped: list[list[dict[str, Any]]] = []
    for message in messages[first:]:
        if message["role"] == "user" or not grouped:
            grouped.append([])
        grouped[-1].append(message)
    return list(messages[:first]), grouped


def fitting(messages: Messages, fits: Callable[[Messages], bool]) -> Messages:
    """The longest end of the conversation that fits, with its system messages. If not even the last turn fits, that is
    returned: what refuses it names the sizes.

    `fits` renders and encodes, so it is asked as rarely as can be: about log2 of the number of turns.
    """
    if fits(messages):
        return messages
    kept, grouped = turns(messages)

    def from_turn(number: int) -> Messages:
        return [*kept, *(message for turn in grouped[number:] for message in turn)]

    low, high = 1, max(1, len(grouped) - 1)  # the answer is in low..high; `high` is taken as fitting
    while low < high:
        middle = (low + high) // 2
        if fits(from_turn(middle)):
            high = middle
        else:
            low = middle + 1
    return from_turn(high) if len(grouped) > 1 else messages
