"""What happens to an answer in the making when its client leaves or its engine dies."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

from gateway.serving import WatchedEngine

HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS = {"messages": HELLO, "ignore_eos": True}


def test_leaving_a_stream_cancels_it(serve):
    with serve(context_tokens=10**9) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()  # kept: an iterator that is dropped hangs up
            assert next(lines).startswith("data: ")
            assert served.engine.open_requests
        assert served.engine.wait_idle()


def test_hanging_up_before_an_answer_cancels_it(serve):
    """No byte has been sent when the client goes: only the closed connection can tell."""
    with serve(context_tokens=10**9) as served:
        body = json.dumps(ENDLESS).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection(served.address, timeout=20) as connection:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            assert served.engine.wait_busy()
        assert served.engine.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_endless_request(serve, stream):
    """The engine does not know stop strings: unless the gateway cancels, this answer never comes."""
    with serve(context_tokens=10**9) as served:
        body = ENDLESS | {"stop": "pool", "stream": stream}
        assert '"finish_reason":"stop"' in served.http.post("/v1/chat/completions", json=body).text
        assert served.engine.wait_idle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_failure_inside_a_stream_is_an_error_event(serve):
    with serve(context_tokens=10**9) as served:
        stream = served.openai.chat.completions.create(
            model="fake", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        served.engine.fails.set()
        with pytest.raises(openai.APIError, match="RuntimeError"):
            list(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_failure_before_an_answer_is_a_503(serve):
    with serve() as served:
        served.engine.fails.set()
        for _ in range(2):  # the request that saw it fail, and one that comes later
            with pytest.raises(openai.InternalServerError) as caught:
                served.openai.chat.completions.create(model="fake", messages=HELLO)
            assert caught.value.status_code == 503
            assert caught.value.code == "engine_stopped"
        assert served.http.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_one_request_is_a_500_with_its_id_and_the_server_goes_on(serve, stream):
    class Poisoned(WatchedEngine):
        def _sample(self, task):
            assert task.seq.request.seed != 13, "a secret"
            return super()._sample(task)

    with serve(engine=Poisoned()) as served:
        body = {"messages": HELLO, "seed": 13, "stream": stream}
        response = served.http.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert response.status_code == 500
        assert (error["code"], error["type"]) == ("internal_error", "server_error")
        assert served.engine.added[0].id in error["message"] and "secret" not in response.text
        assert served.http.post("/v1/chat/completions", json=body | {"seed": 1}).status_code == 200
        assert served.http.get("/health/ready").status_code == 200
