"""Authenticated connections between hosts: messages and raw bytes over TCP, encrypted unless the network is trusted.

| bytes | from | contents |
|---|---|---|
| 48 | client | greeting: magic, protocol, trust, random nonce |
| 48 | server | greeting |
| 32 | client | proof that it knows the token, over both greetings |
| 33 | server | 1 and its own proof; or 0: the client's was wrong |

Nothing longer is read from anybody who has not proved that. Then TLS, with the certificate that the token gives; on a
trusted network plain TCP. After that, messages with their length before them, and bytes whose number a message named.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import secrets
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from tripool.cache.copying import checksum_of, hashed_parts
from tripool.hosts.errors import HostError, NotAHost, WrongProtocol, WrongToken, WrongTrust
from tripool.hosts.keys import HostKeys
from tripool.messages import strictly

PROTOCOL = 1
MAGIC = b"TRIPOOL\x02"
_GREETING = struct.Struct(f"<{len(MAGIC)}sHB5x32s")
_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 2**22
GREET_S = 4.0
"""Longest time for a greeting and its proofs."""
CONNECT_S, _RESOLVE_S = 3.0, 4.0
_VANISHED = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 12_000}
"""Seconds, and milliseconds for the last, as the system has them."""
_TIME = struct.Struct("@ll")
"""Seconds and microseconds, as the system has them."""
_MANY = 64
"""Buffers in one system call."""
_PATIENT_S = 1.0
"""Timeouts from here on may be noticed late: one system call then receives all bytes."""
_TCP_INFO_BYTES = 152
_TRIPS = struct.Struct("<68xI76xI")
"""Linux' `struct tcp_info`: the smoothed round trip and the shortest, in microseconds."""
_ACKNOWLEDGED = struct.Struct("<24xI28xI")
"""Segments under way, and milliseconds since something was acknowledged."""

T = TypeVar("T")


class Connection:
    """For one thread at a time in each direction. `timeout`: longest time without progress, then OSError."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._encrypted = isinstance(end, ssl.SSLSocket)
        self._wanted_s = end.gettimeout()
        self._in_system: dict[int, float | None] = {}
        """A plain connection waits in the system, which then needs one call for all bytes: its timeouts, as set."""
        if not self._encrypted:
            end.settimeout(None)

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def own_address(self) -> str:
        """Of this side: its link."""
        return str(self._end.getsockname()[0])

    @property
    def peer_address(self) -> str:
        host, port = self._end.getpeername()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def num_under_way(self) -> int | None:
        """Bytes written that the other side has not acknowledged; None: the system does not say."""
        if sys.platform != "linux":
            return None
        return int.from_bytes(fcntl.ioctl(self._end.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def round_trip_us(self) -> tuple[int, int] | None:
        """Now, and of an idle link; None: the system does not say."""
        info = self._tcp_info()
        if info is None:
            return None
        now_us, least_us = _TRIPS.unpack_from(info)
        return now_us, min(now_us, least_us)

    def acknowledged(self) -> tuple[int, float, float] | None:
        """How many segments are under way, seconds since the other system has acknowledged something, and the round
        trip's; None: the system does not say."""
        info = self._tcp_info()
        if info is None:
            return None
        num_under_way, passed_ms = _ACKNOWLEDGED.unpack_from(info)
        return num_under_way, passed_ms / 1e3, _TRIPS.unpack_from(info)[0] / 1e6

    def _tcp_info(self) -> bytes | None:
        if sys.platform != "linux":
            return None
        info = self._end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return info if len(info) == _TCP_INFO_BYTES else None

    @property
    def pending(self) -> bool:
        """Whether bytes were decrypted that are not read yet: the socket itself need not be readable then."""
        return isinstance(self._end, ssl.SSLSocket) and self._end.pending() > 0

    def timeout(self, seconds: float | None) -> None:
        if self._encrypted:
            self._end.settimeout(seconds)
        self._wanted_s = seconds

    def _wait_in_system(self, direction: int) -> None:
        """`direction`: SO_RCVTIMEO or SO_SNDTIMEO."""
        known = direction in self._in_system and self._in_system[direction] == self._wanted_s
        if self._encrypted or known:
            return
        seconds = 0.0 if self._wanted_s is None else max(self._wanted_s, 1e-3)  # 0: for ever
        self._end.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(int(seconds), int(seconds % 1 * 1e6)))
        self._in_system[direction] = self._wanted_s

    def unblock(self) -> None:
        """From now on nothing waits: `read_some` and `write_some` take what there is, or raise."""
        self._end.settimeout(0.0)

    def send(self, message: msgspec.Struct) -> None:
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, data: bytes) -> None:
        self.write([memoryview(_LENGTH.pack(len(data)) + data)])

    def send_with(self, message: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        """A message and the bytes that it tells of: the other side wakes up once for both."""
        data = msgspec.msgpack.encode(message)
        self.write([memoryview(_LENGTH.pack(len(data)) + data), *buffers])

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Raises OSError when the connection ends, msgspec.DecodeError for what is no such message."""
        return strictly(decoder, memoryview(self.receive_bytes()))

    def receive_bytes(self) -> bytearray:
        head = bytearray(_LENGTH.size)
        self.read_into(memoryview(head))
        (size,) = _LENGTH.unpack(head)
        if size > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes")
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data

    def write(self, buffers: Sequence[memoryview]) -> None:
        """All of them, from where they are."""
        if self._encrypted:
            for buffer in buffers:
                self._end.sendall(buffer)
            return
        self._wait_in_system(socket.SO_SNDTIMEO)
        waiting = [buffer for buffer in buffers if buffer.nbytes]
        while waiting:
            sent = _in_time(self._end.sendmsg, waiting[:_MANY])
            while waiting and sent >= waiting[0].nbytes:
                sent -= waiting.pop(0).nbytes
            if sent:
                waiting[0] = waiting[0][sent:]

    def read_into(self, buffer: memoryview) -> None:
        """Until it is full."""
        self._wait_in_system(socket.SO_RCVTIMEO)
        # A call that waits for all bytes returns some when the time is over, and the next one waits as long again.
        patient = not self._encrypted and (self._wanted_s is None or self._wanted_s >= _PATIENT_S)
        while buffer.nbytes:
            count = _in_time(self._end.recv_into, buffer, 0, socket.MSG_WAITALL if patient else 0)
            if not count:
                raise ConnectionResetError("the other side has closed the connection")
            buffer = buffer[count:]

    def read_summed(self, buffer: memoryview) -> int:
        """Until it is full; returns the checksum, taken part by part while the bytes are in the core's cache."""
        hashes = []
        for part in hashed_parts(buffer.nbytes):
            self.read_into(buffer[part])
            hashes.append(xxh3_64_intdigest(buffer[part]))
        return checksum_of(hashes)

    def read_some(self, buffer: memoryview) -> int:
        """What is there, at least one byte; 0: the other side has closed."""
        self._wait_in_system(socket.SO_RCVTIMEO)
        return self._end.recv_into(buffer)

    def write_some(self, buffer: memoryview) -> int:
        return self._end.send(buffer)

    def shut(self) -> None:
        """End it for both directions, from any thread: its readers and writers notice."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def _in_time(call: Callable[..., int], *arguments: object) -> int:
    try:
        return call(*arguments)
    except BlockingIOError as error:  # how the system tells it
        raise TimeoutError("timed out") from error


def parse_address(address: str) -> tuple[str, int]:
    """`tcp://HOST:PORT` or `HOST:PORT`; IPv6 addresses in brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if "//" in address.removeprefix("tcp://") or not host or not port.isdecimal() or not 0 <= int(port) < 2**16:
        hint = "it is tcp://HOST:PORT, as the line that `tripool serve --listen` prints"
        raise HostError(f"'{address[:80]}' is no address of a host", hint=hint, step="address")
    return host, int(port)


def dial(address: str, keys: HostKeys, *, timeout_s: float = CONNECT_S) -> Connection:
    """Connect and authenticate. Raises HostError, which names the step and the remedy, within a few seconds."""
    host, port = parse_address(address)
    try:
        end = socket.create_connection((_resolved(host), port), timeout_s)
    except (socket.gaierror, UnicodeError) as error:
        hint = "is the name right, and known to this machine? An address of numbers works, too"
        raise HostError(f"no host is called '{host}'", hint=hint, step="address") from error
    except queue.Empty as error:
        hint = "does this machine reach its name servers? An address of numbers needs none"
        raise HostError(
            f"no name server says within {_RESOLVE_S:g} s where '{host}' is", hint=hint, step="address"
        ) from error
    except TimeoutError as error:
        hint = (
            f"is {host} the right address, and reachable from here? A firewall may drop packets to port {port}, "
            "or those that come back"
        )
        raise HostError(f"{host}:{port} does not answer within {timeout_s:g} s", hint=hint) from error
    except ConnectionRefusedError as error:
        hint = f"is the server running there, with `--listen`, and on port {port}?"
        raise HostError(f"nothing listens at {host}:{port}", hint=hint) from error
    except OSError as error:
        hint = "is there a network route from this machine to that address?"
        raise HostError(f"{host}:{port} cannot be reached: {error.strerror or error}", hint=hint) from error
    try:
        return _greet_as_client(_prepared(end), keys, f"{host}:{port}")
    except BaseException:
        end.close()
        raise


def _resolved(host: str) -> str:
    """The first address of a name. Name servers that do not answer are waited for no longer than this allows."""
    found: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
        except (OSError, UnicodeError) as error:
            found.put(error)

    threading.Thread(target=look, daemon=True).start()
    address = found.get(timeout=_RESOLVE_S)
    if isinstance(address, Exception):
        raise address
    return address


def _greet_as_client(end: socket.socket, keys: HostKeys, address: str) -> Connection:
    ours = _GREETING.pack(MAGIC, PROTOCOL, keys.trusted, secrets.token_bytes(32))
    deadline_s = time.monotonic() + GREET_S
    try:
        end.sendall(ours)
        theirs = _read(end, _GREETING.size, deadline_s)
        _check_greeting(theirs, keys, address)
        end.sendall(keys.proof(b"client", ours + theirs))
        reply = _read(end, 33, deadline_s)
    except TimeoutError as error:
        hint = "a firewall may let packets pass in one direction only; or another program listens there"
        raise NotAHost(f"{address} accepts connections and says nothing", hint=hint) from error
    except OSError as error:
        hint = "is that the port of `--listen`? The server may also have too many connections"
        raise NotAHost(f"{address} closed the connection during the greeting", hint=hint) from error
    if reply[:1] != b"\1" or not secrets.compare_digest(reply[1:], keys.proof(b"server", ours + theirs)):
        hint = "copy the token from the line that the server printed at its last start: every start has a new one"
        raise WrongToken(f"{address} has another token", hint=hint)
    return _encrypted(end, keys, server=False)


def _check_greeting(theirs: bytes, keys: HostKeys, address: str) -> None:
    magic, protocol, trusted, _ = _GREETING.unpack(theirs)
    if magic[:7] != MAGIC[:7]:
        hint = "give the port of `--listen`, not that of the HTTP server"
        raise NotAHost(f"what listens at {address} is no host of Tripool", hint=hint)
    if (magic, protocol) != (MAGIC, PROTOCOL):
        hint = "install the same version of tripool on both machines"
        raise WrongProtocol(f"{address} speaks protocol {protocol}, this machine {PROTOCOL}", hint=hint)
    if trusted != keys.trusted:
        theirs_is, ours_is = ("plain", "encrypted") if trusted else ("encrypted", "plain")
        hint = f"{'add' if trusted else 'leave out'} --trusted-network here, as the server's line says"
        raise WrongTrust(f"connections of {address} are {theirs_is}, those of this machine {ours_is}", hint=hint)


def answer(end: socket.socket, keys: HostKeys) -> Connection:
    """The server's side. Raises OSError for a peer that does not know the token, and takes bounded time."""
    end = _prepared(end)
    deadline_s = time.monotonic() + GREET_S
    theirs = _read(end, _GREETING.size, deadline_s)
    if theirs[:7] != MAGIC[:7]:
        raise ConnectionError("not a host of Tripool")
    ours = _GREETING.pack(MAGIC, PROTOCOL, keys.trusted, secrets.token_bytes(32))
    end.sendall(ours)
    if theirs[: _GREETING.size - 32] != ours[: _GREETING.size - 32]:
        raise ConnectionError("another protocol, or another trust: the client reads so in our greeting")
    proof = _read(end, 32, deadline_s)
    if not secrets.compare_digest(proof, keys.proof(b"client", theirs + ours)):
        end.sendall(b"\0" + bytes(32))
        raise ConnectionError("another token")
    end.sendall(b"\1" + keys.proof(b"server", theirs + ours))
    return _encrypted(end, keys, server=True)


def _prepared(end: socket.socket) -> socket.socket:
    end.settimeout(GREET_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The other side may vanish without a word: its connections must not stay for ever.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _VANISHED.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end


def _encrypted(end: socket.socket, keys: HostKeys, *, server: bool) -> Connection:
    if keys.trusted:
        return Connection(end)
    try:
        return Connection(keys.context(server=server).wrap_socket(end, server_side=server))
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        hint = "something between the two machines changes what they send"
        raise WrongToken(f"the connection cannot be encrypted: {error}", hint=hint) from error


def _read(end: socket.socket, size: int, deadline_s: float) -> bytes:
    """Exactly so many bytes. The deadline is for all of them: a byte now and then does not extend it."""
    data = b""
    while len(data) < size:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        end.settimeout(left_s)
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed during the greeting")
        data += more
    end.settimeout(GREET_S)
    return data
