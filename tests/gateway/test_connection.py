"""Clients that send without end, too slowly, too much at once or nonsense, and clients that do not read."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from prometheus_client.parser import text_string_to_metric_families

from gateway.serving import DEADLINE_S, GatedEngine, ScriptedEngine, Served
from tripool.gateway import server as server_module
from tripool.gateway.connection_limits import ConnectionLimits
from tripool.gateway.server import allow_connections

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]
SHORT_TAKE = ConnectionLimits(idle_s=0.05, take_s=0.1)


@contextmanager
def connected(served: Served, *, receive_bytes: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as line:
        line.settimeout(DEADLINE_S)
        if receive_bytes:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        line.connect(served.address)
        yield line


def post(path: str, body: object, *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""]).encode() + raw


def read_all(line: socket.socket) -> bytes:
    """Until the server closes. What was received before a reset counts."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := line.recv(65536):
            received += piece
    return received


def read_answer(line: socket.socket) -> bytes:
    """One answer with a length, on a connection that may stay open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += line.recv(1)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(part.split(b":")[1]) for part in head.split(b"\r\n") if part.startswith(b"content-length"))
    while len(body) < length:
        body += line.recv(length - len(body))
    return head + b"\r\n\r\n" + body


def send_endlessly(line: socket.socket, piece: bytes) -> None:
    """Until the server has had enough."""
    with suppress(ConnectionResetError, BrokenPipeError):
        while True:
            line.sendall(piece)


def code_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def wait_ended(line: socket.socket) -> bool:
    """By the server. Asked of the kernel: a client that does not read cannot find out otherwise."""
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    return bool(poll.poll(DEADLINE_S * 1000))


def ended_by_code(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {
        sample.labels["code"]: sample.value
        for family in families
        if family.name == "tripool_connections_ended"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


# ---- too much ----------------------------------------------------------------------------------------------------

TOO_LARGE = {
    "url": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
    "one header": HEALTH + b"x-long: " + b"a" * 70_000 + b"\r\n\r\n",
    "many headers": HEALTH + b"a: b\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_head_that_is_too_large_is_refused(server, what):
    with connected(server) as line:
        line.sendall(TOO_LARGE[what])
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert code_of(answer) == "head_too_large"


@pytest.mark.parametrize("beginning", [HEALTH + b"x-endless: ", b"GET /", b"G"], ids=["header", "url", "method"])
def test_an_endless_head_ends(server, beginning):
    with connected(server) as line:
        line.sendall(beginning)
        send_endlessly(line, b"a" * 65536)
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("piece", [b"0;" + b"a" * 1000, b"0\r\n" + b"x: y\r\n" * 100], ids=["extension", "trailers"])
def test_what_surrounds_a_chunked_body_is_bounded(server, piece):
    head = post(CHAT, {}, "transfer-encoding: chunked").replace(b"content-length: 2\r\n", b"")
    with connected(server) as line:
        line.sendall(head.removesuffix(b"{}") + b"1\r\n{\r\n" + piece)
        send_endlessly(line, piece.replace(b"0;", b"").replace(b"0\r\n", b""))
    server.wait_empty()


def test_trailers_are_no_headers(server):
    """They come after the guard and the application have looked: a key or a promise in one must count for nothing."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\nx-tripool-tpot-ms: nonsense\r\n\r\n"
    with connected(server) as line:
        line.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunk)
        assert read_all(line).startswith(b"HTTP/1.1 200 ")


def test_the_rest_of_a_refused_body_is_not_read_for_ever(serve):
    """The answer is there before the body is: who goes on sending is heard for so many bytes and so long."""
    head = post(CHAT, {}).replace(b"application/json", b"text/plain").replace(b"length: 2", b"length: 999999999999")
    with serve(limits=ConnectionLimits(unwanted_bytes=10**6)) as served, connected(served) as line:
        line.sendall(head)
        assert read_answer(line).startswith(b"HTTP/1.1 415 ")
        send_endlessly(line, b"a" * 65536)
    with serve(limits=ConnectionLimits(leftover_s=0.05)) as served, connected(served) as line:
        line.sendall(head)
        assert read_answer(line).startswith(b"HTTP/1.1 415 ")
        assert wait_ended(line)


@pytest.mark.parametrize("size", [1, 2 * 10**6])
def test_a_refused_body_that_ends_leaves_the_connection_usable(server, size):
    """Also a long one, of which the rest is read a piece at a time."""
    with connected(server) as line:
        line.sendall(post(CHAT, {"messages": "a" * size}).replace(b"application/json", b"text/plain"))
        assert read_answer(line).startswith(b"HTTP/1.1 415 ")
        line.sendall(HEALTH + b"\r\n")
        assert read_answer(line).startswith(b"HTTP/1.1 200 ")


# ---- too slow ----------------------------------------------------------------------------------------------------


def test_half_a_head_is_waited_for_only_so_long(serve):
    with (
        serve(limits=ConnectionLimits(head_s=1.0)) as served,
        connected(served) as first,
        connected(served) as second,
        connected(served) as silent,
    ):
        first.sendall(HEALTH)
        second.sendall(HEALTH + b"\r\n")
        assert read_answer(second).startswith(b"HTTP/1.1 200 ")
        second.sendall(HEALTH)
        for line in (first, second):
            answer = read_all(line)
            assert answer.startswith(b"HTTP/1.1 408 ") and code_of(answer) == "head_too_slow"
        assert read_all(silent) == b"", "nothing was asked, so nothing is answered"


def test_an_idle_connection_is_closed(serve):
    with serve(limits=ConnectionLimits(idle_s=0.05)) as served, connected(served) as line:
        line.sendall(HEALTH + b"\r\n")
        assert read_answer(line).startswith(b"HTTP/1.1 200 ")
        assert read_all(line) == b""


@pytest.mark.parametrize("client", [httpx.Limits(), DEFAULT_CONNECTION_LIMITS], ids=["httpx", "openai"])
def test_clients_give_up_an_idle_connection_first(client):
    """The other way round a request may be sent just as the server closes: `ReadError`, seen under load."""
    assert client.keepalive_expiry is not None
    assert ConnectionLimits().idle_s >= 3 * client.keepalive_expiry


# ---- too many ----------------------------------------------------------------------------------------------------


def test_half_open_connections_make_room_for_newcomers(serve):
    with serve(limits=ConnectionLimits(max_open=4)) as served:
        lines = [socket.create_connection(served.address, timeout=DEADLINE_S) for _ in range(12)]
        try:
            for line in lines:
                with suppress(OSError):
                    line.send(HEALTH)
            assert wait_ended(lines[0])
            for _ in range(3):
                assert served.http.get("/health").status_code == 200
            assert ended_by_code(served)["too_many_connections"] >= 8
        finally:
            for line in lines:
                line.close()


def test_when_all_connections_wait_for_answers_a_new_one_is_refused(serve):
    engine = GatedEngine()
    with serve(engine=engine, limits=ConnectionLimits(max_open=1)) as served, connected(served) as first:
        first.sendall(post(CHAT, {"messages": HELLO, "max_tokens": 1}))
        assert engine.wait_busy()
        with connected(served) as second:
            answer = read_all(second)
        assert answer.startswith(b"HTTP/1.1 503 ") and code_of(answer) == "too_many_connections"
        assert b"retry-after: 1" in answer
        engine.in_flight.set()
        assert read_answer(first).startswith(b"HTTP/1.1 200 ")


def test_files_are_allowed_for_or_connections_given_up(monkeypatch):
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(server_module.resource, "setrlimit", lambda _, limits: given.append(limits))
    for soft, hard, may_open in ((1024, 10**6, 4096), (1024, 2048, 1024), (256, 256, 128), (10**6, 10**6, 4096)):
        monkeypatch.setattr(server_module.resource, "getrlimit", lambda _, found=(soft, hard): found)
        assert allow_connections(4096) == may_open
    assert given == [(5120, 10**6), (2048, 2048)]


# ---- out of turn, or not HTTP ------------------------------------------------------------------------------------


def test_a_pipelined_request_is_dropped_and_the_connection_closed(serve):
    engine = ScriptedEngine(" pool")
    with serve(engine=engine) as served, connected(served) as line:
        line.sendall(2 * post(CHAT, {"messages": HELLO, "max_tokens": 3}))
        answer = read_all(line)
        assert answer.count(b"HTTP/1.1") == 1 and answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answer
        assert len(engine.added) == 1


def test_hanging_up_after_a_pipelined_request_cancels(serve):
    """The request in front must hear of it, not only the last one."""
    with serve(context_tokens=10**9) as served:
        for stream in (False, True):
            with connected(served) as line:
                line.sendall(2 * post(CHAT, {"messages": HELLO, "ignore_eos": True, "stream": stream}))
                assert served.engine.wait_busy()
            assert served.engine.wait_idle()
            served.wait_empty()


UPGRADE = b"connection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\n"
STRANGE = {
    "websocket": (HEALTH + UPGRADE + b"upgrade: websocket\r\nsec-websocket-key: eA==\r\n\r\n\x81\x85", b"200"),
    "h2c": (HEALTH + UPGRADE + b"upgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"200"),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04", b"400"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), b"400"),
    "nonsense": (b"\x00\xff" * 100, b"400"),
    "connect": (b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n", b"400"),
    "no path": (b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
    "bytes in the path": (b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n", b"400"),
    "two lengths": (post(CHAT, {}, "content-length: 7"), b"400"),
    "length and chunks": (post(CHAT, {}, "transfer-encoding: chunked"), b"400"),
    "negative length": (post(CHAT, {}).replace(b"length: 2", b"length: -2"), b"400"),
    "huge length": (post(CHAT, {}).replace(b"length: 2", b"length: " + b"9" * 5000), b"400"),
}


def test_strange_beginnings_end_cleanly(serve, capfd):
    with serve() as served:
        for what, (sent, status) in STRANGE.items():
            with connected(served) as line:
                line.sendall(sent)
                answer = read_all(line)
            assert answer.split(b" ", 2)[1] == status, (what, answer)
            if status == b"400":
                assert code_of(answer) == "not_http", what
        assert served.http.get("/health").status_code == 200
    assert capfd.readouterr().err == ""


# ---- clients that do not read --------------------------------------------------------------------------------------


def test_an_unread_stream_ends(serve):
    with serve(engine=ScriptedEngine(" pool" * 20_000, context_tokens=10**9), limits=SHORT_TAKE) as served:
        with connected(served, receive_bytes=2048) as line:
            body = {"messages": HELLO, "stream": True, "request_id": "deaf", "max_tokens": 15_000}
            line.sendall(post(CHAT, body))
            assert served.engine.wait_busy()
            assert served.engine.wait_idle()
            assert wait_ended(line)
        served.wait_empty()
        reported = served.http.get("/v1/requests/deaf/explain").json()
        assert (reported["state"], reported["error"]) == ("cancelled", "slow_reader")
        assert ended_by_code(served) == {"slow_reader": 1}


def test_an_unread_answer_ends(serve):
    """Computed and written, it takes no slot any more: but memory and a connection."""
    long = ScriptedEngine(" pool", context_tokens=10**9)  # whose context has room for the text
    with serve(engine=long, limits=SHORT_TAKE, max_body_bytes=2**20) as served:
        for connection in ("close", "keep-alive"):
            with connected(served, receive_bytes=2048) as line:
                line.sendall(post("/tokenize", {"prompt": "pool " * 40_000}, f"connection: {connection}"))
                assert wait_ended(line)
        assert ended_by_code(served) == {"slow_reader": 2}


def test_a_slow_reader_that_goes_on_reading_gets_everything(serve):
    """What it must take within the deadline is little: here it always does, since the deadline is long."""
    long, limits = ScriptedEngine(" pool", context_tokens=10**9), ConnectionLimits(idle_s=0.05)
    with serve(engine=long, limits=limits) as served, connected(served, receive_bytes=2048) as line:
        line.sendall(post("/tokenize", {"prompt": "pool " * 30_000}))
        received = bytearray()
        until_s = time.monotonic() + DEADLINE_S
        while (piece := line.recv(4096)) and time.monotonic() < until_s:
            received += piece
        assert json.loads(received.partition(b"\r\n\r\n")[2])["count"] >= 30_000
