"""Where time went: stages add up to the total, whatever the clocks say, and nothing is kept for ever."""

from __future__ import annotations

import json
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.answer import Answer
from tripool.core import Request, SamplingParams, Slo, Stages, TokenEvent
from tripool.engine.fake import fake_text
from tripool.gateway.job import Job
from tripool.gateway.record import Journal, Record
from tripool.text import Tokenizer

STAGES = ("gateway", "queue", "lookup", "prefill", "transfer", "decode")
TOKENIZER = Tokenizer(fake_text())


def job(key: str = "k", request_id: str = "r", tenant: str = "") -> Job:
    request = Request(
        id=f"{key}-0",
        prompt_ids=(5, 6),
        params=SamplingParams(max_tokens=4),
        seed=0,
        slo=Slo(tenant=tenant),
    )
    return Job(
        id=f"chatcmpl-{request_id}", request_id=request_id, key=key, api="chat", requests=(request,), stream=True
    )


def played(times_s: list[float], events: list[TokenEvent]) -> Record:
    """A record whose clock reads these times: received, one per event, ended."""
    clock = iter(times_s[1:])
    made = job()
    record = Record(made, lambda: next(clock), received_s=times_s[0], created_s=1, on_gaps=gaps.extend)
    answer = Answer(made.requests[0], TOKENIZER)
    for event in events:
        answer.take(event)
        record.token(event)
    record.ended("finished", [answer])
    return record


gaps: list[float] = []


def token(index: int, stages: Stages | None = None, finish: Any = None) -> TokenEvent:
    return TokenEvent("k-0", 0, index, 9, finish, stages=stages)


def test_the_usual_case():
    gaps.clear()
    stages = Stages(queue_s=0.010, lookup_s=0.002, prefill_s=0.030)
    events = [token(0, stages), token(1, Stages(transfer_s=0.004)), token(2, finish="stop")]
    record = played([100.0, 100.050, 100.060, 100.070, 100.071], events)
    timing = record.timing()
    assert timing == {
        "gateway": 8.0, "queue": 10.0, "lookup": 2.0, "prefill": 30.0, "transfer": 4.0, "decode": 17.0,
        "first_token": 50.0, "per_token": 10.0, "total": 71.0,
    }  # fmt: skip
    assert [round(gap, 6) for gap in gaps] == [0.01, 0.01]
    assert record.explain()["finish_reasons"] == {"stop": 1}


seconds = st.floats(min_value=0, max_value=100, allow_nan=False)


@given(st.lists(seconds, min_size=2, max_size=8), st.tuples(seconds, seconds, seconds, seconds), seconds)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_stages_always_add_up(times_s, reported, late_s):
    times_s.sort()
    events = [token(i, Stages(*reported) if i == 0 else Stages(transfer_s=late_s)) for i in range(len(times_s) - 2)]
    record = played(times_s, events)
    stages, timing = record.stages_us(), record.timing()
    assert tuple(stages) == STAGES
    assert min(stages.values()) >= 0
    assert round(sum(timing[name] for name in STAGES), 3) == timing["total"]
    assert abs(timing["total"] - (times_s[-1] - times_s[0]) * 1e3) <= 0.002
    before_first = timing["total"] - timing["first_token"]
    assert timing["decode"] <= round(before_first, 3) if events else timing["decode"] == 0


def test_over_http_the_total_is_less_than_the_client_saw(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True}
    for stream in (False, True):
        header_slo = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        begun_s = time.monotonic()
        response = server.http.post("/v1/chat/completions", json=body | header_slo)
        seen_ms = (time.monotonic() - begun_s) * 1e3
        text = response.text.split("data: ")[-2] if stream else response.text
        reported = json.loads(text)["tripool"]
        timing = reported["timing"]
        assert timing.keys() == {*STAGES, "first_token", "per_token", "total"}
        assert round(sum(timing[name] for name in STAGES), 3) == timing["total"] <= seen_ms
        assert 0 < timing["first_token"] <= timing["total"]
        before = sum(timing[name] for name in ("gateway", "queue", "lookup", "prefill"))
        assert round(before, 3) == timing["first_token"]
        assert min(timing.values()) >= 0
        assert response.headers["x-request-id"] == reported["request_id"]


def test_the_journal_forgets_the_oldest():
    journal = Journal(max_kept=3)
    for number in range(10):
        name = f"r{number % 4}"
        journal.keep(Record(job(f"k{number}", name), lambda: 0.0, received_s=0, created_s=0, on_gaps=gaps.extend))
    assert len(journal) == 3
    assert journal.find("r2") is None  # 6 is gone; 7, 8 and 9 are there
    for number in (7, 8, 9):
        name = f"r{number % 4}"
        found = journal.find(name)
        assert found is not None and found.key == f"k{number}"
        assert journal.find(f"chatcmpl-{name}") is found
    assert len(journal._names) == 6


def test_one_tenants_number_does_not_hide_anothers():
    journal = Journal(max_kept=10)

    def keep(tenant: str, number: int) -> None:
        made = job(f"{tenant}{number}", f"r{number}", tenant)
        journal.keep(Record(made, lambda: 0.0, received_s=0, created_s=0, on_gaps=gaps.extend))

    keep("bob", 0)
    keep("carol", 0)
    for number in range(1000):
        keep("alice", number)
    assert len(journal) == 10 and len(journal._names) == 20
    assert journal.find("r0", "bob") and journal.find("r0", "carol")
    assert [n for n in range(1000) if journal.find(f"r{n}", "alice")] == [*range(992, 1000)]
    assert journal.find_anyones("r999") and journal.find_anyones("r0") is journal.find("r0", "carol")
    for number in range(1, 100):
        keep("bob", number)
    assert len(journal) == 10
    assert journal.find("r99", "bob") and journal.find("r999", "alice") and journal.find("r0", "carol")
