"""A client may be slow for a while, but not over a whole answer."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from gateway.serving import DEADLINE_S, GatedEngine, Serve
from tripool.gateway.stream import BYTES_PER_S, SPARE_S, SlowReaderLimit


def lasting(num_bytes: int, waited_s: float, *, times: int = 10_000) -> int:
    """How many times it can be made to wait."""
    patience = SlowReaderLimit()
    return next((i for i in range(times) if not patience.lasts(num_bytes, waited_s)), times)


def test_who_keeps_up_may_go_on_for_ever() -> None:
    assert lasting(200, 0.0) == 10_000
    assert lasting(BYTES_PER_S, 1.0) == 10_000
    assert lasting(48 * 1024, 2.9) == 10_000


def test_a_little_now_and_then_is_not_enough() -> None:
    assert lasting(48 * 1024, 38.0) == 0, "10 KB every 8 s, until there is room again"
    assert lasting(2**14, 30.0) == 1, "what keeps a connection alone open"
    assert 10 <= lasting(BYTES_PER_S, 3.0) <= 20


def test_one_pause_is_forgiven_and_being_quick_is_not_saved_up() -> None:
    patience = SlowReaderLimit()
    assert all(patience.lasts(2**20, 0.0) for _ in range(100))
    assert patience.lasts(BYTES_PER_S, SPARE_S - 1)
    assert not patience.lasts(BYTES_PER_S, SPARE_S)


class Ticking:
    """Each look takes eight seconds, once it ticks."""

    def __init__(self) -> None:
        self.ticks = threading.Event()
        self._seconds = itertools.count(step=8)

    def __call__(self) -> float:
        return float(next(self._seconds)) if self.ticks.is_set() else 0.0


def test_what_a_client_leaves_unread_does_not_pile_up(serve: Serve) -> None:
    """The engine stops long before the answer's end; a client that reads on gets the error."""
    with serve(context_tokens=10**9) as served, socket.socket() as connection:
        body = {"prompt": "a", "n": 64, "logprobs": 5, "ignore_eos": True, "stream": True, "request_id": "unread"}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(DEADLINE_S)
        connection.connect(served.address)
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        assert connection.recv(300).startswith(b"HTTP/1.1 200")
        assert served.engine.wait_idle()
        assert served.http.get("/load").json()["running"] == 0
        last = b""
        while not last.endswith(b"0\r\n\r\n"):
            got = connection.recv(2**16)
            assert got
            last = last[-1000:] + got
        assert b'"code":"slow_reader"' in last
        served.wait_empty()
        shown = served.http.get("/v1/requests/unread/explain").json()
        assert (shown["state"], shown["error"]) == ("failed", "slow_reader")
        assert shown["completion_tokens"] > 2**18 / 6, "all that was made counts"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_too_slowly_is_cut_off(serve: Serve, stream: bool) -> None:
    """By a clock that makes every part of it wait; the connection itself sees nothing wrong."""
    clock, engine = Ticking(), GatedEngine()
    engine.in_flight.set()
    with serve(engine=engine, clock=clock) as served:
        body: dict[str, Any] = {"prompt": "a", "n": 64, "logprobs": 20, "max_tokens": 80, "ignore_eos": True}
        body |= {"stream": stream, "request_id": "slow"}
        clock.ticks.set()
        with pytest.raises(httpx.TransportError):
            served.http.post("/v1/completions", json=body)
        assert engine.wait_idle()
        served.wait_empty()
        shown = served.http.get("/v1/requests/slow/explain").json()
        assert (shown["state"], shown["error"]) == (("cancelled", "slow_reader") if stream else ("finished", None))
        assert 'code="slow_reader"' in served.http.get("/metrics").text
