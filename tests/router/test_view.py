"""The view of the fleet: who is next, and what it costs to find out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.messages import Life, Pulse
from tripool.router.view import FleetView

from .acting import D0, D1, P0, P1, hello


def fleet(role: str, count: int) -> FleetView:
    view = FleetView()
    for number in range(count):
        view.add(hello(Life(f"{role}-{number}", 1), "prefill" if role == "prefill" else "decode"), 0.0)
    return view


def test_equal_loads_take_turns() -> None:
    view = fleet("prefill", 5)
    picked: Counter[str] = Counter()
    for _ in range(50):
        member = view.pick_prefill(10, 10_000)
        assert member is not None
        picked[member.life.worker] += 1
        view.place(member.life, 10, 0.0)
    assert set(picked.values()) == {10}


def test_a_pulse_says_what_is_left_to_do() -> None:
    view = fleet("prefill", 2)
    view.place(P0, 1000, 0.0)
    view.place(P1, 100, 0.0)
    assert view.pick_prefill(1, 10_000).life == P1
    view.heard(Pulse(P0, 5, 20, 1, 3), 1.0)
    assert view.get(P0).load_tokens == 1000, "its last placement may have crossed the pulse"
    view.heard(Pulse(P0, 6, 20, 1, 3), 2.0)
    assert view.get(P0).load_tokens == 20
    assert view.pick_prefill(1, 10_000).life == P0
    view.take_off(P0, 1000)
    assert view.get(P0).load_tokens == 0, "never more than the ledger knows of"


def test_a_full_worker_takes_nothing_and_an_empty_one_anything() -> None:
    view = fleet("prefill", 1)
    assert view.pick_prefill(100_000, 1000) is not None
    view.place(P0, 900, 0.0)
    assert view.pick_prefill(100, 1000) is not None
    assert view.pick_prefill(101, 1000) is None


def test_decode_fills_by_share_of_memory() -> None:
    view = FleetView()
    view.add(hello(D0, "decode", kv_tokens=1000), 0.0)
    view.add(hello(D1, "decode", kv_tokens=3000), 0.0)
    for _ in range(4):
        member = view.pick_decode(500, P0)
        view.place(member.life, 500, 0.0, source=P0)
        view.transferred(P0, member.life)
    assert (view.get(D0).placed_tokens, view.get(D1).placed_tokens) == (500, 1500)
    view.place(D1, 1200, 0.0)
    view.place(D0, 400, 0.0)
    assert view.pick_decode(500, P0) is None


def test_transfers_are_spread_over_pairs() -> None:
    view = fleet("decode", 4)
    for _ in range(8):
        for source in (P0, P1):
            member = view.pick_decode(1, source)
            view.place(member.life, 1, 0.0, source=source)
    assert set(view._transfers.values()) == {2}


def test_avoided_only_while_there_is_another() -> None:
    view = fleet("prefill", 2)
    assert view.pick_prefill(1, 10, avoid=P0).life == P1
    view.drain(P1)
    assert view.pick_prefill(1, 10, avoid=P0).life == P0


def test_ten_thousand_workers_are_no_more_work_than_ten() -> None:
    """Counted, not timed: entries of the heap that one placement looks at."""
    looks = []
    for count in (10, 10_000):
        view = fleet("decode", count)
        heap = view._heaps["decode"]
        longest = 0
        for _ in range(200):
            member = view.pick_decode(50, P0)
            view.place(member.life, 50, 0.0, source=P0)
            view.take_off(member.life, 50)
            view.transferred(P0, member.life)
            longest = max(longest, len(heap))
        looks.append(longest - count)
        view.check({}, [])
    assert looks[1] <= 400, "outdated entries are swept before they pile up"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 500)), max_size=60))
def test_the_lightest_is_found_after_any_history(steps: list[tuple[int, int, int]]) -> None:
    view = fleet("prefill", 5)
    placed: dict[Life, list[int]] = {member.life: [] for member in view}
    drained: set[Life] = set()
    for kind, number, tokens in steps:
        life = Life(f"prefill-{number}", 1)
        if kind <= 2:
            view.place(life, tokens, 0.0)
            placed[life].append(tokens)
        elif kind == 3 and placed[life]:
            view.take_off(life, placed[life].pop())
        elif kind == 4:
            view.heard(Pulse(life, 1, tokens, 1, 1), 0.0)
        elif kind == 5 and len(drained) < 4:
            view.drain(life)
            drained.add(life)
        view.check({life: (len(held), sum(held)) for life, held in placed.items() if held}, [])
        ready = [member for member in view if not member.draining]
        picked = view.pick_prefill(0, 10**9)
        assert picked in ready and picked.load_tokens == min(member.load_tokens for member in ready)
