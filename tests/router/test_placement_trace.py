"""Placement traces: which workers the router considered, why a request waited, how it ended, bounded in size."""

from typing import Any

from router.acting import D0, D1, P0, P1, Stage, ask, hello, sent
from tripool.config import RouterConfig
from tripool.core import Stages, TokenEvent
from tripool.messages import KvDescriptor, Left, Refused, Stamped, StartDecode, StartPrefill, Tokens, TransferReady
from tripool.router import Coordinator
from tripool.router.placement_trace import PlacementTrace


def facts(stage: Stage, request_id: str = "r") -> dict[str, Any]:
    entry = stage.coordinator.ledger.get(request_id)
    assert entry is not None
    return entry.trace.facts()


def steps(stage: Stage, request_id: str = "r") -> list[dict[str, Any]]:
    return facts(stage, request_id)["steps"]


def test_a_placement_names_its_candidates_with_their_loads_at_that_time():
    stage = Stage(P0, P1, D0, D1)
    stage.submit(ask("first", prompt=50))
    stage.submit(ask("r", prompt=5))
    (step,) = steps(stage)
    assert step["what"] == "prefill" and step["waited ms"] == 0.0 and step["held by"] == ""
    busy = steps(stage, "first")[0]["worker"]
    assert step["worker"] != busy
    assert f"{busy}: 1 requests, 51 tokens" in step["candidates"]
    assert f"{step['worker']}: 0 requests, 0 tokens" in step["candidates"]


def test_waiting_for_a_worker_is_reported_with_the_reason():
    stage = Stage(D0)
    stage.submit(ask("r"))
    stage.later(2.0)
    stage.receive(hello(P0, "prefill"))
    (step,) = steps(stage)
    assert (step["waited ms"], step["held by"]) == (2000.0, "there is no prefill worker")
    assert facts(stage)["held back: there is no prefill worker"] == "2000.0 ms"


def test_the_next_in_line_waits_for_room_and_those_behind_for_it():
    stage = Stage(P0, D0, prefill_ahead_tokens=30)
    stage.submit(ask("first", prompt=29))
    stage.submit(ask("next", prompt=9))
    stage.submit(ask("r", prompt=9))
    stage.later(0.5)
    stage.cancel("first")
    ((ahead,), (behind,)) = steps(stage, "next"), steps(stage)
    assert ahead["waited ms"] == behind["waited ms"] == 500.0
    assert ahead["held by"] == "all prefill workers have full queues"
    assert behind["held by"] == "older requests go first"


def test_a_full_decode_pool_says_what_it_is_full_of():
    for limits, limit in (({"kv_tokens": 20}, "KV memory"), ({"max_running": 1}, "batch slots")):
        stage = Stage(P0)
        stage.receive(hello(D0, "decode", **limits))
        stage.submit(ask("other"))
        begin = sent(stage.outputs, StartPrefill)[0].message
        first = TokenEvent("other", 0, 0, 11)
        stage.receive(Tokens(P0, (Stamped(begin.attempt, first),)))
        stage.receive(TransferReady(P0, "other", begin.attempt, 0, 7, 5, KvDescriptor("p", b"")))
        assert sent(stage.outputs, StartDecode)
        begin = sent(stage.submit(ask("r")), StartPrefill)[0].message
        stage.tokens(P0, begin.attempt, 0, 11)
        stage.packed(P0, begin.attempt, 8, 5)
        stage.later(1.0)
        stage.cancel("other")
        held_by = steps(stage)[-1]["held by"]
        assert held_by == f"all decode workers are full: {limit}"


def test_what_was_cached_and_where_comes_with_the_first_token():
    stage = Stage(P0, D0)
    begin = sent(stage.submit(ask("r", prompt=200)), StartPrefill)[0].message
    event = TokenEvent("r", 0, 0, 11, num_cached_tokens=192, stages=Stages(fetched_tokens=128, disk_tokens=64))
    stage.receive(Tokens(P0, (Stamped(begin.attempt, event),)))
    reported = facts(stage)
    assert reported["cached at the prefill worker"] == "64 tokens"
    assert reported["fetched from the cache pool"] == "128 tokens (64 from memory, 64 from disk)"


def test_losses_and_refusals_are_steps_too():
    stage = Stage(P0, P1, D0, D1)
    worker_id, attempt = stage.to_decode()
    stage.receive(Refused(worker_id, "r", attempt, "overloaded", "no room", "", False))
    assert steps(stage)[-1]["what"] == "refused (overloaded) while decoding"
    stage.later(1.0)
    worker = steps(stage)[-1]["worker"]
    stage.receive(Left(P0 if worker == "prefill-0" else P1))
    reported = facts(stage)
    assert "lost while prefilling" in [step["what"] for step in reported["steps"]]
    assert reported["workers lost"] == 1, "no room is no loss"
    assert reported["placements"] == 4


def test_a_trace_is_bounded_and_keeps_its_first_and_last_steps():
    trace = PlacementTrace(0.0)
    for number in range(100):
        trace.left("w", f"step {number}", 0, float(number))
    trace.failed("too many")
    reported = trace.facts()
    rows = reported["steps"]
    assert isinstance(rows, list)
    assert len(rows) == 16 and reported["steps left out"] == 84
    assert rows[0]["what"] == "step 0" and rows[-1]["what"] == "step 99"
    assert reported["failed"] == "too many"


def test_without_stories_everything_is_placed_the_same():
    outputs = []
    for traces in (True, False):
        coordinator = Coordinator(RouterConfig(prefill_ahead_tokens=60), epoch=1, traces=traces)
        made = [
            coordinator.receive(hello(worker_id, role), 0.0) for worker_id, role in ((P0, "prefill"), (P1, "prefill"))
        ]
        made += [coordinator.submit(ask(f"r{number}", prompt=20), 0.1 * number) for number in range(6)]
        made += [coordinator.receive(Left(P0), 1.0), coordinator.tick(2.0)]
        outputs.append(made)
        placed = len(coordinator.ledger.get("r0").trace.facts()["steps"])
        assert (placed > 1) == traces
    assert outputs[0] == outputs[1]
    assert sent([output for made in outputs[0] for output in made], StartPrefill)
