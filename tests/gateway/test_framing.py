"""Where a request ends: offers to upgrade keep their bodies, and what proxies may read in two ways is refused."""

from __future__ import annotations

import json
import socket

import pytest

from gateway.test_connection import CHAT, HELLO, code_of, connected, post, read_all, read_answer

BODY = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
CHUNKS = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
OFFERS = {
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n",
    "h2c": b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", OFFERS)
def test_a_request_that_offers_an_upgrade_keeps_its_body(server, offer, chunked):
    """Java's HTTP client offers HTTP/2 with every request."""
    framing = b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % len(BODY)
    request = HEAD + OFFERS[offer] + framing + (CHUNKS if chunked else BODY)
    with connected(server) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(request)
        assert read_answer(line).startswith(b"HTTP/1.1 200 ")
        for at in range(len(request)):  # in pieces, on a connection that is kept
            line.sendall(request[at : at + 1])
        assert read_answer(line).startswith(b"HTTP/1.1 200 ")
        line.sendall(request + request)
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer


def test_an_offer_behind_a_refused_body_keeps_its_own(server):
    """Both come in one piece, and the first was answered before its end."""
    offered = HEAD + OFFERS["h2c"] + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    refused = offered.replace(b"application/json", b"text/plain")
    with connected(server) as line:
        line.sendall(refused[:-1])
        assert read_answer(line).startswith(b"HTTP/1.1 415 ")
        line.sendall(refused[-1:] + offered)
        assert read_answer(line).startswith(b"HTTP/1.1 200 ")


def test_an_offer_does_not_loosen_the_bounds(server):
    with connected(server) as line:
        line.sendall(HEAD + OFFERS["h2c"] + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 400 ")
    server.wait_empty()


AMBIGUOUS = {
    "two codings": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "two headers": HEAD + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "chunked twice": HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKS,
    "another": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "identity": HEAD + b"transfer-encoding: identity\r\n\r\n" + CHUNKS,
    "HTTP/1.0": HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "a long length": post(CHAT, {}).replace(b"length: 2", b"length: " + b"0" * 5000 + b"2"),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_a_body_whose_end_can_be_read_in_two_ways_is_refused(server, what):
    with connected(server) as line:
        line.sendall(AMBIGUOUS[what])
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 400 ") and code_of(answer) == "not_http"


def test_chunks_in_any_letters_are_chunks(server):
    with connected(server) as line:
        line.sendall(HEAD + b"Transfer-Encoding:  Chunked \r\nconnection: close\r\n\r\n" + CHUNKS)
        assert read_all(line).startswith(b"HTTP/1.1 200 ")
