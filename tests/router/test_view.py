"""The view of the fleet: who is next, and what it costs to find out."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.messages import Heartbeat, WorkerId
from tripool.router.view import FleetView

from .acting import D0, D1, P0, P1, hello


def fleet(role: str, count: int) -> FleetView:
    view = FleetView()
    for number in range(count):
        view.add(hello(WorkerId(f"{role}-{number}", 1), "prefill" if role == "prefill" else "decode"), 0.0)
    return view


def test_equal_loads_are_round_robin() -> None:
    view = fleet("prefill", 5)
    picked: Counter[str] = Counter()
    for _ in range(50):
        member = view.pick_prefill(10, 10_000)
        assert member is not None
        picked[member.worker_id.name] += 1
        view.place(member.worker_id, 10, 0.0)
    assert set(picked.values()) == {10}


def test_a_pulse_says_what_is_left_to_do() -> None:
    view = fleet("prefill", 2)
    view.place(P0, 1000, 0.0)
    view.place(P1, 100, 0.0)
    assert view.pick_prefill(1, 10_000).worker_id == P1
    view.heard(Heartbeat(P0, 5, 20, 1, 3), 1.0)
    assert view.get(P0).load_tokens == 1000, "its last placement may have crossed the heartbeat"
    view.heard(Heartbeat(P0, 6, 20, 1, 3), 2.0)
    assert view.get(P0).load_tokens == 20
    assert view.pick_prefill(1, 10_000).worker_id == P0
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
        view.place(member.worker_id, 500, 0.0, source=P0)
        view.transferred(P0, member.worker_id)
    assert (view.get(D0).placed_tokens, view.get(D1).placed_tokens) == (500, 1500)
    view.place(D1, 1200, 0.0)
    view.place(D0, 400, 0.0)
    assert view.pick_decode(500, P0) is None


def test_transfers_are_spread_over_pairs() -> None:
    view = fleet("decode", 4)
    for _ in range(8):
        for source in (P0, P1):
            member = view.pick_decode(1, source)
            view.place(member.worker_id, 1, 0.0, source=source)
    assert set(view._transfers.values()) == {2}


def test_avoided_only_while_there_is_another() -> None:
    view = fleet("prefill", 2)
    assert view.pick_prefill(1, 10, avoid=P0).worker_id == P1
    view.drain(P1)
    assert view.pick_prefill(1, 10, avoid=P0).worker_id == P0


def test_ten_thousand_workers_are_no_more_work_than_ten() -> None:
    """Counted, not timed: entries of the sorted list, of which a placement looks at the first few."""
    for count in (10, 10_000):
        view = fleet("decode", count)
        for _ in range(200):
            member = view.pick_decode(50, P0)
            view.place(member.worker_id, 50, 0.0, source=P0)
            view.take_off(member.worker_id, 50)
            view.transferred(P0, member.worker_id)
            assert len(view._by_load["decode"]) == count, "no outdated entries"
            assert len(view.considered) <= 8
        view.check({}, [])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 500)), max_size=60))
def test_the_lightest_is_found_after_any_history(steps: list[tuple[int, int, int]]) -> None:
    view = fleet("prefill", 5)
    placed: dict[WorkerId, list[int]] = {member.worker_id: [] for member in view}
    drained: set[WorkerId] = set()
    for kind, number, tokens in steps:
        worker_id = WorkerId(f"prefill-{number}", 1)
        if kind <= 2:
            view.place(worker_id, tokens, 0.0)
            placed[worker_id].append(tokens)
        elif kind == 3 and placed[worker_id]:
            view.take_off(worker_id, placed[worker_id].pop())
        elif kind == 4:
            view.heard(Heartbeat(worker_id, 1, tokens, 1, 1), 0.0)
        elif kind == 5 and len(drained) < 4:
            view.drain(worker_id)
            drained.add(worker_id)
        view.check({worker_id: (len(held), sum(held)) for worker_id, held in placed.items() if held}, [])
        ready = [member for member in view if not member.draining]
        picked = view.pick_prefill(0, 10**9)
        assert picked in ready and picked.load_tokens == min(member.load_tokens for member in ready)


# ---- classes of promised time per token -----------------------------------------------------------------------------


def decoders(count: int, max_running: int = 32) -> FleetView:
    view = FleetView()
    for number in range(count):
        view.add(hello(WorkerId(f"decode-{number}", 1), "decode", kv_tokens=100_000, max_running=max_running), 0.0)
    return view


def put(view: FleetView, tpot_ms: float | None, tokens: int = 100) -> WorkerId:
    member = view.pick_decode(tokens, P0, tpot_ms=tpot_ms)
    assert member is not None
    view.place(member.worker_id, tokens, 0.0, P0, tpot_ms)
    view.transferred(P0, member.worker_id)
    return member.worker_id


def test_a_strict_answer_shrinks_no_large_batch_while_there_is_a_small_one() -> None:
    view = decoders(3)
    for _ in range(30):
        put(view, 50.0)
    strict = [put(view, 15.0) for _ in range(4)]
    assert len(set(strict)) == 1, "they share one batch"
    relaxed = [put(view, 50.0) for _ in range(6)]
    assert strict[0] not in relaxed, "a relaxed one leaves the small batch to those who need it"


def test_those_without_a_promise_stay_out_of_the_way_until_load_says_otherwise() -> None:
    view = decoders(2)
    strict = put(view, 15.0)
    others = [put(view, None) for _ in range(40)]
    assert strict not in others[:10]
    assert strict in others, "half a worker's load is more than a promise's worth"


def test_what_a_worker_can_bear_counts_as_its_size() -> None:
    view = decoders(2)
    for _ in range(4):
        view.place(D0, 100, 0.0, P0, 15.0)
        view.place(D1, 100, 0.0, P0, 15.0)
    view.heard(Heartbeat(D0, 1, 0, 4, 4, ceiling=3), 0.0)
    view.heard(Heartbeat(D1, 1, 0, 4, 4, ceiling=20), 0.0)
    picked = Counter(put(view, 15.0) for _ in range(10))
    assert picked[D0] == 0 and picked[D1] == 10
    for _ in range(8):
        put(view, 15.0)
    counts = {worker_id: view.get(worker_id).num_placed for worker_id in (D0, D1)}
    assert counts == {D0: 6, D1: 20}, "two more than it runs wait there, and no more"
    view.place(D1, 100, 0.0, P0, 15.0)
    view.place(D1, 100, 0.0, P0, 15.0)
    assert view.pick_decode(100, P0, tpot_ms=15.0) is None
    view.heard(Heartbeat(D0, 1, 0, 6, 4), 0.0)
    assert view.pick_decode(100, P0, tpot_ms=15.0).worker_id == D0, "without a promise its size is its own again"


def plain_pick(view: FleetView, tokens: int, source: WorkerId) -> set[WorkerId]:
    """The rule without classes, by looking at everybody: whom it may pick."""
    ready = sorted((m for m in view if not m.draining), key=lambda m: (m.cost, m.turn))[:4]
    fitting = [
        m
        for m in ready
        if not m.num_placed or (m.placed_tokens + tokens <= m.hello.kv_tokens and m.num_placed < m.hello.max_running)
    ]
    fewest = min((view._transfers[source, m.worker_id] for m in fitting), default=0)
    return {m.worker_id for m in fitting if view._transfers[source, m.worker_id] == fewest}


Move = tuple[int, int, int, float | None]
moves = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.integers(0, 4),
        st.integers(1, 30_000),
        st.sampled_from([None, 50.0, 30.0, 15.0, 0.01, 31.5]),
    ),
    max_size=60,
)


def live(view: FleetView, steps: list[Move], *, promised: bool) -> None:
    placed: dict[WorkerId, list[tuple[int, float | None]]] = {member.worker_id: [] for member in view}
    drained: set[WorkerId] = set()
    for kind, number, tokens, drawn_ms in steps:
        tpot_ms = drawn_ms if promised else None
        worker_id = WorkerId(f"decode-{number}", 1)
        if kind <= 3:
            before = plain_pick(view, tokens, P0)
            member = view.pick_decode(tokens, P0, tpot_ms=tpot_ms)
            if not promised:
                assert {member.worker_id} <= before if member is not None else not before
            if member is not None:
                view.place(member.worker_id, tokens, 0.0, P0, tpot_ms)
                view.transferred(P0, member.worker_id)
                placed[member.worker_id].append((tokens, tpot_ms))
        elif kind == 4 and placed[worker_id]:
            view.take_off(worker_id, *placed[worker_id].pop(tokens % len(placed[worker_id])))
        elif kind == 5:
            running = len(placed[worker_id])
            view.heard(Heartbeat(worker_id, 1, 0, running, 0, ceiling=tokens % 40 + 1 if promised else None), 0.0)
        elif kind == 6 and len(drained) < 4:
            view.drain(worker_id)
            drained.add(worker_id)
        held = {at: (len(each), sum(t for t, _ in each)) for at, each in placed.items() if each}
        view.check(held, [])
        for member in view:
            assert member.classes == Counter(ms for _, ms in placed[member.worker_id] if ms is not None)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(moves)
def test_without_promises_workers_are_picked_as_ever(steps: list[Move]) -> None:
    live(decoders(5, max_running=6), steps, promised=False)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(moves, st.sampled_from([15.0, 30.0, 50.0, None]))
def test_after_any_history_a_class_finds_its_place(steps: list[Move], tpot_ms: float | None) -> None:
    view = decoders(5, max_running=6)
    live(view, steps, promised=True)
    ready = [m for m in view if not m.draining]
    member = view.pick_decode(10, P0, tpot_ms=tpot_ms)
    if any(m.num_placed == 0 for m in ready):
        assert member is not None
        own_ms = tpot_ms if tpot_ms is not None else float("inf")
        assert member.num_placed == 0 or member.cost < 0.1 or own_ms >= member.strictest_ms, (
            "shrank a batch for nothing"
        )
    if member is not None:
        assert not member.draining
        assert member.num_placed == 0 or member.num_placed < member.bearable


def test_a_class_costs_no_look_at_everybody() -> None:
    """Counted, not timed: members compared by one pick, in a fleet of a thousand busy workers."""
    view = decoders(1000)
    for number in range(4000):
        put(view, (None, 50.0, 15.0)[number % 3])
    assert view.pick_decode(100, P0, tpot_ms=15.0) is not None
    assert len(view.considered) <= 8 and sum(map(len, view._by_class.values())) == 1000


def test_every_rank_of_an_instance_takes_requests_by_itself() -> None:
    """The loss of one leaves the others as they are: they take over its experts."""
    view = FleetView()
    view.add(hello(D0, "decode", instance="decode"), 0.0)
    assert view.pick_decode(10, P0) is not None and view.num_ready("decode") == 1
    view.add(hello(D1, "decode", instance="decode"), 0.0)
    picked = set()
    for _ in range(2):
        member = view.pick_decode(10, P0)
        assert member is not None
        picked.add(member.worker_id)
        view.place(member.worker_id, 10, 0.0)
    assert picked == {D0, D1} and view.num_ready("decode") == 2
    view.take_off(D1, 10)
    view.remove(D1)
    left = view.pick_decode(10, P0)
    assert left is not None and left.worker_id == D0
    view.check({D0: (1, 10)}, [])
