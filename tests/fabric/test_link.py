"""A worker's link over real sockets: welcome, lost, welcome again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tripool.fabric import Link, Switchboard
from tripool.fabric.channel import ZmqTransport, read_from_worker
from tripool.messages import PROTOCOL, AnyMessage, Cancel, Drain, FromWorker, Heartbeat, Hello, Welcome, WorkerId

LIFE = WorkerId("decode-0", 5)
HELLO = Hello(PROTOCOL, "decode", LIFE, 1, "m", 64, 1, 64, 10)
DEADLINE_S = 60.0

Gateway = Callable[[], Switchboard]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/g"


@pytest.fixture
def gateway(address: str) -> Iterator[Callable[[], Switchboard]]:
    """Makes switchboards at the same address, one after the other."""
    boards: list[Switchboard[FromWorker]] = []
    with zmq.Context() as context:

        def make() -> Switchboard[FromWorker]:
            boards.append(Switchboard(context, read_from_worker, address))
            return boards[-1]

        yield make
        for board in boards:
            board.close()


@pytest.fixture
def link(address: str) -> Iterator[Link]:
    made = Link(ZmqTransport(address), HELLO)
    yield made
    made.close()


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s


def hear(board: Switchboard, link: Link, kind: type[AnyMessage]) -> tuple[bytes, AnyMessage]:
    found: list[tuple[bytes, AnyMessage]] = []

    def heard() -> bool:
        link.poll(0.01)
        found.extend(pair for pair in board.receive() if isinstance(pair[1], kind))
        return bool(found)

    until(heard)
    return found[-1]


def welcome(board: Switchboard, link: Link, epoch: int) -> bytes:
    line, _ = hear(board, link, Hello)
    board.send(line, Welcome(epoch, 0.05))
    until(lambda: link.poll(0.01) == [] and link.welcome)
    return line


def test_it_is_welcomed_and_then_hears_and_speaks(link: Link, gateway: Gateway) -> None:
    board = gateway()
    line = welcome(board, link, 1)
    board.send(line, Cancel("r", 1))
    heard: list[AnyMessage] = []
    until(lambda: bool(heard.extend(link.poll(0.01) or []) or heard))
    assert heard == [Cancel("r", 1)]
    heartbeat = Heartbeat(LIFE, 3, 0, 0, 0)
    link.heartbeat(heartbeat)
    assert hear(board, link, Heartbeat)[1] == heartbeat


def test_what_comes_before_the_welcome_is_not_heard(link: Link, gateway: Gateway) -> None:
    board = gateway()
    line, _ = hear(board, link, Hello)
    board.send(line, Drain())
    board.send(line, Welcome(1, 0.05))
    heard: list[AnyMessage] = []
    until(lambda: bool(heard.extend(link.poll(0.01) or []) or link.welcome))
    assert heard == []


def test_a_dead_gateway_is_noticed_at_once_and_the_next_one_is_greeted(link: Link, gateway: Gateway) -> None:
    board = gateway()
    first = welcome(board, link, 1)
    board.close()
    until(lambda: link.poll(0.01) is None)
    assert not link.welcome
    second = welcome(gateway(), link, 2)
    assert first != second, "what is sent to the old line must reach nobody"


def test_another_epoch_means_that_all_is_lost(link: Link, gateway: Gateway) -> None:
    board = gateway()
    line = welcome(board, link, 1)
    board.send(line, Welcome(2, 0.05))
    until(lambda: link.poll(0.01) is None)


def test_silence_is_noticed(gateway: Gateway, address: str) -> None:
    now_s = [0.0]
    link = Link(ZmqTransport(address), HELLO, clock=lambda: now_s[0])

    def poll() -> list[AnyMessage] | None:
        now_s[0] += 0.05
        return link.poll(0.001)

    board = gateway()
    found: list[bytes] = []
    until(lambda: bool(poll() or found.extend(line for line, _ in board.receive()) or found))
    board.send(found[-1], Welcome(1, 0.05))
    until(lambda: poll() == [] and link.welcome)
    until(lambda: poll() is None)
    assert link.silent_s > 3.0
    link.close()


def test_what_is_no_message_is_passed_over(link: Link, gateway: Gateway, address: str) -> None:
    board = gateway()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        stranger.send(b"\xff\x00 not ours")
        stranger.send_multipart([b"", b"", b"\x93"])
        welcome(board, link, 1)
