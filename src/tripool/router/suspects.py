"""Requests that a worker was computing when it crashed, until they have shown that it was not their doing. Pure.

One of them may be what the worker crashed of, and would be again: the same request gives the same tokens anywhere. So
each is placed again, but beside nobody who has just begun, and nobody joins it before it has come a few tokens further.
Who has not when a second worker crashes is guilty and not placed a third time; those that only stood beside it at the
first crash go on. A guilty one therefore costs two workers, and costs no other request its answer.

It is evidence, not proof: where two requests are guilty at once and one of them strikes late in its answer, a suspect
beside it may be taken for it. Who computed instead of answering, or ran out of memory, has crashed as well (see
`control.evidence`); a worker that was killed from outside, or was stopped, says nothing about its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tripool.messages import WorkerId
from tripool.router.ledger import ChoiceState, Entry

MAX_CRASHES = 2
"""Workers that may crash with one request on them."""
_PROOF_TOKENS = 4
"""So many tokens further, from a decode worker, and it is none any more: the token that came next is long past."""


class Suspects:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def accuse(self, computed: Mapping[str, tuple[Entry, Iterable[int]]]) -> list[Entry]:
        """A worker crashed: by request, the choices that it was computing. Returns the requests that are guilty."""
        guilty = []
        for request_id, (entry, indices) in computed.items():
            choices = [entry.choices[index] for index in indices]
            entry.num_crashes += 1
            proved_nothing = any(choice.proof_tokens is not None for choice in choices)
            if entry.num_crashes >= MAX_CRASHES and (proved_nothing or len(computed) == 1):
                guilty.append(entry)
            for choice in choices:
                choice.proof_tokens = len(choice.tokens) + _PROOF_TOKENS
            self._entries[request_id] = entry
        return guilty

    def came_further(self, entry: Entry, choice: ChoiceState, *, done: bool) -> bool:
        """A decode worker has given a token of it. Whether that may open a worker to others."""
        if not self._entries:
            return False
        if choice.proof_tokens is None:
            return done or len(choice.tokens) == _PROOF_TOKENS
        if len(choice.tokens) < choice.proof_tokens and not done:
            return False
        choice.proof_tokens = None
        if all(other.proof_tokens is None for other in entry.choices):
            self.forget(entry)
        return True

    def forget(self, entry: Entry) -> None:
        self._entries.pop(entry.request.id, None)

    def closed_to(self, entry: Entry, everyone: Iterable[Entry]) -> set[WorkerId]:
        """Workers where another one has yet to show what it does: a suspect, or, for a suspect, whoever has just begun.

        Nobody overtakes one that waits for such a worker, so there it is soon the only one."""
        if not self._entries:
            return set()
        wary = entry.request.id in self._entries
        return {
            placement.worker_id
            for other in (everyone if wary else self._entries.values())
            if other is not entry
            for placement in other.placements.values()
            if any(_unproven(other.choices[index], wary) for index in placement.choices)
        }

    def check(self, entries: Iterable[Entry]) -> None:
        found = {e.request.id for e in entries if any(c.proof_tokens is not None for c in e.choices)}
        assert found == self._entries.keys(), "a suspect is forgotten, or is none"


def _unproven(choice: ChoiceState, wary: bool) -> bool:
    return choice.proof_tokens is not None or (wary and len(choice.tokens) < _PROOF_TOKENS)
