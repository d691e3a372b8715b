"""Requests that real clients sent (`clients.table.run --record`) get the status that they got then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from clients.scripted import Scripted, scripted_server
from clients.table.replay import recorded

WITHIN_S = 120.0
RECORDED = list(recorded())


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server([{"when": "", "answer": "Hello!"}]) as server:
        yield server


@pytest.mark.parametrize("name", sorted({name for name, _ in RECORDED}))
def test_requests_of_a_client_are_answered_as_they_were(server: Scripted, name: str) -> None:
    wrong, statuses = [], Counter[int]()
    with httpx.Client(base_url=server.url, timeout=WITHIN_S) as http:
        for _, request in filter(lambda one: one[0] == name, RECORDED):
            body = request["body"]
            answer = http.request(
                request["method"], request["path"], headers=request["headers"], json=body if body is not None else None
            )
            statuses[answer.status_code] += 1
            if answer.status_code != request["status"]:
                wrong.append((request["path"], request["status"], answer.status_code, answer.text[:500]))
    assert not wrong
    assert statuses[200], "nothing that a client asked was answered"
