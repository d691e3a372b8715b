"""Channels that carry messages between workers, gateways and the coordinator, and their ZeroMQ implementation.

A channel neither loses nor reorders messages while it lasts. One that breaks may lose messages, so it says that it is
broken; ZeroMQ alone would silently connect again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from tripool.messages import (
    AnyMessage,
    FromWorker,
    Heartbeat,
    ToWorker,
    WorkerId,
    decode_from_worker,
    decode_to_worker,
    encode,
)

T = TypeVar("T")
_RECONNECT_MS = 50
_JOIN_S = 2.0
_MAX_MESSAGE_BYTES = 2**26
"""Far more than any worker sends; what is announced longer ends its connection before memory is taken."""


class Channel(Protocol):
    """A worker's end of one connection to the coordinator. After `broken`, close it and connect another."""

    @property
    def broken(self) -> bool: ...

    def send(self, message: AnyMessage) -> None:
        """Never waits. What cannot be delivered is lost when the channel breaks."""

    def wait(self, timeout_s: float) -> None:
        """Until there is something to receive, the channel is broken, or the time is over."""

    def receive(self) -> Iterable[ToWorker]:
        """All that is there."""

    def close(self, *, linger_ms: int = 0) -> None: ...


class HeartbeatSender(Protocol):
    """Sends the latest heartbeat every `every_s / 2`, also while the worker computes a long step."""

    every_s: float
    latest: Heartbeat | None
    """None: nothing is sent."""

    def reconnect(self) -> None:
        """Their channel may lead to a coordinator that was given up."""

    def stop(self) -> None: ...


class Transport(Protocol):
    """Connects one worker to the coordinator. `identity` tells its end which channel a message came by."""

    def connect(self, identity: str) -> Channel: ...

    def heartbeats(self, identity: str) -> HeartbeatSender: ...

    def close(self) -> None: ...


def identity_of(worker_id: WorkerId) -> str:
    """The prefix of the identities of all channels of a worker; a channel carries messages of that worker alone."""
    return f"{worker_id}."


class ZmqTransport:
    def __init__(self, address: str) -> None:
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(self, identity: str) -> Line[ToWorker]:
        return Line(self._context, self._address, identity, decode_to_worker)

    def heartbeats(self, identity: str) -> HeartbeatSender:
        return _HeartbeatThread(self, identity)

    def close(self) -> None:
        self._context.term()


class Line(Generic[T]):
    """A `Channel` over ZeroMQ; also a gateway's end of its connection to the coordinator."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str, read: Callable[[bytes], T]
    ) -> None:
        """`read`: a message from its bytes; raises DecodeError."""
        self._read = read
        self.num_strange = 0
        """Messages that could not be read."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message), zmq.DONTWAIT)

    def wait(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        for source in (self.socket, self.monitor):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))

    @property
    def fileno(self) -> int:
        """Becomes readable when there may be something to `receive`; ask `waiting` after sending and receiving."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def waiting(self) -> bool:
        return _readable(self.socket)

    def receive(self) -> Iterator[T]:
        """Skips what is no message of this protocol: it cannot have come from our coordinator."""
        while _readable(self.socket):
            data = b"".join(self.socket.recv_multipart(zmq.DONTWAIT))
            if not data:
                continue  # the coordinator has looked whether this line is still there
            try:
                message = self._read(data)
            except msgspec.DecodeError:
                self.num_strange += 1
                continue
            yield message

    @property
    def broken(self) -> bool:
        return _readable(self.monitor)

    def close(self, *, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class _HeartbeatThread:
    """A thread with a channel of its own: a long step is no silence, a stopped process is."""

    def __init__(self, transport: ZmqTransport, identity: str) -> None:
        self.every_s = 1.0
        self.latest: Heartbeat | None = None
        self._stopped, self._again = threading.Event(), False
        self._thread = threading.Thread(target=self._main, args=(transport, identity), daemon=True)
        self._thread.start()

    def reconnect(self) -> None:
        self._again = True

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_JOIN_S)

    def _main(self, transport: ZmqTransport, identity: str) -> None:
        line, number = transport.connect(identity), 0
        while not self._stopped.wait(self.every_s / 2 if self.latest is not None else 0.02):
            heartbeat = self.latest
            if self._again and heartbeat is not None:  # welcome again
                self._again, number = False, number + 1
                line.close()
                line = transport.connect(f"{identity}{number}")
            if heartbeat is not None:
                line.send(heartbeat)
        line.close()


def read_from_worker(identity: bytes, data: bytes) -> FromWorker:
    """A channel carries messages of its own worker alone."""
    message = decode_from_worker(data)
    if not identity.startswith(identity_of(message.worker_id).encode()):
        raise msgspec.DecodeError("a message in another worker's name")
    return message


class Switchboard(Generic[T]):
    """The coordinator's end of all lines. `fileno` becomes readable when there may be something to `receive`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], read: Callable[[bytes, bytes], T], *addresses: str
    ) -> None:
        """`read`: a message from its line's identity and its bytes; raises DecodeError."""
        self._read = read
        self.num_strange = 0
        """Messages that could not be read, or whose sender spoke for somebody else."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for address in addresses:
            self._socket.bind(address)

    @property
    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def waiting(self) -> bool:
        """Whether there is something to receive. Ask after sending, too: that may use up the sign on `fileno`."""
        return _readable(self._socket)

    def send(self, identity: bytes, message: msgspec.Struct | None) -> bool:
        """Never waits. False: that line is gone, for good, and the message goes nowhere. None: only to learn that."""
        try:
            self._socket.send_multipart((identity, b"" if message is None else encode(message)), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self) -> Iterator[tuple[bytes, T]]:
        while self.waiting:
            identity, *parts = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                message = self._read(identity, b"".join(parts))
            except msgspec.DecodeError:
                self.num_strange += 1  # not one of ours, of another version, or in somebody else's name
                continue
            yield identity, message

    def close(self) -> None:
        self._socket.close(0)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
