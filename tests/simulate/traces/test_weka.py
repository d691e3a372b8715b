"""WEKA's sessions: times, nested subagents, ids of their own, and what is wrong in words."""

from __future__ import annotations

from typing import Any

import pytest

from tripool.bench.trace import BadTrace, TraceRequest, measure_trace
from tripool.simulate.rng import Rng
from tripool.simulate.traces.weka import BlockNames, Sessions


def request(at_s: float, prompt: int, ids: list[int], **changes: Any) -> dict[str, Any]:
    return {"t": at_s, "type": "n", "in": prompt, "out": 10, "hash_ids": ids, "api_time": 1.5} | changes


def session(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"id": "trace_1", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | changes


def read(*records: dict[str, Any], per_minute: float = 60.0, seed: int = 1) -> list[TraceRequest]:
    return list(Sessions(len(records), lambda place: (records[place], f"s{place}.json"), per_minute, seed))


def test_requests_of_a_session_share_what_their_ids_share() -> None:
    one, two, three = read(
        session(request(0.0, 130, [1, 2, 3]), request(4.0, 300, [1, 2, 7, 8, 9]), request(2.0, 128, [1, 2]))
    )
    assert [each.arrival_s for each in (one, two, three)] == [0.0, 2.0, 4.0]
    assert (two.input_tokens, two.output_tokens, two.block_tokens) == (128, 10, 64)
    assert one.block_ids[:2] == two.block_ids == three.block_ids[:2] and one.block_ids[2] not in three.block_ids
    assert measure_trace([one, two, three]).cached_block_share == pytest.approx(4 / 10)


def test_ids_are_local_to_a_session_unless_their_scope_is_global() -> None:
    def both(scope: str) -> set[int]:
        found = read(*(session(request(0.0, 128, [1, 2]), hash_id_scope=scope) for _ in range(2)))
        return {block_id for each in found for block_id in each.block_ids}

    assert len(both("local")) == 4 and len(both("global")) == 2


def test_a_block_after_another_prefix_is_another_block() -> None:
    names = BlockNames()
    assert names.chain([1, 2, 3])[-1] != names.chain([1, 3])[-1]
    assert names.chain([]) == ()


def test_chains_agree_as_far_as_ids_do() -> None:
    rng, names = Rng(5), BlockNames()
    prompts = [[rng.between(0, 2) for _ in range(rng.between(0, 9))] for _ in range(200)]
    chains = [names.chain(list(prompt)) for prompt in prompts]
    for one, chain in zip(prompts, chains, strict=True):
        for two, other in zip(prompts, chains, strict=True):
            agree = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            assert chain[:agree] == other[:agree] and not set(chain[agree:]) & set(other[agree:])


def test_a_subagents_times_are_since_its_start() -> None:
    nested = {"t": 5.0, "type": "subagent", "requests": [request(0.0, 64, [9]), request(3.0, 64, [1])]}
    found = read(session(request(0.0, 64, [1]), nested, request(6.0, 64, [1])))
    assert [each.arrival_s for each in found] == [0.0, 5.0, 6.0, 8.0]
    assert found[0].block_ids == found[3].block_ids != found[1].block_ids


def test_sessions_start_at_their_rate_and_are_merged_in_time() -> None:
    records = [session(request(0.0, 64, [1]), request(100.0, 64, [1])) for _ in range(400)]
    found = read(*records, per_minute=30.0)
    times = [each.arrival_s for each in found]
    assert len(found) == 800 and times == sorted(times)
    assert times[-1] - 100.0 == pytest.approx(399 * 2.0, rel=0.2)
    assert found == read(*records, per_minute=30.0) != read(*records, per_minute=30.0, seed=2)


def test_sessions_are_loaded_when_they_start() -> None:
    loaded: list[int] = []

    def load(place: int) -> tuple[dict[str, Any], str]:
        loaded.append(place)
        return session(request(0.0, 64, [1])), "s"

    first = next(iter(Sessions(1000, load, 1.0, 0)))
    assert first.arrival_s == 0.0 and len(loaded) <= 2


def test_requests_without_an_answer_are_left_out_and_counted() -> None:
    record = session(request(0.0, 64, [1], out=0), request(1.0, 64, [1]))
    sessions = Sessions(1, lambda _: (record, "s"), 1.0, 0)
    assert len(list(sessions)) == len(list(sessions)) == 1 and sessions.num_unanswered == 1


def test_more_ids_than_blocks_are_cut_and_fewer_stay() -> None:
    many, few = read(session(request(0.0, 65, [1, 2, 3]), request(1.0, 640, [1])))
    assert len(many.block_ids) == 2 and len(few.block_ids) == 1


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (session(block_size="64"), "s0.json: block_size is '64'"),
        (session() | {"requests": {}}, "s0.json: requests is no list"),
        (session(request(0.0, 64, [1]), 7), r"s0.json, requests\[1\] is not an object"),  # type: ignore[arg-type]
        (session(request(-1.0, 64, [1])), r"s0.json, requests\[0\]: t is -1.0"),
        (session(request(0.0, 0, [1])), r"requests\[0\]: in is 0"),
        (session(request(0.0, 64, [1], out=None)), r"requests\[0\]: out is None"),
        (session(request(0.0, 64, ["a"])), r"requests\[0\]: hash_ids is no list"),  # type: ignore[list-item]
        (session({"t": 0.0, "type": "subagent"}), r"requests\[0\]: requests is no list"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(record: dict[str, Any], told: str) -> None:
    with pytest.raises(BadTrace, match=told) as refused:
        read(record)
    assert refused.value.hint


def test_endless_subagents_are_refused() -> None:
    record: dict[str, Any] = session()
    for _ in range(30):
        record = session({"t": 0.0, "type": "subagent", "requests": [record | {"type": "subagent", "t": 0.0}]})
    with pytest.raises(BadTrace, match="subagents within subagents"):
        read(record)
