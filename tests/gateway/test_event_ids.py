"""Ids of a stream's events: wherever a stream is cut, what follows its last id is the rest, event by event."""

from __future__ import annotations

import json
import random

import pytest

from tripool.errors import InvalidRequest
from tripool.gateway.event_ids import EventIds, read_id
from tripool.router.kept_types import AnswerChanged


def events_of(tokens: list[tuple[int, int]], num_choices: int, last: str = "", seed: int = 0) -> list[bytes]:
    """A stream of such (choice, token)s, of which some give no event and some several."""
    ids = EventIds(num_choices, read_id(last, num_choices) if last else None)
    sent, index = b"", [0] * num_choices
    for choice, token_id in tokens:
        rng = random.Random(f"{seed}/{choice}/{index[choice]}")
        index[choice] += 1
        several = [
            f"data: {json.dumps({'c': choice, 't': token_id, 'i': i})}\n\n" for i in range(rng.choice([0, 1, 1, 3]))
        ]
        sent += ids.token(choice, token_id, "".join(several).encode() or None) or b""
    sent += ids.closing(b'event: end\ndata: {"usage": 1}\n\ndata: [DONE]\n\n')
    return [event + b"\n\n" for event in sent.split(b"\n\n")[:-1]]


def id_of(event: bytes) -> str:
    return event.rpartition(b"\nid: ")[2].strip().decode()


@pytest.mark.parametrize("num_choices", [1, 2, 5])
def test_wherever_it_is_cut_the_rest_follows(num_choices: int) -> None:
    rng = random.Random(num_choices)
    for seed in range(20):
        tokens = [(rng.randrange(num_choices), rng.randrange(99)) for _ in range(12)]
        whole = events_of(tokens, num_choices, seed=seed)
        ids = [id_of(event) for event in whole]
        assert len(set(ids)) == len(ids), "an id that is not one place"
        others = [token for choice in range(num_choices) for token in tokens if token[0] == choice]
        for cut in range(len(whole)):
            rest = events_of(tokens, num_choices, ids[cut], seed=seed)
            assert rest == whole[cut + 1 :]
            if num_choices > 1:  # computed again, its choices come in another order; each goes on where it was
                again = events_of(others, num_choices, ids[cut], seed=seed)
                for choice in range(num_choices):
                    mine = f'"c": {choice},'.encode()
                    said = [e.partition(b'"c"')[2].partition(b"\n")[0] for e in whole[: cut + 1] + again if mine in e]
                    alone = [e.partition(b'"c"')[2].partition(b"\n")[0] for e in whole if mine in e]
                    assert said == alone


def test_ids_are_in_the_data_too() -> None:
    ids = EventIds(1)
    assert ids.token(0, 7, b'data: {"a":1}\n\n') == b'data: {"event_id":"1-6fe7d670","a":1}\nid: 1-6fe7d670\n\n'
    assert ids.token(0, 8, None) is None
    assert ids.closing(b"data: [DONE]\n\n").startswith(b"data: [DONE]\nid: 2-")


def test_an_answer_that_came_out_otherwise_is_not_gone_on_with() -> None:
    tokens = [(0, 5), (0, 6), (1, 7), (0, 8), (1, 9)]
    whole = events_of(tokens, 2)
    for cut in range(1, len(whole)):
        other = [(choice, token_id + (i == 0)) for i, (choice, token_id) in enumerate(tokens)]
        if not id_of(whole[cut]).startswith("0."):
            with pytest.raises(AnswerChanged):
                events_of(other, 2, id_of(whole[cut]))
    with pytest.raises(AnswerChanged):
        events_of(tokens[:2], 2, id_of(whole[-1]))


@pytest.mark.parametrize(
    "given", ["x", "1", "1-00000000x", "1.2-00000000", "1-00000000/1/1", "1-00000000/end", "-" * 99]
)
def test_what_is_no_id_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_id(given, 1)
    assert refused.value.param == "Last-Event-ID"
