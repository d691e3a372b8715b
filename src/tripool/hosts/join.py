"""A start on another machine, step by step. Each step has a name, a deadline, and says what to do when it fails.

| step | fails when |
|---|---|
| address | the address cannot be read, or its name is unknown |
| connect | nothing listens there, or no packet gets through |
| greet | another program listens, speaks another protocol, or encrypts where this machine does not |
| authenticate | the tokens differ |
| version | the versions, or the code, differ |
| model | the server does not have it, or a local copy is not the same |
| clock | never: clocks that differ are reported, and nothing depends on them |
| listen | the address that this host shall be reached at is not its own, or in use |
| reach | the server cannot connect to this host |
| fetch | there is no room, or the files changed |
| ranks | never: without free ranks the host has a worker of its own |
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tripool
from tripool.hosts.connection import Connection, dial, parse_address
from tripool.hosts.errors import HostError, JoinRefused
from tripool.hosts.keys import HostKeys
from tripool.hosts.leader import WAIT
from tripool.hosts.models import code_identity, fetch_model, files_of, identity_of
from tripool.hosts.wire import (
    ANSWERS,
    MAX_LINKS,
    MAX_SERVING_BYTES,
    Answer,
    Data,
    Host,
    Join,
    Joined,
    JoinGateway,
    No,
    Ranks,
    Serving,
    TakeRanks,
    TryHost,
)

ANSWER_S = 3.0
REACH_S = 8.0
"""The server connects to this host meanwhile."""
_AGAIN_S, _MODEL_S, _FREE_S = 0.5, 600.0, 5.0
FETCH_S = 4.0
"""Longest time without a byte."""
_CLOCK_S = 5.0
_SIOCGIFADDR = 0x8915
"""Linux: the address of a network interface."""

Report = Callable[[str, str], object]
"""Takes the name of a step, and what there is to say about it."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What a host knows when it has joined."""

    joined: Joined
    model_path: str
    """What its worker is given."""


def join(
    address: str,
    keys: HostKeys,
    *,
    model: str,
    path: str | None,
    role: str,
    folder: Path,
    report: Report,
    locate: Callable[[str], Path | None],
    prepare: Callable[[Joined], object] = lambda joined: None,
) -> Admission:
    """`path`: a local copy of the model, if the user named one. `folder`: where fetched models are kept. `locate`: a
    model by its name on this machine. `prepare`: what else can fail, and should before a long fetch."""
    report("connect", f"to {address}")
    connection = dial(address, keys)
    try:
        connection.timeout(ANSWER_S)
        code = code_identity()
        joined = _admitted(connection, Join(tripool.__version__, code, time.time(), model, role), report)
        report("model", f"{joined.model}, as {joined.role}")
        _compare_clocks(joined.clock_s, time.time(), report)
        prepare(joined)
        return Admission(joined, _model_path(connection, joined, path, folder, report, locate))
    except (OSError, msgspec.DecodeError) as error:
        hint = "is the network between the two machines good? Run the same line again"
        raise HostError(f"the server stopped answering: {error}", hint=hint, step="join") from error
    finally:
        connection.close()


def join_gateway(address: str, keys: HostKeys, report: Report) -> Serving:
    """As a gateway: without weights, and nothing needs to reach this host."""
    report("connect", f"to {address}")
    connection = dial(address, keys)
    try:
        connection.timeout(ANSWER_S)
        answer = _asked(connection, JoinGateway(tripool.__version__, code_identity()), "join")
        if not isinstance(answer, Data) or answer.num_bytes > MAX_SERVING_BYTES:
            raise JoinRefused("the server says what no server says", hint="is it of this version?", step="model")
        connection.timeout(FETCH_S)
        told = bytearray(answer.num_bytes)
        connection.read_into(memoryview(told))
        serving = msgspec.msgpack.decode(told, type=Serving)
    except (OSError, msgspec.DecodeError) as error:
        hint = "is the network between the two machines good? Run the same line again"
        raise HostError(f"the server stopped answering: {error}", hint=hint, step="join") from error
    finally:
        connection.close()
    report("model", ", ".join(model.name for model in serving.models))
    return serving


def _admitted(connection: Connection, request: Join, report: Report) -> Joined:
    """The server may still be reading its model's files; it says so at once."""
    until_s, said = time.monotonic() + _MODEL_S, False
    while True:
        try:
            answer = _asked(connection, request, "join")
            assert isinstance(answer, Joined)
            return answer
        except JoinRefused as error:
            if error.step != WAIT or time.monotonic() > until_s:
                raise
            if not said:
                report(WAIT, error.message)
            said = True
            time.sleep(_AGAIN_S)


def _compare_clocks(theirs_s: float, ours_s: float, report: Report) -> None:
    difference_s = ours_s - theirs_s
    if abs(difference_s) > _CLOCK_S:
        side = "ahead of" if difference_s > 0 else "behind"
        report(
            "clock",
            f"this machine's is {abs(difference_s):,.0f} s {side} the server's: nothing depends on it, but logs will "
            "not match; remedy: let both follow a time server",
        )


def _model_path(
    connection: Connection,
    joined: Joined,
    path: str | None,
    folder: Path,
    report: Report,
    locate: Callable[[str], Path | None],
) -> str:
    if not joined.files:
        return joined.path
    if path is not None:
        there = Path(path).expanduser()
        if not there.exists() or identity_of(files_of(there)) != joined.identity:
            problem = f"'{path}' is not the model '{joined.model}' of the server" if there.exists() else f"no '{path}'"
            hint = "leave the path out: the model is then found or fetched; or name the right one"
            raise JoinRefused(problem, hint=hint, step="model")
        return str(there)
    known = locate(joined.model)
    if known is not None and identity_of(files_of(known)) == joined.identity:
        return joined.model
    report("fetch", f"{sum(file.num_bytes for file in joined.files) / 2**20:,.1f} MiB of weights from the server")
    connection.timeout(FETCH_S)
    return str(fetch_model(connection, joined.model, joined.files, folder))


def take_ranks(address: str, keys: HostKeys, model: str, host: Host, report: Report) -> Ranks:
    """What this host shall run of an instance that is spread over hosts; empty if all of its ranks run elsewhere. Those
    of a host that is lost are free after a few seconds: this waits for them."""
    until_s, said = time.monotonic() + _FREE_S, False
    while True:
        connection = dial(address, keys)
        try:
            connection.timeout(ANSWER_S)
            found = _asked(connection, TakeRanks(model, host), "ranks")
        except (OSError, msgspec.DecodeError) as error:
            raise HostError("the server stopped answering", hint="run the same line again", step="ranks") from error
        finally:
            connection.close()
        assert isinstance(found, Ranks)
        if found.ranks or time.monotonic() > until_s:
            return found
        if not said:
            report("ranks", "all ranks of the instance are on other hosts; waiting whether one is lost")
        said = True
        time.sleep(_AGAIN_S)


def listen_for_hosts(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        hint = "give an address of this machine and a free port, or port 0: then one is chosen"
        raise HostError(f"cannot listen at {address}: {error.strerror or error}", hint=hint, step="listen") from error


def address_towards(address: str) -> str:
    """This machine's own address on the way to another one. Nothing is sent."""
    host, port = parse_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 9))
            found = str(probe.getsockname()[0])
    except OSError as error:
        hint = "is the name right, and is there a network route from this machine to it?"
        raise HostError(f"no way to '{host}': {error.strerror or error}", hint=hint, step="address") from error
    return f"[{found}]" if ":" in found else found


def other_addresses(address: str) -> tuple[str, ...]:
    """All addresses of this machine but the given one, with its port: a listener at 0.0.0.0 is reached at each."""
    host, port = parse_address(address)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an address
                data = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(data[20:24]))
    usable = [one for one in found if one != host and not one.startswith("127.")]
    return tuple(f"tcp://{one}:{port}" for one in usable[:MAX_LINKS])


def check_reach(address: str, keys: HostKeys, own_address: str, report: Report) -> None:
    """Whether the server can connect to this host, where a process already listens."""
    report("reach", f"the server connects to {own_address}")
    connection = dial(address, keys)
    try:
        connection.timeout(REACH_S)
        _asked(connection, TryHost(own_address), "reach")
    except JoinRefused as error:
        hint = (
            f"open that port in this machine's firewall for the server, or name a reachable address: "
            f"--listen ADDRESS:PORT (the server says: {error.message})"
        )
        raise HostError(f"the server cannot reach this host at {own_address}", hint=hint, step="reach") from error
    except (OSError, msgspec.DecodeError) as error:
        raise HostError("the server stopped answering", hint="run the same line again", step="reach") from error
    finally:
        connection.close()


def _asked(connection: Connection, request: msgspec.Struct, step: str) -> Answer:
    connection.send(request)
    answer = connection.receive(ANSWERS)
    if isinstance(answer, No):
        raise JoinRefused(answer.message, hint=answer.hint, step=answer.step if step == "join" else step)
    return answer
