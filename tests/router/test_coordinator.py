"""The coordinator, one scenario at a time. Invariants of any history are tested by tests/simulate."""

from __future__ import annotations

import pytest

from tripool.errors import InvalidRequest, NoWorkers, WorkersCrashed, WorkersFailed
from tripool.messages import Cancel, Drain, Left, Reaped, Refused, Release, StartDecode, StartPrefill, Welcome, WorkerId

from .acting import D0, D1, P0, P1, Stage, ask, emitted, failed, hello, sent, suspects


def test_the_walk_of_a_request() -> None:
    stage = Stage(P0, D0)
    begin = sent(stage.submit(ask()), StartPrefill)[0]
    assert begin.worker_id == P0 and begin.message.answered[0].tokens == ()
    assert emitted(stage.tokens(P0, 1, 0, 11, num_cached_tokens=4)) == [11]
    adopt = sent(stage.packed(P0, 1, lease=7, num_tokens=5), StartDecode)[0]
    assert adopt.worker_id == D0 and adopt.message.attempt == 2 and adopt.message.num_cached_tokens == 4
    assert adopt.message.answered.tokens == (11,)
    assert sent(stage.adopted(D0, 2), Release)[0].message.lease == 7
    assert emitted(stage.tokens(D0, 2, 1, 12, 13, finish="stop", num_cached_tokens=4)) == [12, 13]
    assert len(stage.coordinator.ledger) == 0
    assert stage.cancel("r") == []  # a cancel may cross the last token


def test_every_choice_goes_its_own_way() -> None:
    stage = Stage(P0, D0, D1)
    begin = sent(stage.submit(ask(n=3)), StartPrefill)[0]
    assert [each.choice for each in begin.message.answered] == [0, 1, 2]
    for choice in range(3):
        stage.tokens(P0, 1, 0, 11, choice=choice, finish="stop" if choice == 2 else None)
    adopts = [
        sent(stage.packed(P0, 1, lease=choice, num_tokens=5, choice=choice), StartDecode)[0] for choice in range(2)
    ]
    assert [adopt.message.attempt for adopt in adopts] == [2, 3]
    assert {adopt.worker_id for adopt in adopts} == {D0, D1}, "transfers of one prefill worker are spread"


def test_a_lost_decode_worker_loses_no_token() -> None:
    stage = Stage(P0, D0, D1)
    worker_id, attempt = stage.to_decode()
    stage.tokens(worker_id, attempt, 1, 12)
    begin = sent(stage.receive(Reaped(worker_id)), StartPrefill)[0]
    assert begin.message.attempt > attempt and begin.message.answered[0].tokens == (11, 12)
    assert stage.tokens(worker_id, attempt, 2, 13) == [], "a late message of an ended worker"
    stage.tokens(P0, begin.message.attempt, 2, 13, num_cached_tokens=5)
    adopt = sent(stage.packed(P0, begin.message.attempt, 9, num_tokens=7), StartDecode)[0]
    other = D1 if worker_id == D0 else D0
    assert adopt.worker_id == other
    assert emitted(stage.tokens(other, adopt.message.attempt, 3, 14, finish="stop")) == [14]
    assert emitted(stage.outputs) == [11, 12, 13, 14]
    assert sent(stage.outputs, Release)[-1].message.lease == 9, "a token implies that its KV was copied"


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    stage = Stage(P0, D0)
    stage.submit(ask())
    stage.tokens(P0, 1, 0, 11, num_cached_tokens=4, num_draft_tokens=2, num_accepted_draft_tokens=1)
    begin = sent(stage.receive(hello(P0, "prefill")), StartPrefill)[0]
    more = {"num_cached_tokens": 0, "num_draft_tokens": 3, "num_accepted_draft_tokens": 3}
    event = stage.tokens(P0, begin.message.attempt, 1, 12, **more)[0].event
    assert (event.num_cached_tokens, event.num_draft_tokens, event.num_accepted_draft_tokens) == (4, 5, 4)


def test_duplicates_are_dropped_and_gaps_are_placed_again() -> None:
    stage = Stage(P0, D0)
    worker_id, attempt = stage.to_decode()
    assert emitted(stage.tokens(worker_id, attempt, 0, 11)) == []
    outputs = stage.tokens(worker_id, attempt, 2, 13)
    assert emitted(outputs) == [] and sent(outputs, Cancel)[0].message.attempt == attempt
    assert sent(outputs, StartPrefill)[0].message.answered[0].tokens == (11,)


def test_a_silent_worker_is_suspected_and_hears_nothing() -> None:
    stage = Stage(P0, D0, D1, silence_s=2.0, heartbeat_s=0.5)
    worker_id, attempt = stage.to_decode()
    for other in {P0, D0, D1} - {worker_id}:
        stage.now_s += 1.5
        stage.heartbeat(other)
    stage.now_s = 101.9
    for other in {P0, D0, D1} - {worker_id}:
        stage.heartbeat(other)
    assert suspects(stage.later(0.05)) == []
    outputs = stage.later(0.1)
    assert suspects(outputs) == [worker_id] and sent(outputs, StartPrefill)
    assert not [output for output in sent(outputs, Cancel) if output.worker_id == worker_id]
    assert (
        stage.tokens(worker_id, attempt, 1, 12)
        == stage.heartbeat(worker_id)
        == stage.receive(hello(worker_id, "decode"))
        == []
    )
    stage.receive(Reaped(worker_id))
    again = WorkerId(worker_id.name, 2)
    assert sent(stage.receive(hello(again, "decode")), Welcome)
    assert stage.receive(hello(worker_id, "decode")) == [], "an ended worker does not come back"


def test_a_worker_whose_connection_has_ended_is_lost_at_once_and_welcome_again() -> None:
    stage = Stage(P0, D0, D1)
    worker_id, _ = stage.to_decode()
    outputs = stage.disconnected(worker_id)
    assert suspects(outputs) == [], "nobody is asked to end it"
    assert sent(outputs, StartPrefill)[0].message.answered[0].tokens == (11,)
    assert worker_id not in stage.coordinator.view and stage.disconnected(worker_id) == []
    assert sent(stage.receive(hello(worker_id, "decode")), Welcome), "without the wait of one that was silent"


def test_a_crash_counts_whether_its_connection_or_its_supervisor_was_noticed_first() -> None:
    stage, outputs = Stage(), []
    stage.submit(ask())
    for epoch in (1, 2):
        worker_id = WorkerId("prefill-0", epoch)
        stage.receive(hello(worker_id, "prefill"))
        stage.disconnected(worker_id)
        outputs += stage.receive(Reaped(worker_id, crashed=True))
    assert isinstance(failed(outputs)[0].error, WorkersCrashed)


def test_a_suspected_worker_that_is_not_reaped_may_register_again() -> None:
    stage = Stage(P0, distrust_s=10.0)
    assert suspects(stage.later(2.5)) == [P0]
    assert stage.receive(hello(P0, "prefill")) == []
    stage.now_s += 10
    assert sent(stage.receive(hello(P0, "prefill")), Welcome)


def test_work_without_a_step_is_as_good_as_silence() -> None:
    stage = Stage(P0, silence_s=2.0, stall_s=10.0)
    stage.submit(ask())
    for _ in range(9):
        stage.heartbeat(P0, num_steps=3, running=1)
        assert suspects(stage.later(1.0)) == []
    stage.heartbeat(P0, num_steps=3, running=1)
    assert suspects(stage.later(1.5)) == [P0]


def test_what_was_lost_on_the_way_is_noticed() -> None:
    """The worker says that it has nothing, long after it was given something."""
    stage = Stage(P0, silence_s=2.0, heartbeat_s=0.5)
    stage.submit(ask())
    outputs = []
    for _ in range(6):
        outputs += stage.heartbeat(P0)
        stage.later(0.5)
    assert [begin.message.attempt for begin in sent(outputs, StartPrefill)] == [2]


def test_a_lost_prefill_worker_loses_its_kv() -> None:
    stage = Stage(P0, D0)
    stage.submit(ask())
    stage.tokens(P0, 1, 0, 11)
    stage.packed(P0, 1, lease=1, num_tokens=5)
    outputs = stage.receive(Reaped(P0))
    assert sent(outputs, Cancel)[0].worker_id == D0 and not sent(outputs, Release)
    outputs = stage.receive(hello(P1, "prefill"))
    assert sent(outputs, StartPrefill)[0].message.answered[0].tokens == (11,)
    assert stage.adopted(D0, 2) == sent(stage.outputs, Cancel)[1:], "cancelled again, if it goes on with it"


def test_kv_survives_a_decode_worker_that_never_copied_it() -> None:
    stage = Stage(P0, D0, D1)
    stage.submit(ask())
    stage.tokens(P0, 1, 0, 11)
    first = sent(stage.packed(P0, 1, lease=1, num_tokens=5), StartDecode)[0]
    outputs = stage.receive(Reaped(first.worker_id))
    second = sent(outputs, StartDecode)[0]
    assert (
        second.worker_id != first.worker_id
        and second.message.descriptor == first.message.descriptor
        and not sent(outputs, StartPrefill)
    )


def test_cancel_gives_everything_back() -> None:
    stage = Stage(P0, D0)
    stage.submit(ask(n=2))
    stage.tokens(P0, 1, 0, 11)
    stage.packed(P0, 1, lease=5, num_tokens=5)
    outputs = stage.cancel("r")
    assert {(send.worker_id, send.message.attempt) for send in sent(outputs, Cancel)} == {(P0, 1), (D0, 2)}
    assert [send.message.lease for send in sent(outputs, Release)] == [5]
    assert sent(stage.packed(P0, 1, lease=6, num_tokens=5, choice=1), Release)[0].message.lease == 6
    assert sent(stage.tokens(D0, 2, 1, 12), Cancel), "it crossed; it is cancelled again"


def test_it_takes_whatever_admission_lets_in() -> None:
    stage = Stage()
    assert not any(failed(stage.submit(ask(f"big{i}", prompt=100_000))) for i in range(4))
    assert not failed(stage.submit(ask("more")))
    with pytest.raises(InvalidRequest, match="in use"):
        stage.submit(ask("more"))


def test_without_workers_a_request_waits_so_long_and_no_longer() -> None:
    stage = Stage(queue_s=5.0)
    stage.submit(ask())
    assert not failed(stage.later(4.9))
    (ended,) = failed(stage.later(0.2))
    assert isinstance(ended.error, NoWorkers) and ended.error.status == 503


def test_requests_wait_here_and_the_oldest_goes_first() -> None:
    stage = Stage(P0, prefill_ahead_tokens=20)
    begun = [sent(stage.submit(ask(f"r{i}", prompt=8)), StartPrefill) for i in range(4)]
    assert [len(each) for each in begun] == [1, 1, 0, 0]
    begins = sent(stage.receive(hello(P1, "prefill")), StartPrefill)
    assert [(begin.worker_id, begin.message.request.id) for begin in begins] == [(P1, "r2"), (P1, "r3")]


def test_the_next_is_placed_when_the_head_of_the_queue_is_cancelled() -> None:
    stage = Stage(P0, prefill_ahead_tokens=20)
    for name, prompt in {"first": 10, "large": 15, "small": 5}.items():
        stage.submit(ask(name, prompt=prompt))
    assert [send.message.request.id for send in sent(stage.outputs, StartPrefill)] == ["first"]
    assert [send.message.request.id for send in sent(stage.cancel("large"), StartPrefill)] == ["small"]


def test_a_final_refusal_is_the_clients_and_others_are_not() -> None:
    stage = Stage(P0, P1, rest_s=0.1)
    stage.submit(ask())
    assert not failed(stage.receive(Refused(P0, "r", 1, "no_shared_memory", "full", "", False)))
    begin = sent(stage.later(0.3), StartPrefill)[0]
    assert begin.worker_id == P1, "another worker, if there is one"
    (ended,) = failed(stage.receive(Refused(P1, "r", 2, "context_length_exceeded", "too long", "cut it", True)))
    assert (ended.error.status, ended.error.code, ended.error.hint) == (400, "context_length_exceeded", "cut it")


def test_a_request_that_workers_die_of_is_given_up() -> None:
    stage = Stage(max_losses=3)
    stage.submit(ask())
    outputs = []
    for epoch in range(1, 5):
        stage.receive(hello(WorkerId("prefill-0", epoch), "prefill"))
        outputs += stage.receive(Reaped(WorkerId("prefill-0", epoch)))
    (ended,) = failed(outputs)
    assert isinstance(ended.error, WorkersFailed)
    assert len(sent(stage.outputs, StartPrefill)) == 3


def test_every_stage_has_its_deadline() -> None:
    times = {"prefill_s": 3.0, "transfer_s": 2.0, "token_s": 4.0, "silence_s": 20.0, "stall_s": 20.0}
    stage = Stage(P0, D0, **times)
    stage.submit(ask())
    outputs = stage.later(3.1)
    assert sent(outputs, Cancel)[0].worker_id == P0 and sent(outputs, StartPrefill)[0].message.attempt == 2
    stage.tokens(P0, 2, 0, 11)
    stage.packed(P0, 2, lease=1, num_tokens=5)
    outputs = stage.later(2.1)
    assert sent(outputs, Cancel)[0].worker_id == D0 and sent(outputs, StartDecode)[0].message.descriptor.payload == b"1"
    stage.adopted(D0, sent(outputs, StartDecode)[0].message.attempt)
    outputs = stage.later(4.1)
    assert sent(outputs, Cancel)[0].worker_id == D0 and sent(outputs, StartPrefill)[0].message.answered[0].tokens == (
        11,
    )


def test_drain_hands_streams_over() -> None:
    stage = Stage(P0, D0, D1)
    worker_id, attempt = stage.to_decode()
    outputs = stage.drain(worker_id)
    assert sent(outputs, Drain)[0].worker_id == worker_id and sent(outputs, Cancel)[0].message.attempt == attempt
    begin = sent(outputs, StartPrefill)[0]
    stage.tokens(P0, begin.message.attempt, 1, 12)
    adopt = sent(stage.packed(P0, begin.message.attempt, 2, num_tokens=6), StartDecode)[0]
    assert adopt.worker_id != worker_id
    assert sent(stage.heartbeat(worker_id), Drain), "said again until it leaves"
    stage.receive(Left(worker_id))
    assert worker_id not in stage.coordinator.view


def test_the_last_of_its_kind_finishes_what_it_has() -> None:
    stage = Stage(P0, D0)
    worker_id, attempt = stage.to_decode()
    assert not sent(stage.drain(worker_id), Cancel)
    assert emitted(stage.tokens(worker_id, attempt, 1, 12, finish="stop")) == [12]


def test_hello_again_means_that_nothing_is_held() -> None:
    stage = Stage(P0, D0)
    stage.submit(ask())
    outputs = stage.receive(hello(P0, "prefill"))
    assert [send.message.attempt for send in sent(outputs, StartPrefill)] == [2] and not sent(outputs, Cancel)
    stage.receive(hello(WorkerId("prefill-0", 2), "prefill"))
    assert P0 not in stage.coordinator.view, "a worker has one epoch at a time"
