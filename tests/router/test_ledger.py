"""The ledger by itself: deadlines that move, and the invariants it holds itself to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tripool.core import TokenEvent
from tripool.messages import KvDescriptor
from tripool.router.ledger import Entry, Gap, Lease, Ledger, Stage

from .acting import D0, P0, ask


def opened(n: int = 1) -> tuple[Ledger, Entry]:
    ledger = Ledger()
    entry = ledger.open(ask(n=n), 0.0)
    for choice in entry.choices:
        ledger.move(entry, choice, Stage.QUEUED, 0.0, 10.0)
    ledger.check()
    return ledger, entry


def decoding() -> tuple[Ledger, Entry]:
    ledger, entry = opened()
    (choice,) = entry.choices
    ledger.place(entry, [choice], Stage.PREFILLING, P0, 5, 0.0, 10.0)
    ledger.lift(entry, choice)
    ledger.hold(entry, choice, Lease(P0, 1, 3, KvDescriptor("a", b""), 60.0))
    ledger.move(entry, choice, Stage.PACKED, 0.0, 10.0)
    ledger.place(entry, [choice], Stage.TRANSFERRING, D0, 5, 0.0, 10.0)
    ledger.let_go(choice)
    ledger.move(entry, choice, Stage.DECODING, 0.0, 10.0)
    ledger.check()
    return ledger, entry


def test_a_deadline_that_moves_away_is_met_once_and_in_time() -> None:
    ledger, entry = decoding()
    (choice,) = entry.choices
    for index in range(50):
        taken = ledger.take(entry, choice, TokenEvent("r", 0, index, 7), float(index), 10.0)
        assert isinstance(taken, TokenEvent)
        assert not list(ledger.overdue(float(index)))
    assert not list(ledger.overdue(58.9))
    assert list(ledger.overdue(59.0)) == [(entry, choice)]
    assert not list(ledger.overdue(59.0))


def test_a_deadline_that_comes_nearer_is_met_too() -> None:
    ledger, entry = opened()
    ledger.move(entry, entry.choices[0], Stage.RESTING, 1.0, 0.5)
    assert list(ledger.overdue(1.4)) == []
    assert list(ledger.overdue(1.5)) == [(entry, entry.choices[0])]


def test_a_token_is_taken_once_and_in_order() -> None:
    ledger, entry = decoding()
    (choice,) = entry.choices
    event = TokenEvent("r", 0, 0, 7)
    assert ledger.take(entry, choice, event, 0.0, 1.0) is event
    assert ledger.take(entry, choice, event, 0.0, 1.0) is None
    assert isinstance(ledger.take(entry, choice, TokenEvent("r", 0, 2, 7), 0.0, 1.0), Gap)
    assert choice.tokens == [7] and ledger.num_dropped == 2


def test_a_closed_request_leaves_nothing() -> None:
    ledger, entry = opened(n=3)
    for choice in entry.choices:
        ledger.move(entry, choice, Stage.DONE, 0.0, 0.0)
    assert entry.num_open == 0
    ledger.close(entry)
    assert len(ledger) == 0 and not list(ledger.overdue(100.0))


def forget_placement(ledger: Ledger, entry: Entry) -> None:
    entry.placements.clear()


def keep_lease(ledger: Ledger, entry: Entry) -> None:
    ledger._leases[P0] = {3: ("r", 0)}


def wrong_stage(ledger: Ledger, entry: Entry) -> None:
    entry.choices[0].stage = Stage.QUEUED


def miscount(ledger: Ledger, entry: Entry) -> None:
    entry.num_open += 1


def lose_alarm(ledger: Ledger, entry: Entry) -> None:
    entry.choices[0].alarm_s = None


@pytest.mark.parametrize("damage", [forget_placement, keep_lease, wrong_stage, miscount, lose_alarm])
def test_check_sees(damage: Callable[[Ledger, Entry], None]) -> None:
    ledger, entry = decoding()
    damage(ledger, entry)
    with pytest.raises(AssertionError):
        ledger.check()
