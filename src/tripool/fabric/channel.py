"""Sockets that carry messages: a worker's line to the gateway, and the gateway's switchboard. Know no meaning.

Over one connection nothing is lost or reordered. A connection that breaks may take messages with it, so a worker's line
tells when that happened; zmq alone would quietly connect again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import zmq

from tripool.messages import AnyMessage, FromWorker, ToWorker, WorkerId, decode_from_worker, decode_to_worker, encode

_RECONNECT_MS = 50


def identity_of(worker_id: WorkerId) -> str:
    """How the names of all lines of a life begin. A line speaks for its own alone."""
    return f"{worker_id}."


class Line:
    """From a worker to the gateway. One connection's worth: after `broken`, close it and make another."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> None:
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

    def send(self, message: AnyMessage) -> None:
        """Never waits. What cannot be delivered is lost when the line breaks."""
        self.socket.send(encode(message), zmq.DONTWAIT)

    def receive(self) -> Iterator[ToWorker]:
        """All that is there. What is no message of ours is passed over: it cannot have come from our gateway."""
        while _readable(self.socket):
            data = b"".join(self.socket.recv_multipart(zmq.DONTWAIT))
            try:
                message = decode_to_worker(data)
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


class Switchboard:
    """The gateway's end of all lines. `fileno` becomes readable when there may be something to `receive`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *addresses: str) -> None:
        self.num_strange = 0
        """Messages that could not be read, or whose sender spoke for somebody else."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        for address in addresses:
            self._socket.bind(address)

    @property
    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def waiting(self) -> bool:
        """Whether there is something to receive. Ask after sending, too: that may use up the sign on `fileno`."""
        return _readable(self._socket)

    def send(self, identity: bytes, message: AnyMessage) -> None:
        """Never waits; to a line that is gone it goes nowhere."""
        self._socket.send_multipart((identity, encode(message)), zmq.DONTWAIT)

    def receive(self) -> Iterator[tuple[bytes, FromWorker]]:
        while self.waiting:
            identity, *parts = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                message = decode_from_worker(b"".join(parts))
            except msgspec.DecodeError:
                self.num_strange += 1  # not one of ours, or of another version
                continue
            if not identity.startswith(identity_of(message.worker_id).encode()):
                self.num_strange += 1
                continue
            yield identity, message

    def close(self) -> None:
        self._socket.close(0)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
