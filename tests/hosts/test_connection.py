"""Connections between hosts: who may talk, what the others are told, and that strangers cost little."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from hosts.in_process import host_server
from tripool.errors import InvalidRequest
from tripool.hosts import connection as module
from tripool.hosts.certificate import self_signed
from tripool.hosts.connection import MAGIC, Connection, answer, dial, parse_address
from tripool.hosts.errors import HostError, NotAHost, WrongProtocol, WrongToken, WrongTrust
from tripool.hosts.keys import HostKeys, check_token, new_token
from tripool.hosts.wire import ANSWERS, REQUESTS, Data, ReadFile

TOKEN = "a-token-that-is-long-enough"
BOTH = pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted"])


@contextmanager
def listening(serve: Callable[[socket.socket], object], times: int = 1) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for _ in range(times):
                end, _ = listener.accept()
                with end:
                    serve(end)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def served(keys: HostKeys, use: Callable[[Connection], object]) -> Callable[[socket.socket], None]:
    def serve(end: socket.socket) -> None:
        try:
            connection = answer(end, keys)
        except (OSError, HostError):
            return
        use(connection)
        connection.close()

    return serve


@BOTH
def test_messages_and_bytes_arrive_as_they_were_sent(trusted: bool) -> None:
    keys, blocks = HostKeys(TOKEN, trusted), [random.Random(n).randbytes(300_000 + n) for n in range(5)]

    def use(connection: Connection) -> None:
        assert connection.receive(REQUESTS) == ReadFile("m", "f", 3, 4)
        connection.send(Data(7))
        connection.write([memoryview(block) for block in blocks])

    with listening(served(keys, use)) as address:
        connection = dial(address, keys)
        connection.send(ReadFile("m", "f", 3, 4))
        assert connection.receive(ANSWERS) == Data(7)
        for block in blocks:
            buffer = bytearray(len(block))
            connection.read_into(memoryview(buffer))
            assert buffer == block
        connection.close()


def test_the_certificate_is_that_of_the_token_and_of_no_other() -> None:
    assert self_signed(b"1" * 32) == self_signed(b"1" * 32) != self_signed(b"2" * 32)


@BOTH
def test_another_token_is_refused_and_named(trusted: bool) -> None:
    entered: list[Connection] = []
    with (
        listening(served(HostKeys(TOKEN, trusted), entered.append)) as address,
        pytest.raises(WrongToken, match=r"authenticate.*another token") as refused,
    ):
        dial(address, HostKeys(new_token(), trusted))
    assert not entered and "copy the token" in refused.value.hint


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    """Mutual: whoever listens must prove it, too."""

    def pretend(end: socket.socket) -> None:
        end.sendall(end.recv(48))
        end.recv(32)
        end.sendall(b"\1" + bytes(32))

    with listening(pretend) as address, pytest.raises(WrongToken):
        dial(address, HostKeys(TOKEN, True))


def test_a_recorded_greeting_is_of_no_use() -> None:
    keys, recorded = HostKeys(TOKEN, True), []
    entered: list[Connection] = []

    def through(end: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", parse_address(real)[1])) as server:
            for source, target, size in ((end, server, 48), (server, end, 48), (end, server, 32), (server, end, 33)):
                data = source.recv(size, socket.MSG_WAITALL)
                recorded.append(data)
                target.sendall(data)

    with listening(served(keys, entered.append), times=2) as real:
        with listening(through) as relayed:
            dial(relayed, keys).close()
        with socket.create_connection(("127.0.0.1", parse_address(real)[1])) as replayed:
            replayed.sendall(recorded[0])
            replayed.recv(48, socket.MSG_WAITALL)
            replayed.sendall(recorded[2])
            assert replayed.recv(33, socket.MSG_WAITALL)[:1] == b"\0"
    assert len(entered) == 1


def test_trust_must_be_the_same_on_both_sides() -> None:
    for server, hint in ((True, "add --trusted-network"), (False, "leave out --trusted-network")):
        with (
            listening(served(HostKeys(TOKEN, server), lambda connection: None)) as address,
            pytest.raises(WrongTrust) as refused,
        ):
            dial(address, HostKeys(TOKEN, not server))
        assert hint in refused.value.hint


def test_what_is_no_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREET_S", 0.2)
    keys = HostKeys(TOKEN)

    def http(end: socket.socket) -> None:
        end.recv(48)
        end.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n" + bytes(10))

    def other_version(end: socket.socket) -> None:
        end.sendall(MAGIC + struct.pack("<HB5x32s", 99, 0, bytes(32)))
        end.recv(48)

    with listening(http) as address, pytest.raises(NotAHost, match="no host of Tripool"):
        dial(address, keys)
    with listening(other_version) as address, pytest.raises(WrongProtocol, match="protocol 99"):
        dial(address, keys)
    with listening(lambda end: end.recv(48)) as address, pytest.raises(NotAHost, match="closed the connection"):
        dial(address, keys)
    with (
        listening(lambda end: end.recv(100, socket.MSG_WAITALL)) as address,
        pytest.raises(NotAHost, match="says nothing"),
    ):
        dial(address, keys)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(HostError, match="nothing listens"):
        dial(f"tcp://127.0.0.1:{port}", keys)


def test_name_servers_that_do_not_answer_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def silent(*_: object, **__: object) -> None:
        never.wait(60)
        raise socket.gaierror

    monkeypatch.setattr(module, "_RESOLVE_S", 0.05)
    monkeypatch.setattr(module.socket, "getaddrinfo", silent)
    with pytest.raises(HostError, match=r"step 'address': no name server says") as refused:
        dial("tcp://somewhere:9100", HostKeys(TOKEN))
    never.set()
    assert "address of numbers" in refused.value.hint


@pytest.mark.parametrize("address", ["", "http://x:1", "x", "tcp://x", "tcp://:9", "tcp://x:99999", "ipc://a:1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(HostError, match="step 'address'"):
        dial(address, HostKeys(TOKEN))


def test_a_token_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert check_token(f"@{tmp_path}/token") == TOKEN
    with pytest.raises(InvalidRequest, match="no token in"):
        check_token(f"@{tmp_path}/none")


def test_a_short_token_is_refused() -> None:
    for token in ("", "short", "with\nline-break-in-the-middle"):
        with pytest.raises(InvalidRequest, match="not a token"):
            check_token(token)


def test_strangers_are_read_no_more_than_a_greeting_of() -> None:
    """Random bytes, right beginnings with wrong ends, lengths that nobody has: refused, and the next one is served."""
    rng, keys, entered = random.Random(5), HostKeys(TOKEN, True), []
    greeting = MAGIC + struct.pack("<HB5x32s", module.PROTOCOL, 1, bytes(32))
    sent = [rng.randbytes(rng.choice([1, 47, 48, 200, 4000])) for _ in range(40)]
    sent += [bytes(greeting[:n]) for n in (1, 8, 20, 47)] + [greeting + rng.randbytes(n) for n in (1, 31, 32, 500)]
    with listening(served(keys, entered.append), times=len(sent) + 1) as address:
        port = parse_address(address)[1]
        for data in sent:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.settimeout(10)
                try:
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
                    answered = len(stranger.recv(1000, socket.MSG_WAITALL))
                except OSError:  # closed before all was said
                    answered = 0
                assert answered <= 48 + 33
        assert not entered
        dial(address, keys).close()
    assert len(entered) == 1


def test_a_message_longer_than_any_is_refused_before_it_is_kept() -> None:
    keys, failed = HostKeys(TOKEN, True), []

    def use(connection: Connection) -> None:
        with pytest.raises(msgspec.DecodeError, match="bytes"):
            connection.receive(REQUESTS)
        failed.append(True)

    with listening(served(keys, use)) as address:
        connection = dial(address, keys)
        connection.write([memoryview(struct.pack("<I", 2**31))])
        with pytest.raises(OSError):
            connection.read_into(memoryview(bytearray(1)))
        connection.close()
    assert failed


@BOTH
def test_what_hosts_send_cannot_be_read_on_the_wire_unless_they_trust_it(trusted: bool) -> None:
    keys, secret, seen = HostKeys(TOKEN, trusted), b"what a tenant has asked" * 50, bytearray()

    def through(end: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", parse_address(real)[1])) as server:
            ways = {end: server, server: end}
            while True:
                for source in select.select(list(ways), [], [], 10)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    seen.extend(data)
                    ways[source].sendall(data)

    def use(connection: Connection) -> None:
        connection.read_into(memoryview(bytearray(len(secret))))
        connection.write([memoryview(secret)])

    with listening(served(keys, use)) as real, listening(through) as relayed:
        connection = dial(relayed, keys)
        connection.write([memoryview(secret)])
        connection.read_into(memoryview(bytearray(len(secret))))
        connection.close()
    assert len(seen) > 2 * len(secret)
    assert (secret[:23] in seen) is trusted
    assert TOKEN.encode() not in seen


def test_strangers_that_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    """There is room for so many that have not proved anything; the oldest of them makes room for the next."""
    with host_server(tmp_path / "a") as running, ExitStack() as stack:
        where = parse_address(running.address)
        silent = [stack.enter_context(socket.create_connection(where, 10)) for _ in range(80)]
        dial(running.address, HostKeys(TOKEN)).close()
        assert silent[0].recv(1) == b"", "it was closed for another one"


class Recorded(socket.socket):
    """Notes the flags of each receiving call."""

    def recv_into(self, buffer: memoryview, num_bytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        self.flags.append(flags)
        return super().recv_into(buffer, num_bytes, flags)


def test_bytes_that_came_before_a_link_was_cut_do_not_make_its_timeout_longer() -> None:
    """A call that waits for all bytes returns these at the end of the timeout, and the next one waits as long again."""
    here, there = socket.socketpair()
    with there, Recorded(fileno=here.detach()) as receiving:
        receiving.flags = []
        connection = Connection(receiving)
        connection.timeout(0.25)
        there.sendall(b"some")
        with pytest.raises(TimeoutError):
            connection.read_into(memoryview(bytearray(64)))
        assert receiving.flags == [0, 0]
        there.sendall(bytes(64))
        connection.timeout(30.0)
        connection.read_into(memoryview(bytearray(64)))
        assert receiving.flags == [0, 0, socket.MSG_WAITALL]
