"""Requests that a worker was computing when it crashed, until they are cleared of having caused the crash. Pure.

One of them may have caused the crash, and would again: the same request gives the same tokens anywhere. So each is
placed again, but not beside a request that has just begun, and no request joins it before it has made a few tokens. A
suspect that has not when a second worker crashes is guilty and fails; requests that were only beside it at the first
crash go on. So a guilty request costs two workers, and no other request its answer.

This is evidence, not proof: where two requests are guilty at once and one crashes its worker late in its answer, a
suspect beside it may be found guilty instead. A worker that hung in a computation or ran out of memory also counts as
crashed (see `control.evidence`); one that was killed or stopped from outside does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tripool.messages import WorkerId
from tripool.router.ledger import ChoiceState, Entry

MAX_CRASHES = 2
"""Workers that may crash while computing one request."""
_PROOF_TOKENS = 4
"""Tokens from a decode worker that clear a suspect: it is then well past the token at the time of the crash."""


class Suspects:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def accuse(self, computed: Mapping[str, tuple[Entry, Iterable[int]]]) -> list[Entry]:
        """A worker crashed. `computed`: the choices it was computing, by request. Returns the guilty requests."""
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
        """A decode worker made a token of it. Returns whether that may open a worker to other requests."""
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
        """Workers with a request that has yet to be cleared: a suspect, or, for a suspect, any that has just begun.

        No request overtakes one that waits for such a worker, so that worker is soon free of others."""
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
        assert found == self._entries.keys(), "suspects are miscounted"


def _unproven(choice: ChoiceState, wary: bool) -> bool:
    return choice.proof_tokens is not None or (wary and len(choice.tokens) < _PROOF_TOKENS)
