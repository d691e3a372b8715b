"""Kept answers in the coordinator's log: what is new of them, and what all of it adds up to at a standby. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tripool.router.held import Progress
from tripool.router.kept import KeptAnswers
from tripool.router.kept_types import Kept, KeptState, Name, Part, PartState


def news(answers: KeptAnswers, *, everything: bool = False) -> tuple[KeptState, ...]:
    """Since the last call; `everything` is for one who knows nothing, and changes nothing for the others."""
    if everything:
        return tuple(_state(kept, everything=True) for kept in answers)
    changed, answers.changed = answers.changed, {}
    found = [kept for name in changed if (kept := answers.get(name)) is not None]
    return tuple(_state(kept) for kept in found)


def _state(kept: Kept, *, everything: bool = False) -> KeptState:
    parts = tuple(_part(part, everything) for _, part in sorted(kept.parts.items()))
    return KeptState(kept.keyed, kept.tenant, kept.model, parts, kept.num_counts, kept.dropped)


def _part(part: Part, everything: bool) -> PartState:
    lengths = part.progress.lengths
    logged = part.logged if part.logged is not None and not everything else (0,) * len(lengths)
    known = tuple(map(min, logged, lengths))  # a reader may have found an end before the last token
    is_new = everything or part.logged is None or part.resubmitted
    state = PartState(
        part.place, part.request_id, part.request if is_new else None, part.request is None, known,
        part.progress.held(known), part.num_prompt, part.num_made, part.counted_tokens, part.prompt_counted,
    )  # fmt: skip
    if not everything:
        part.logged, part.resubmitted = lengths, False
    return state


class KeptReplica:
    """The sum of all that was said."""

    def __init__(self) -> None:
        self._states: dict[Name, KeptState] = {}
        """Without tokens."""
        self._progress: dict[tuple[Name, int], Progress] = {}

    def apply(self, states: Iterable[KeptState], removed: Iterable[Name]) -> None:
        for name in removed:
            self._forget(name)
        for state in states:
            name = state.tenant.name, state.keyed.name
            known = self._states.get(name)
            if known is not None and known.keyed.answer != state.keyed.answer:
                self._forget(name)
            before = {part.place: part.request for part in known.parts} if name in self._states and known else {}
            parts = []
            for part in state.parts:
                if self._add(name, part):
                    request = None if part.over else part.request or before.get(part.place)
                    parts.append(replace(part, request=request))
            self._states[name] = replace(state, parts=tuple(parts))

    def _add(self, name: Name, part: PartState) -> bool:
        progress = self._progress.get((name, part.place))
        if not any(part.since):  # all that there is
            progress = self._progress[name, part.place] = Progress(len(part.held.choices), keeps_scores=True)
        if progress is None:
            return False  # its beginning was said to another one
        ends = tuple(first + len(choice.tokens) for first, choice in zip(part.since, part.held.choices, strict=True))
        if any(map(lambda length, end: length > end, progress.lengths, ends)):
            progress.stop(ends)
        progress.add(part.held, part.since)
        return True

    def _forget(self, name: Name) -> None:
        state = self._states.pop(name, None)
        for part in state.parts if state is not None else ():
            self._progress.pop((name, part.place), None)

    @property
    def states(self) -> tuple[KeptState, ...]:
        """Whole."""
        found = []
        for name, state in self._states.items():
            parts = [self._whole(part, self._progress[name, part.place]) for part in state.parts]
            found.append(replace(state, parts=tuple(parts)))
        return tuple(found)

    def _whole(self, part: PartState, progress: Progress) -> PartState:
        held = progress.held()
        return replace(part, since=(0,) * len(held.choices), held=held)


def restore(answers: KeptAnswers, states: Iterable[KeptState], now_s: float) -> None:
    """What was dropped is known to its readers alone."""
    for state in states:
        if state.dropped:
            continue
        kept = Kept(state.keyed, state.tenant, state.model, num_counts=state.num_counts)
        for told in state.parts:
            progress = Progress(len(told.held.choices), keeps_scores=True)
            progress.add(told.held)
            going_on = told.request is not None and not told.over and not progress.done
            kept.parts[told.place] = Part(
                kept, told.place, told.request_id, told.request if going_on else None, progress, told.num_prompt,
                resumes=going_on, num_made=max(told.num_made, told.counted_tokens),
                counted_tokens=told.counted_tokens, prompt_counted=told.prompt_counted,
            )  # fmt: skip
        answers.restore(kept, now_s)
