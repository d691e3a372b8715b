"""Who has to go when there are too many connections."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.gateway.connection_table import Claim, ConnectionTable


def test_the_unknown_go_first_then_the_oldest_and_those_that_are_claimed_never():
    table: ConnectionTable[str] = ConnectionTable(2)
    table.waits("claimed", known=True)
    assert table.claim("claimed", "alice") is Claim.GRANTED
    table.waits("idle", known=True)
    assert table.superfluous("idle") is None
    for name in ("half a head", "newer", "newest"):
        table.waits(name, known=False)
    table.works("newer")  # a request that is not claimed yet
    gone = []
    while (victim := table.superfluous("newest")) is not None:
        gone.append(victim)
        table.closed(victim)
    assert gone == ["half a head", "idle", "newer"]
    assert len(table) == 2


def test_a_new_connection_is_closed_only_if_no_other_can_be():
    table: ConnectionTable[str] = ConnectionTable(1)
    table.waits("idle", known=True)
    table.waits("newcomer", known=False)
    assert table.superfluous("newcomer") == "idle"
    assert table.claim("idle", "alice", sending=True) is Claim.GRANTED
    assert table.superfluous("newcomer") == "idle", "half a body is no reason either"
    table.works("idle")
    assert table.superfluous("newcomer") == "newcomer"


def take_all(table: ConnectionTable[str], tenant: str, **options: bool) -> int:
    """How many it gets before it is refused."""
    for number in count():
        table.waits(f"{tenant} {number}", known=True)
        if table.claim(f"{tenant} {number}", tenant, **options) is not Claim.GRANTED:
            table.closed(f"{tenant} {number}")
            return number
    raise AssertionError


def test_after_ten_have_taken_all_they_can_the_next_finds_something():
    table: ConnectionTable[str] = ConnectionTable(4096)
    got = [take_all(table, f"tenant {number}") for number in range(20)]
    assert got[0] == 4096 * 7 // 8 // 4
    assert got == sorted(got, reverse=True) and got[10] >= 50 and got[-1] >= 1
    assert sum(got) <= 4096 * 7 // 8
    table.closed("tenant 0 5")
    table.waits("again", known=True)
    assert table.claim("again", "tenant 0") is Claim.TENANT_FULL, "what it gave back is for tenants that have less"


def test_on_a_server_without_keys_all_but_the_reserve_can_be_claimed():
    assert take_all(ConnectionTable(350), "", shared=False) == 350 - 43
    assert take_all(ConnectionTable(1), "", shared=False) == 1


def test_what_is_gone_cannot_be_claimed():
    table: ConnectionTable[str] = ConnectionTable(8)
    table.waits("one", known=True)
    table.closed("one")
    assert table.claim("one", "alice") is Claim.ALL_FULL
    assert take_all(table, "alice") == 2


steps = st.tuples(st.sampled_from(["knock", "known", "work", "alice", "bob", "close"]), st.integers(0, 9))


@given(st.integers(1, 8), st.lists(steps, max_size=80))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_there_are_never_more_than_may_be_and_always_room_for_a_health_check(max_open, script):
    table: ConnectionTable[int] = ConnectionTable(max_open)
    states: dict[int, str] = {}
    for what, connection in script:
        if what == "close":
            table.closed(connection)
            states.pop(connection, None)
        elif what in ("alice", "bob"):
            before = states.get(connection)
            granted = table.claim(connection, what) is Claim.GRANTED
            assert before is not None or not granted
            if before is not None:
                states[connection] = what if granted else "known"
        else:
            table.works(connection) if what == "work" else table.waits(connection, known=what == "known")
            if what != "work" or states.get(connection) not in ("alice", "bob"):
                states[connection] = "known" if what == "work" else what
        while (victim := table.superfluous(connection)) is not None:
            assert states[victim] in ("knock", "known")
            assert (
                states[victim] == "knock" or {*states.values()} - {"alice", "bob"} == {"known"} or victim != connection
            )
            table.closed(victim)
            del states[victim]
        assert len(table) == len(states) <= max_open
        claimed = [state for state in states.values() if state in ("alice", "bob")]
        assert len(claimed) <= max(1, max_open - 1)
