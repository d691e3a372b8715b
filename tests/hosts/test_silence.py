"""When another host's system counts as gone: by what it acknowledges, and by nothing that this side did not see."""

from __future__ import annotations

from tripool.hosts.silence import Silence

LOOK_S, TRIP_S = 0.02, 0.001


def gone_after(silence: Silence, start_s: float, acknowledged_s: float, trip_s: float = TRIP_S) -> float | None:
    """Looks in even steps at a connection on which nothing is acknowledged any more; None: it is not given up."""
    for step in range(1, 100):
        passed_s = step * LOOK_S
        if silence.look(1, acknowledged_s + passed_s, trip_s, start_s + passed_s):
            return passed_s
    return None


def test_a_system_that_acknowledges_nothing_is_gone_within_a_third_of_a_second() -> None:
    silence = Silence()
    assert not silence.look(0, 0.0, TRIP_S, 0.0)
    found = gone_after(silence, 0.0, 0.0)
    assert found is not None and 0.25 < found < 0.33
    slow = gone_after(Silence(), 0.0, 0.5, trip_s=0.3)
    assert slow is not None and slow > 0.8, "a long way takes as long as it takes"


def test_idle_connections_and_slow_processes_are_not() -> None:
    silence = Silence()
    for step in range(500):
        now_s = step * LOOK_S
        assert not silence.look(0, now_s, TRIP_S, now_s), "nothing is under way"
    # A message after a long rest: its acknowledgement is delayed as long as a system may.
    for step in range(10):
        assert not silence.look(1, 10.0 + step * LOOK_S, TRIP_S, 10.0 + step * LOOK_S)
    # Always something under way, and acknowledged now and then.
    for step in range(500):
        assert not silence.look(3, step % 8 * LOOK_S, TRIP_S, 10.2 + step * LOOK_S)


def test_time_in_which_this_side_did_not_run_says_nothing() -> None:
    silence = Silence()
    assert not silence.look(0, 0.0, TRIP_S, 0.0)
    for number in range(1, 5):
        assert not silence.look(1, 60.0, TRIP_S, number * 60.0), "it may have been sent a moment ago"
    assert not silence.look(1, 0.001, TRIP_S, 240.1)
    found = gone_after(silence, 240.1, 0.1)
    assert found is not None and found > 0.25
