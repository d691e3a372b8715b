"""One line in the log for each request, whatever became of it."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.serving import DEADLINE_S, GatedEngine, Serve, Served
from tripool.gateway.request_log import _WORDS, shown_path
from tripool.gateway.tokens import TokenService

BODY = {"prompt": "hello there", "max_tokens": 4}
Requests = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Requests:
    """The first lines about requests: a line comes after the last byte of its answer. So the line of `/load`, which the
    server's fixture asks at the end of the test before, may come in this one."""
    caplog.set_level(logging.DEBUG, "tripool")

    def lines(number: int = 1) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = [vars(record) for record in list(caplog.records) if record.msg == "request"]
            found = [line for line in found if line["route"] != "/load"]
            if len(found) >= number:
                return found[:number]
            assert time.monotonic() < deadline_s, found
            threading.Event().wait(0.002)

    return lines


def documented() -> set[str]:
    """Fields that docs/operate.md explains."""
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text("utf-8")
    rows = page[page.index("| field | |") :].split("\n\n")[0].splitlines()[2:]
    return {name.strip() for row in rows for name in row.split("|")[1].split(",")}


def raw(served: Served, data: bytes) -> bytes:
    with socket.create_connection(served.address, DEADLINE_S) as client:
        client.sendall(data)
        return client.recv(4096)


def test_an_answer_has_one_line_with_its_counts_and_stages(server: Served, requests: Requests) -> None:
    body = BODY | {"n": 2, "max_tokens": 4, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    (line,) = requests()
    usage = answer.json()["usage"]
    assert (line["request_id"], line["method"], line["status"], line["error"]) == ("mine", "POST", 200, None)
    assert (line["model"], line["stream"], line["ended"], line["n"]) == ("fake", False, "finished", 2)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    stages = [line[f"{name}_ms"] for name in ("gateway", "queue", "lookup", "prefill", "transfer", "decode")]
    assert line["total_ms"] >= line["first_token_ms"] > 0 and all(ms >= 0 for ms in stages)
    assert sum(stages) <= line["total_ms"]
    assert line["finish"] == "length:2" and line["levelname"] == "INFO"
    fields = line.keys() - vars(logging.makeLogRecord({})).keys() - {"message"}
    assert fields | {"exception", "traceback"} == documented()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "error"),
    [
        ("POST", "/v1/completions", {}, b"{", 400, "invalid_request"),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"content-length": "9999999"}, b"", 413, "request_too_large"),
        ("GET", "/v1/completions", {}, b"", 405, None),
        ("POST", "/drain?resume=perhaps", {}, b"", 400, "invalid_request"),
        ("GET", "/v1/requests/nobodys/explain", {}, b"", 404, "request_unknown"),
        ("GET", "/v1/models/nobodys", {}, b"", 404, "model_not_found"),
        ("GET", "/v1/models", {"host": "rebound.example"}, b"", 403, "host_refused"),
        ("GET", "/health", {}, b"", 200, None),
    ],
)
def test_refusals_have_one_line_and_return_its_id(
    server: Served,
    requests: Requests,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    error: str | None,
) -> None:
    reported = {"content-type": "application/json", "host": "localhost", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in reported.items())
    answer = raw(server, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body).decode()
    (line,) = requests()
    assert (line["method"], line["status"], line["error"]) == (method, status, error)
    assert f"x-request-id: {line['request_id']}\r\n" in answer and answer.startswith(f"HTTP/1.1 {status} ")
    assert line["levelname"] == ("DEBUG" if path == "/health" else "INFO")


def test_a_client_that_hangs_up_has_one_line(serve: Serve, requests: Requests) -> None:
    endless = {"prompt": "hello", "ignore_eos": True}
    with serve(context_tokens=10**9) as served:
        with served.http.stream("POST", "/v1/completions", json=endless | {"stream": True}) as answer:
            next(answer.iter_lines())
        lines = requests(1)
        with socket.create_connection(served.address, DEADLINE_S) as client:
            body = json.dumps(endless)
            head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            assert served.engine.wait_busy()
        lines = requests(2)
    assert [(line["status"], line["ended"], line["levelname"]) for line in lines] == [
        (200, "cancelled", "INFO"),
        (499, "cancelled", "INFO"),
    ]


def test_an_internal_error_has_one_line_with_its_place_and_the_clients_id(
    server: Served, requests: Requests, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TokenService, body: bytes) -> dict[str, Any]:
        raise ValueError(body)

    monkeypatch.setattr(TokenService, "detokenize", fail)
    answer = server.http.post("/detokenize", json={"tokens": [1]})
    (line,) = requests()
    assert answer.status_code == line["status"] == 500
    assert answer.headers["x-request-id"] == line["request_id"]
    assert (line["levelname"], line["error"], line["exc_info"][0]) == ("ERROR", "internal_error", ValueError)
    assert [record.name for record in caplog.records if record.levelno >= logging.ERROR] == ["tripool.gateway"]


def test_an_answer_that_fails_on_its_way_says_so(serve: Serve, requests: Requests) -> None:
    with serve(engine=GatedEngine(free_steps=1)) as served:
        with served.http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "ignore_eos": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.server.engines.end()
            served.engine.in_flight.set()
            assert "engine_stopped" in "".join(lines)
        refused = served.http.post("/v1/completions", json=BODY)
    said = [(line["status"], line["error"], line["levelname"]) for line in requests(2)]
    assert said == [(200, "engine_stopped", "INFO"), (refused.status_code, "engine_stopped", "WARNING")]
    assert requests()[0]["ended"] == "failed"


def test_paths_are_shown_by_the_words_of_routes_alone() -> None:
    assert shown_path("/v1/requests/tp-secret/explain") == "/v1/requests/*/explain"
    assert shown_path("/v1/v1/chat/completions") == "/v1/v1/chat/completions"
    assert shown_path("/v1/\nforged/a line") == "/v1/*/*"
    assert shown_path("/a" * 1000) == "/*" * 7 + "/*"


def test_every_word_of_a_route_is_shown(server: Served) -> None:
    words = {word for path in server.server.app.openapi()["paths"] for word in path.split("/") if "{" not in word}
    assert words <= _WORDS


SHOWN = (
    "mine",
    "r-1",
    "a" * 32,
    "9b2e5f64-1c1d-4b7e-9a53-0d9d1f1f7c11",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "req_011CSHoEeqs5C35K2UUqR7Fy",
    "chatcmpl-9b2e5f641c1d4b7e9a530d9d1f1f7c11",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "http-4711-and-more",
)
KEY = "tp-3q2-7wxY_bZ0kLmN9aTqRstUvWxYz012345678AbCdE"
HIDDEN = (
    *(KEY, f"a{KEY}", f"sk{KEY}", f"Bearer={KEY[3:]}", KEY[3:], KEY[:30], f"x{KEY[:30]}", KEY.upper()),
    *("tell.me.a.tale", "alice@example.com", "my-question-is-whether-the-patient-has-a-fever"),
)


@pytest.mark.parametrize("way", ["header", "body"])
@pytest.mark.parametrize("given", [*SHOWN, *HIDDEN])
def test_an_id_is_shown_if_it_can_be_nothing_else(server: Served, requests: Requests, given: str, way: str) -> None:
    headers, more = ({"x-request-id": given}, {}) if way == "header" else ({}, {"request_id": given})
    answer = server.http.post("/v1/completions", json=BODY | more, headers=headers)
    assert answer.headers["x-request-id"] == given, "to its client it is what the client calls it"
    again = server.http.post("/v1/completions", json=BODY | more | {"temperature": "hot"}, headers=headers)
    reported = server.http.get(f"/v1/requests/{given}/explain").json()
    lines = {(line["route"], line["status"]): line for line in requests(3)}
    first, second = lines["/v1/completions", 200], lines["/v1/completions", 400]
    assert (answer.status_code, again.status_code) == (200, 400)
    assert first["key"] == reported["key"] and re.fullmatch("[0-9a-f]{24}", second["key"])
    if given in SHOWN:
        assert first["request_id"] == given
    else:
        assert re.fullmatch("~[0-9a-f]{12}", first["request_id"])
        assert given[3:12].lower() not in str({**first, "msg": ""}).lower()
    if way == "header":
        assert second["request_id"] == first["request_id"], "lines of one id belong together"


def test_refusals_of_unauthenticated_callers_have_a_logger_of_their_own(server: Served, requests: Requests) -> None:
    """Of its lines only some are written: tests/observe/test_log.py."""
    server.http.get("/v1/models", headers={"host": "rebound.example"})
    server.http.get("/v1/models/nobodys")
    assert {line["status"]: line["name"] for line in requests(2)} == {
        403: "tripool.unauthenticated",
        404: "tripool.gateway",
    }


def test_a_client_cannot_choose_the_method_that_is_shown(server: Served, requests: Requests) -> None:
    server.http.request("PROPFIND", "/v1/models")
    assert [(line["method"], line["status"]) for line in requests()] == [("*", 405)]
