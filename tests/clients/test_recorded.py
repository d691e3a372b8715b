"""Requests that real clients sent (`clients.table.run --record`) get the status that they got then.

Those refused are refused for a reason that docs/clients.md lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from clients.scripted import Scripted, scripted_server
from clients.table.page import REFUSALS
from clients.table.replay import FOLDER, recorded

WITHIN_S = 120.0
RECORDED = list(recorded())


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server([{"when": "", "answer": "Hello!"}]) as server:
        yield server


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_requests_of_a_client_are_answered_as_they_were(server: Scripted, name: str) -> None:
    wrong, statuses = [], Counter[int]()
    with httpx.Client(base_url=server.url, timeout=WITHIN_S) as http:
        for _, request in filter(lambda one: one[0] == name, RECORDED):
            body = _with_items(http, request["body"])
            answer = http.request(
                request["method"], request["path"], headers=request["headers"], json=body if body is not None else None
            )
            statuses[answer.status_code] += 1
            if answer.status_code != request["status"]:
                wrong.append((request["path"], request["status"], answer.status_code, answer.text[:500]))
            if answer.status_code >= 400 and (answer.status_code, _code(answer)) not in REFUSALS:
                wrong.append((request["path"], "refused", answer.status_code, answer.text[:500]))
    assert not wrong
    assert statuses[200], "nothing that a client asked was answered"


def _with_items(http: httpx.Client, body: Any) -> Any:
    """With references to an item of this server, where a client referred to one."""
    items = body.get("input") if isinstance(body, dict) else None
    if not isinstance(items, list) or not any(item.get("type") == "item_reference" for item in items):
        return body
    item_id = http.post("/v1/responses", json={"input": "Hello?"}).json()["output"][0]["id"]
    return body | {
        "input": [item | {"id": item_id} if item.get("type") == "item_reference" else item for item in items]
    }


def _code(answer: httpx.Response) -> str:
    body = answer.json()
    error = body["error"] if isinstance(body.get("error"), dict) else body
    return str(error.get("code"))
