"""A local channel keeps the borders of messages, never waits to send, and notices the end of its peer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tripool.local_channel import MAX_MESSAGE_BYTES, LocalChannel, StreamChannel


@pytest.fixture
def ends() -> tuple[LocalChannel, LocalChannel]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return LocalChannel(one), LocalChannel(other)


def test_messages_come_as_they_were_sent_until_the_end(ends: tuple[LocalChannel, LocalChannel]) -> None:
    one, other = ends
    assert other.receive() is None and not other.readable
    one.send(b"first")
    one.send(b"x" * 1000)
    one.close()
    assert other.readable
    received = [other.receive(wait_s) for wait_s in (0.0, 60.0)]
    assert received[1] == b"x" * 1000, "valid until the next call"
    assert other.receive(60.0) == b"", "the peer is gone"
    with pytest.raises(OSError):
        other.send(b"too late")
    other.close()


def send_much(channel: LocalChannel) -> None:
    for _ in range(10_000):
        channel.send(bytes(1000))


def test_a_peer_that_does_not_read_is_not_waited_for(ends: tuple[LocalChannel, LocalChannel]) -> None:
    one, other = ends
    with pytest.raises(BlockingIOError):
        send_much(one)
    assert other.receive() == bytes(1000)
    one.close()
    other.close()


def test_channels_may_share_a_buffer_and_nothing_listens_nowhere(tmp_path: Path) -> None:
    shared = memoryview(bytearray(MAX_MESSAGE_BYTES))
    for text in (b"one", b"two"):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            channel = LocalChannel(here, shared)
            there.send(text)
            assert channel.receive() == text and shared[:3] == text
            channel.close()
    assert LocalChannel.connect(tmp_path / "nobody") is None


def pair() -> tuple[StreamChannel, StreamChannel]:
    one, end = StreamChannel.pair()
    return one, StreamChannel(end)


def test_a_stream_keeps_the_borders_of_messages_of_any_size() -> None:
    one, other = pair()
    assert other.receive() == [] and other.receive(0.001) == []
    sent = [b"", b"small", bytes(300_000), b"x" * 5_000_000, b"last"]
    for message in sent:
        one.send_soon(message)  # more than the system takes at once: the rest waits in order
    received: list[bytes] = []
    while len(received) < len(sent):
        more = other.receive(60.0)
        assert more, "nothing came in time"
        received += more
    assert received == sent
    other.send(b"answer")
    other.close()
    assert one.receive(60.0) == [b"answer"], "what was sent before the end arrives"
    with pytest.raises(ConnectionError):
        one.receive(None)
    one.wait_closed()
    one.send_soon(b"too late: receive says so")
    one.close()


def read_all(channel: StreamChannel) -> None:
    while channel.receive(60.0):
        pass


def test_a_stream_that_is_not_read_is_not_waited_for_and_can_be_closed() -> None:
    one, other = pair()
    for _ in range(100):
        one.send_soon(bytes(100_000))
    one.close()
    with pytest.raises(ConnectionError):
        read_all(other)
    other.close()
