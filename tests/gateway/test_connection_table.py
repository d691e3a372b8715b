"""Who has to go when there are too many connections."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.gateway.connection_table import ConnectionTable


def test_the_unknown_go_first_then_the_oldest_and_those_who_work_never():
    table: ConnectionTable[str] = ConnectionTable(1)
    table.waits("idle", known=True)
    assert table.superfluous() is None
    table.waits("half a head", known=False)
    table.waits("newer", known=False)
    table.works("working")
    gone = []
    while (victim := table.superfluous()) is not None:
        gone.append(victim)
        table.closed(victim)
    assert gone == ["half a head", "newer", "idle"]
    table.works("another")
    assert table.superfluous() is None, "nobody may be ended"
    assert len(table) == 2


steps = st.tuples(st.sampled_from(["knock", "known", "work", "close"]), st.integers(0, 9))


@given(st.integers(1, 4), st.lists(steps, max_size=60))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_there_are_never_more_than_may_be_unless_all_work(max_open, script):
    table: ConnectionTable[int] = ConnectionTable(max_open)
    states: dict[int, str] = {}
    for what, connection in script:
        if what == "close":
            table.closed(connection)
            states.pop(connection, None)
        else:
            table.works(connection) if what == "work" else table.waits(connection, known=what == "known")
            states[connection] = what
        while (victim := table.superfluous()) is not None:
            assert states[victim] == "knock" or (states[victim] == "known" and "knock" not in states.values())
            table.closed(victim)
            del states[victim]
        assert len(table) == len(states)
        assert len(states) <= max_open or set(states.values()) == {"work"}
