"""A local channel keeps the borders of messages, never waits to send, and notices the end of its peer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tripool.local_channel import MAX_MESSAGE_BYTES, LocalChannel


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
