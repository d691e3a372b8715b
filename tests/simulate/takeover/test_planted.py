"""A test of the takeover simulation: bugs a tired person could write are found, by a rule that fits them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tripool.core import TokenEvent
from tripool.fabric import Link
from tripool.router.gateway_session import GatewaySession, OpenRequest, Resumption
from tripool.router.held import Held, HeldChoice, Progress
from tripool.router.kept import KeptAnswers
from tripool.router.kept_types import Part
from tripool.router.rate_limiter import RateLimiter
from tripool.router.sessions import Sessions
from tripool.simulate.takeover import simulate_takeovers
from tripool.simulate.takeover.coordinator import CoordinatorRun

NUM_SEEDS = 200

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, tuple[Plant, str]] = {}


def bug(found_by: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = plant, found_by
        return plant

    return register


@bug("believes epoch")
def a_gateway_believes_whoever_answers(patch: pytest.MonkeyPatch) -> None:
    welcomed = GatewaySession.welcomed

    def gullible(self: GatewaySession[Any], epoch: int) -> Any:
        self.epoch = min(self.epoch, epoch)
        return welcomed(self, epoch)

    patch.setattr(GatewaySession, "welcomed", gullible)


@bug("believes epoch")
def a_worker_obeys_whoever_answers(patch: pytest.MonkeyPatch) -> None:
    lose = Link._lose

    def forgetful(self: Link) -> None:
        lose(self)
        self._highest_epoch = 0

    patch.setattr(Link, "_lose", forgetful)


@bug("decides, though")
def a_leader_that_wakes_up_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CoordinatorRun, "_may_decide", lambda self: True)


@bug("hangs|without its gateway|without its answer")
def only_the_first_reader_gets_tokens(patch: pytest.MonkeyPatch) -> None:
    emit = Sessions._emit_kept

    def stingy(self: Sessions, part: Part, event: TokenEvent) -> None:
        readers = dict(part.readers)
        for reader_id in list(readers)[1:]:
            del part.readers[reader_id]
        emit(self, part, event)
        if part.readers:
            part.readers |= readers

    patch.setattr(Sessions, "_emit_kept", stingy)


@bug("hangs|one is lost or comes twice|a token was changed|tokens already|instead of")
def a_gateway_says_more_than_it_has(patch: pytest.MonkeyPatch) -> None:
    resumption = OpenRequest.resumption

    def boastful(self: OpenRequest[Any]) -> Resumption:
        told = resumption(self)
        choices = tuple(
            HeldChoice((*choice.tokens, 0), choice.finish) if choice.tokens and not choice.done else choice
            for choice in told.held.choices
        )
        return told._replace(held=Held(choices, told.held.num_cached_tokens))

    patch.setattr(OpenRequest, "resumption", boastful)


@bug("got .* requests through, and may")
def a_takeover_fills_every_bucket(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RateLimiter, "restore", lambda self, levels: None)


@bug("hangs")
def usage_is_said_to_one_gateway_alone(patch: pytest.MonkeyPatch) -> None:
    gone = Sessions.gone

    def forgetful(self: Sessions, line: bytes, now_s: float) -> Any:
        counts = dict(self.counts)
        out = gone(self, line, now_s)
        self.counts |= {name: kept for name, kept in counts.items() if name in self.counts}
        return out

    patch.setattr(Sessions, "gone", forgetful)


@bug("without its answer|without its gateway")
def readers_stay_when_an_answer_has_ended(patch: pytest.MonkeyPatch) -> None:
    def careless(self: KeptAnswers, part: Part) -> None:
        part.readers.clear()
        part.running, part.request = False, None
        self._resize(part.kept)
        self._settle(part.kept)

    patch.setattr(KeptAnswers, "ended", careless)


@bug("more is counted than was made|bytes are not|failed although there was capacity|instead of|computed by")
def a_log_that_brings_a_token_twice(patch: pytest.MonkeyPatch) -> None:
    add = Progress.add

    def stutter(self: Progress, held: Held, since: Any = None) -> bool:
        before = self.lengths
        fine = add(self, held, since)
        if since is not None and any(since) and self.lengths != before:
            for i, tokens in enumerate(self.tokens):
                if self._finish[i] is None and len(tokens) > before[i]:
                    tokens.append(tokens[-1])
        return fine

    patch.setattr(Progress, "add", stutter)


@bug("hangs")
def a_reader_that_joins_misses_a_token(patch: pytest.MonkeyPatch) -> None:
    """Of what there is already; without the one before, it asks for it again and again."""
    events = Progress.events
    patch.setattr(Progress, "events", lambda self, request_id: list(events(self, request_id))[:-1])


LATE = {"a_takeover_fills_every_bucket", "usage_is_said_to_one_gateway_alone", "a_log_that_brings_a_token_twice"}
"""Found after dozens of seeds: seconds each, which only `make prove` has."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.prove] * (n in LATE)) for n in PLANTS])
def test_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_by = PLANTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found_by):
        run_seeds()


def run_seeds() -> None:
    for seed in range(NUM_SEEDS):
        simulate_takeovers(seed)
