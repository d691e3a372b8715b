"""Attackers on the network of three hosts, real processes: what the wire shows, and who is refused at every port.

pytest -m prove -s tests/hosts/test_attackers.py
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hosts.fleet import Fleet, fleet
from hosts.joining import join_line
from hosts.namespaces import possible
from split.streams import Asked, Clients, expected, make_bodies
from tripool.cache import wire as cache_wire
from tripool.hosts import wire
from tripool.hosts.connection import MAGIC, PROTOCOL, dial, parse_address
from tripool.hosts.errors import HostError
from tripool.hosts.keys import HostKeys, new_token

pytestmark = [pytest.mark.prove, pytest.mark.skipif(not possible(), reason="needs network namespaces")]
PLANTED = [137, 23, 211, 89, 201, 66, 154, 31, 240, 97, 118, 179, 45, 222, 71, 163]
"""Token ids of a prompt that is looked for on the wire."""
CAPTURE = """
import socket, sys
ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in sys.argv[2:]]
import select
for end, name in zip(ends, sys.argv[2:]): end.bind((name, 0))
print(flush=True)
with open(sys.argv[1], "wb") as file:
    while sys.stdin not in (ready := select.select([sys.stdin, *ends], [], [])[0]):
        for end in ready: file.write(end.recv(70_000))
"""
MORE_BYTES = 96 * 2**20
"""All processes together may take so much more while they are attacked."""


@contextmanager
def captured(three: Fleet, *names: str) -> Iterator[Callable[[], bytes]]:
    """Every packet to and from these hosts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packets"
        command = [*three.net.in_switch, sys.executable, "-c", CAPTURE, str(path), *(f"p{name}" for name in names)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()

            def end() -> bytes:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(30)
                return path.read_bytes()

            yield end
            if process.poll() is None:
                end()


def encodings(tokens: list[int]) -> dict[str, bytes]:
    packed = b"".join(map(msgspec.msgpack.encode, tokens))
    sizes = {f"{8 * size} bits": b"".join(each.to_bytes(size, "little") for each in tokens) for size in (2, 4, 8)}
    return {"msgpack": packed, "JSON": ",".join(map(str, tokens)).encode(), **sizes}


def events(tokens: list[int]) -> list[bytes]:
    """The part of each token's message that says which it is, as it leaves a decode worker."""
    encode = msgspec.msgpack.encode
    return [encode("index") + encode(index) + encode("token_id") + encode(token) for index, token in enumerate(tokens)]


def ask(three: Fleet, bodies: list[dict[str, Any]]) -> None:
    outcomes = asyncio.run(Clients(three.server.url, [Asked(body) for body in bodies]).run())
    assert [(one.error, one.tokens) for one in outcomes] == [(None, expected(body)) for body in bodies]


@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted"])
def test_what_the_wire_shows(trusted: bool) -> None:
    """Encrypted by default: neither the prompt's nor the answer's tokens. On a trusted network they are found, so
    that they would have been."""
    body = {"prompt": PLANTED * 40, "seed": 1, "n": 1, "max_tokens": 40, "ignore_eos": True}
    with fleet("fake:step_ms=2,blocks=2048", *(["--trusted-network"] if trusted else [])) as three:
        options = ["--trusted-network"] if trusted else []
        with captured(three, "b", "c") as end:
            three.join("b", *options)
            three.join("c", "--cache-gb", "0.05", *options)
            three.wait(3)
            ask(three, [body] * 4)
            packets = end()
        token = join_line(three.server)[-1]
    prompt = [f"prompt in {name}" for name, data in encodings(PLANTED).items() if data in packets]
    # The first token is the prefill worker's, on host A; the others come from B or C, step by step.
    answer = [event in packets for event in events(expected(body)[0])[1:]]
    assert len(packets) > 50_000
    assert MAGIC in packets, "the greeting is plain: what was captured is what hosts say"
    assert token.encode() not in packets, "the token never leaves a host"
    if trusted:
        assert prompt, "prompts cross between hosts"
        assert sum(answer) > 0.9 * len(answer), "as do answers, but for what two packets share"
    else:
        assert not prompt and not any(answer)
    mode = "trusted" if trusted else "encrypted"
    print(f"{len(packets):,} bytes of B and C, {mode}: {prompt or 'no prompt'}, {sum(answer)} of {len(answer)} tokens")


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with fleet("fake:blocks=2048") as found:
        found.join("b", "--listen", f"{found.net.address('b')}:9300")
        found.join("c", "--cache-gb", "0.05")
        found.wait(3)
        yield found


def ports(three: Fleet) -> list[tuple[str, int]]:
    """Everything that listens in any of the hosts, as their systems say."""
    found = set()
    for name in "abc":
        for table in ("tcp", "tcp6"):
            read = subprocess.run(
                [*three.net.prefix(name), "cat", f"/proc/net/{table}"], capture_output=True, text=True
            )
            for line in read.stdout.splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # LISTEN
                    found.add((three.net.address(name), int(fields[1].rpartition(":")[2], 16)))
    return sorted(found)


def memory(three: Fleet) -> dict[str, int]:
    """Of each process its own, without what it shares: arenas of KV fill up as they are used."""
    found = {}
    for kind, pid in three.processes().items():
        status = Path(f"/proc/{pid}/status").read_text("ascii")
        found[kind] = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    return found


@contextmanager
def unharmed(three: Fleet) -> Iterator[None]:
    """The same processes before and after, with little more memory, and right answers."""
    ask(three, make_bodies(24, prompt_tokens=300, answer_tokens=30, seed=8))
    before, had = three.processes(), memory(three)
    yield
    ask(three, make_bodies(24, prompt_tokens=300, answer_tokens=30, seed=9))
    assert three.processes() == before, "no process has ended"
    more = {kind: num_bytes - had[kind] for kind, num_bytes in memory(three).items()}
    most = max(more, key=lambda kind: more[kind])
    print(f"{len(before)} processes, {sum(more.values()) / 2**20:+.1f} MiB, of which {most} {more[most] / 2**20:+.1f}")
    assert sum(more.values()) < MORE_BYTES, more
    assert not [line for line in three.server.log if "Traceback" in line]


def say(where: tuple[str, int], data: bytes) -> bytes:
    """What is answered, until the end."""
    heard = b""
    with socket.create_connection(where, 5) as end, suppress(OSError):
        end.settimeout(5)
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        while more := end.recv(4096):
            heard += more
    return heard


def test_noise_at_every_port(three: Fleet) -> None:
    rng, listening = random.Random(3), ports(three)
    host_ports = [where for where in listening if where != parse_address(three.server.url.removeprefix("http://"))]
    assert len(listening) == 4 and len(host_ports) == 3, "HTTP, and one port per host"
    right = MAGIC + struct.pack("<HB5x32s", PROTOCOL, 0, bytes(32))
    with unharmed(three):
        for where in listening:
            for number in range(150):
                data = rng.randbytes(rng.choice([1, 7, 48, 80, 81, 500, 20_000]))
                if number % 3 == 0:
                    data = right[: rng.randint(1, 48)] + data
                if number % 10 == 0:
                    data = b"\xff" * 100_000
                heard = say(where, data)
                assert where not in host_ports or len(heard) <= 48 + 33, "nothing but a greeting and a no"


def test_no_key_a_wrong_one_and_a_recorded_one(three: Fleet) -> None:
    address, keys = join_line(three.server)[2], HostKeys(join_line(three.server)[4])
    where = parse_address(address)
    recorded: list[bytes] = []

    def through(listener: socket.socket) -> None:
        end, _ = listener.accept()
        with end, socket.create_connection(where, 5) as server:
            for source, target, size in ((end, server, 48), (server, end, 48), (end, server, 32), (server, end, 33)):
                recorded.append(source.recv(size, socket.MSG_WAITALL))
                target.sendall(recorded[-1])

    with unharmed(three):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            relaying = threading.Thread(target=through, args=(listener,), daemon=True)
            relaying.start()
            with suppress(HostError):  # the encryption that follows is not passed on
                dial(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys)
            relaying.join(30)
        assert recorded[3][:1] == b"\1", "the handshake was a good one"
        for proof in (recorded[2], bytes(32), random.Random(1).randbytes(32)):
            assert say(where, recorded[0] + proof)[48:49] == b"\0", "and of no use the second time"
        for trusted in (False, True):
            with pytest.raises(HostError):
                dial(address, HostKeys(new_token(), trusted))


def test_connections_that_say_nothing_keep_nobody_out(three: Fleet) -> None:
    address, keys = join_line(three.server)[2], HostKeys(join_line(three.server)[4])
    with unharmed(three), ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(parse_address(address), 5))
        began_s = time.monotonic()
        dial(address, keys).close()
        print(f"400 silent connections; a host connects in {(time.monotonic() - began_s) * 1000:.0f} ms")


def test_whoever_has_the_token_and_sends_nonsense(three: Fleet) -> None:
    rng, keys = random.Random(4), HostKeys(join_line(three.server)[4])
    member = next(one["member"] for one in three.server.pools()["cache"])
    key = bytes(16)
    good = [
        wire.Join("0.2.0", "x", 0.0, "", "any"), wire.ReadFile("fake", "config.json", 0, 100), wire.TryHost("tcp://x"),
        wire.AskMember(member, cache_wire.encode(cache_wire.GetStats(1))), wire.ReadSlots("x.kv", 4096, (0, 1)),
        wire.FindBlocks(member, key, (key,)), wire.StoreBlocks(member, key, (key,), (0,), 0, (64,), (1,)),
        wire.Present(wire.Host("h", "tcp://10.0.0.1:1", {"fake": ("x",)}, ("decode",))), wire.ToCoordinator(),
    ]  # fmt: skip
    hosts = [(name, port) for name, port in ports(three) if f"{name}:{port}" not in three.server.url]
    with unharmed(three):
        for host, port in hosts:
            for number in range(90):
                data = bytearray(msgspec.msgpack.encode(good[number % len(good)]))
                for _ in range(rng.randint(0, 4)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                connection = dial(f"tcp://{host}:{port}", keys)
                with suppress(OSError):
                    if number % 9 == 8:  # as long as a message may be, or longer, of which little comes
                        connection.write([memoryview(struct.pack("<I", rng.choice([2**22, 2**31])) + data)])
                    else:
                        connection.send_bytes(bytes(data))
                        connection.write([memoryview(rng.randbytes(rng.choice([0, 64, 3000])))])
                    connection.timeout(0.02)
                    connection.read_some(memoryview(bytearray(4096)))
                connection.close()
        time.sleep(3.5)  # hosts that were made up are forgotten
