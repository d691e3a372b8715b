"""Shares of a link: in virtual time, over a link that serves what it is given in order."""

from __future__ import annotations

import random

import pytest

from tripool.hosts.traffic import SHARES, BulkWindow, LinkSchedule, Traffic

MEMORY, SERVICE, TRANSFER = Traffic.MEMORY, Traffic.SERVICE, Traffic.TRANSFER


class ModelledLink:
    """Carries `rate` bytes a second, after a queue; sources have as much to send as their class may."""

    def __init__(self, rate: float) -> None:
        self.rate, self.schedule, self.now_s, self.free_s = rate, LinkSchedule(), 0.0, 0.0
        self.sent = dict.fromkeys(Traffic, 0)

    def run(self, sending: set[Traffic], seconds: float) -> None:
        until_s = self.now_s + seconds
        for traffic in sending:
            self.schedule.begin(traffic, self.now_s)
        while self.now_s < until_s:
            if self.free_s > self.now_s + 1e-3:  # the system takes no more now
                self.now_s = self.free_s - 1e-3
                continue
            chunk, waits = self.schedule.chunk_bytes, []
            # The one that may send and comes last in precedence: the schedule, not the order of asking, must hold.
            for traffic in sorted(sending, key=list(Traffic).index, reverse=True):
                wait_s = self.schedule.wait_s(traffic, chunk, self.now_s)
                if not wait_s:
                    self.schedule.sent(traffic, chunk, self.now_s)
                    self.sent[traffic] += chunk
                    self.free_s = max(self.free_s, self.now_s) + chunk / self.rate
                    break
                waits.append(wait_s)
            else:
                self.now_s += min(waits)
            self.schedule.check()
        for traffic in sending:
            self.schedule.end(traffic, self.now_s)


@pytest.mark.parametrize("rate", [1.25e6, 125e6, 5e9])
@pytest.mark.parametrize(
    "sending", [{TRANSFER}, {MEMORY, TRANSFER}, {SERVICE, TRANSFER}, {MEMORY, SERVICE}, set(Traffic)]
)
def test_every_class_gets_its_share_and_the_link_is_full(rate: float, sending: set[Traffic]) -> None:
    link = ModelledLink(rate)
    link.run({TRANSFER}, 2.0)  # what the link carries is known then
    assert link.schedule.bytes_per_s == pytest.approx(rate, rel=0.1) or rate < 2e6, "chunks of such a link are long"
    before = dict(link.sent)
    link.run(sending, 4.0)
    got = {traffic: link.sent[traffic] - before[traffic] for traffic in sending}
    assert sum(got.values()) >= 0.97 * rate * 4
    for traffic in sending:
        assert got[traffic] >= 0.9 * SHARES[traffic] * rate * 4, (traffic, got)
    first = min(sending, key=list(Traffic).index)
    others = sum(SHARES[traffic] for traffic in sending - {first})
    assert got[first] >= 0.9 * (1 - others) * rate * 4, "what nobody is guaranteed goes to the first in precedence"


def test_what_the_system_still_has_to_send_counts() -> None:
    schedule = LinkSchedule()
    schedule.begin(MEMORY, 1.0)
    schedule.end(MEMORY, 1.0, num_left=12_500_000)  # a tenth of a second at the first guess
    schedule.sent(TRANSFER, schedule.chunk_bytes, 1.0)
    assert schedule.wait_s(TRANSFER, schedule.chunk_bytes, 1.001) > 0
    assert schedule.wait_s(TRANSFER, schedule.chunk_bytes, 1.11) == 0
    assert schedule.wait_s(MEMORY, 2**20, 1.001) == 0


def test_a_short_read_has_the_link_to_itself_and_a_long_one_does_not() -> None:
    """KV that had the whole link waits out a cache read of 10 ms; one of a second leaves it its share."""
    link = ModelledLink(125e6)
    link.run({TRANSFER}, 2.0)
    before = link.sent[TRANSFER]
    link.run({MEMORY, TRANSFER}, 0.01)
    assert link.sent[TRANSFER] == before
    link.run({TRANSFER}, 0.1)
    before = link.sent[TRANSFER]
    link.run({MEMORY, TRANSFER}, 1.0)
    assert link.sent[TRANSFER] - before >= 0.9 * SHARES[TRANSFER] * 125e6


def test_any_order_of_events_keeps_the_invariants() -> None:
    for seed in range(50):
        rng, schedule, now_s = random.Random(seed), LinkSchedule(), 0.0
        open_: list[Traffic] = []
        for _ in range(300):
            now_s += rng.choice((0.0, 1e-5, 1e-3, 0.3))
            traffic = rng.choice(list(Traffic))
            match rng.randrange(4):
                case 0:
                    schedule.begin(traffic, now_s)
                    open_.append(traffic)
                case 1 if open_:
                    schedule.end(open_.pop(rng.randrange(len(open_))), now_s, rng.randrange(10**6))
                case 2:
                    schedule.sent(traffic, rng.randrange(2**20), now_s)
                case _:
                    wait_s = schedule.wait_s(traffic, rng.randrange(1, 2**20), now_s)
                    assert wait_s >= 0 and (traffic is not MEMORY or not wait_s)
            schedule.check()


@pytest.mark.parametrize(("rate", "trip_s"), [(125e6, 1e-4), (1.25e9, 1e-4), (125e6, 0.05)])
def test_a_window_fills_the_link_and_hardly_more(rate: float, trip_s: float) -> None:
    """The round trip grows by what is in the queue."""
    window, now_s, trips = BulkWindow(), 0.0, []
    for _ in range(300):
        round_trip_s = max(trip_s, window.num_bytes / rate)
        now_s += round_trip_s
        window.heard(round_trip_s * 1e6, trip_s * 1e6, now_s)
        trips.append((window.num_bytes, round_trip_s))
    for num_bytes, round_trip_s in trips[-50:]:
        assert num_bytes >= rate * trip_s, "the link never waits for bytes"
        assert round_trip_s - trip_s <= 1e-3, "what is sent next does not wait long"


def test_a_link_with_little_to_do_is_not_taken_for_a_slow_one() -> None:
    """Answers without a block have no bytes: for five seconds of them the best rate would be 0."""
    link = LinkSchedule()
    for number in range(100):
        link.begin(Traffic.MEMORY, number / 10)
        link.sent(Traffic.MEMORY, 0, number / 10)
        link.end(Traffic.MEMORY, number / 10, num_left=0)
    link.begin(Traffic.TRANSFER, 10.0)
    link.end(Traffic.TRANSFER, 10.0, num_left=2**20)
    assert link.bytes_per_s >= 1e6
    link.check()
