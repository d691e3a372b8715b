"""Wrong starts by their commands, in network namespaces: each is named with its remedy within ten seconds.

pytest -m prove -s tests/hosts/test_misconfigured.py        prints the table
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tripool
from hosts.fleet import Fleet, fleet
from hosts.joining import join_line
from hosts.namespaces import Network, possible
from split.serving import START
from tripool.checkpoints.names import BUNDLED

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not possible("iptables", "faketime"), reason="needs network namespaces, iptables, faketime"),
]
WITHIN_S = 10.0
OTHER_TOKEN = "another-token-of-some-length"


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    said: str
    """What the error, or the step that is told, says."""
    remedy: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    around: Any = field(default_factory=nullcontext)
    """What is so while it runs."""
    host: str = "b"
    told: bool = False
    """It is no reason not to start: it is said, and the worker starts."""


@contextmanager
def dropped(net: Network, name: str, *match: str) -> Iterator[None]:
    net.drop(name, *match)
    try:
        yield
    finally:
        net.drop_nothing(name)


@contextmanager
def other_package(folder: Path, file: str, old: str, new: str) -> Iterator[None]:
    """A copy of this package with one line that is another, but for the bundled model, which it shares."""
    source, copy = Path(tripool.__file__).parent, folder / "tripool"
    shutil.copytree(source, copy, ignore=lambda at, names: ["bundled"] if Path(at).name == "checkpoints" else [])
    (copy / "checkpoints" / "bundled").symlink_to(source / "checkpoints" / "bundled")
    text = (copy / file).read_text("utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1), "utf-8")
    yield


@contextmanager
def small_disk(at: Path) -> Iterator[None]:
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


@contextmanager
def silent_name_server(net: Network) -> Iterator[None]:
    """`ip netns exec` shows a namespace its own resolv.conf: here one of a server that never answers."""
    folder = Path("/etc/netns") / net.namespace("b")
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text(f"nameserver {net.address('c')}\n")
    try:
        with dropped(net, "c", "-p", "udp"):
            yield
    finally:
        shutil.rmtree(folder)


def worker_rows(three: Fleet, folder: Path) -> list[Row]:
    net, (_, _, address, _, token) = three.net, join_line(three.server)
    a, b, http_port = net.address("a"), net.address("b"), three.server.url.rpartition(":")[2]
    right = ("worker", "--join", address, "--token", token, "--role", "decode")
    prefill = (*right[:-1], "prefill")

    def at(where: str) -> tuple[str, ...]:
        return ("worker", "--join", where, *right[3:])

    net.add_address("b", "198.51.100.7")
    (folder / "other" / "model").mkdir(parents=True)
    (folder / "other" / "model" / "config.json").write_text("{}")
    return [
        Row(name="wrong port", said="step 'connect': nothing listens", remedy="--listen", command=at(f"tcp://{a}:9")),
        Row(
            name="the port of HTTP", said="step 'greet'", remedy="not that of the HTTP server",
            command=at(f"tcp://{a}:{http_port}"),
        ),
        Row(
            name="wrong token", said="step 'authenticate'", remedy="copy the token",
            command=(*right[:4], OTHER_TOKEN, *right[5:]),
        ),
        Row(name="no token", said="not a token", remedy="copy the line", command=right[:3]),
        Row(name="no address", said="step 'address'", remedy="tcp://HOST:PORT", command=at("10.0.0.1")),
        Row(
            name="another version", said="step 'version': the worker has version 0.0.1", remedy="the same build",
            command=right, environment={"PYTHONPATH": str(folder / "v")},
            around=other_package(folder / "v", "__init__.py", f'"{tripool.__version__}"', '"0.0.1"'),
        ),
        Row(
            name="another build of the same version", said="the same version with other code",
            remedy="install the same build", command=right, environment={"PYTHONPATH": str(folder / "c")},
            around=other_package(folder / "c", "core.py", "from __future__", "# changed\nfrom __future__"),
        ),
        Row(
            name="a model that the server has not", said="step 'model': the server has no model 'large'",
            remedy="name one of", command=("worker", "large", *right[1:]),
        ),
        Row(
            name="a local copy of another model", said="step 'model'", remedy="leave the path out",
            command=("worker", str(folder / "other" / "model"), *right[1:]),
        ),
        Row(
            name="no route", said="step 'connect'", remedy="network route", command=at("tcp://203.0.113.1:9100"),
        ),
        Row(
            name="packets to the server are dropped", said="does not answer within 3 s", remedy="firewall",
            command=right, around=dropped(net, "a", "-s", b),
        ),
        Row(
            name="packets from the server are dropped", said="does not answer within 3 s",
            remedy="or those that come back", command=right, around=dropped(net, "b", "-s", a),
        ),
        Row(
            name="connections open, and data is dropped", said="accepts connections and says nothing",
            remedy="in one direction", command=right,
            around=dropped(net, "b", "-s", a, "-p", "tcp", "--tcp-flags", "PSH", "PSH"),
        ),
        Row(
            name="the server may not connect to the worker", said="step 'reach'", remedy="firewall",
            command=prefill, around=dropped(net, "b", "-p", "tcp", "--tcp-flags", "SYN,ACK", "SYN"),
        ),
        Row(
            name="an address that only the worker's side knows", said="step 'reach'", remedy="--listen ADDRESS:PORT",
            command=(*right, "--listen", "198.51.100.7:0"),
        ),
        Row(
            name="a name that nobody has", said="step 'address'", remedy="is the name right",
            command=at("tcp://no-such-host.invalid:9100"),
        ),
        Row(
            name="name servers that do not answer", said="no name server says within", remedy="address of numbers",
            command=at("tcp://no-such-host.invalid:9100"), around=silent_name_server(net),
        ),
        Row(
            name="--trusted-network here only", said="step 'greet'", remedy="leave out --trusted-network",
            command=(*right, "--trusted-network"),
        ),
        Row(
            name="no room for the model", said="step 'fetch': no room for", remedy="free some space", command=right,
            environment={"XDG_CACHE_HOME": str(folder / "small")}, around=small_disk(folder / "small"),
        ),
        Row(
            name="a folder that cannot be written", said="step 'fetch': cannot write", remedy="may this user write",
            command=right, environment={"XDG_CACHE_HOME": "/proc/1"},
        ),
        Row(
            name="a port in use", said="step 'listen'", remedy="free port",
            command=(*right, "--listen", f"{b}:9200"), around=net.listening("b", 9200),
        ),
        Row(
            name="an address of another machine", said="step 'listen'", remedy="address of this machine",
            command=(*right, "--listen", f"{a}:0"),
        ),
        Row(
            name="a clock that is an hour off", said="clock: this machine's is 3,600 s ahead", remedy="time server",
            command=right, told=True, environment={
                "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1", "FAKETIME": "+3600",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1", "XDG_CACHE_HOME": str(folder / "kept"),
            },
        ),
    ]  # fmt: skip


def server_rows(three: Fleet) -> list[Row]:
    serve = ("serve", "fake", "--port", "0", "--listen")
    a = three.net.address("a")
    return [
        Row(
            name="serve: a port in use", said="step 'listen'", remedy="a free port", command=(*serve, f"{a}:9100"),
            host="a",
        ),
        Row(
            name="serve: an address of another machine", said="step 'listen'", remedy="address of this machine",
            command=(*serve, "203.0.113.1:9100"), host="a",
        ),
        Row(
            name="serve: no address", said="step 'address'", remedy="tcp://HOST:PORT", command=(*serve, "9100"),
            host="a",
        ),
        Row(
            name="serve: a short token", said="not a token", remedy="at least 20 characters",
            command=(*serve, f"{a}:0", "--token", "short"), host="a",
        ),
    ]  # fmt: skip


def run(row: Row, three: Fleet) -> tuple[float, str]:
    """How long it took, and what it said. A start that is not refused is ended."""
    argv = [*three.net.prefix(row.host), sys.executable, "-c", START, *row.command]
    with ExitStack() as stack:
        stack.enter_context(row.around)
        began_s = time.monotonic()
        process = stack.enter_context(
            subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | row.environment
            )
        )
        said, took_s = "", 0.0
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if row.told and row.said in line:
                took_s = time.monotonic() - began_s
            if line.startswith("ready"):
                process.send_signal(signal.SIGTERM)
        process.wait(60)
        took_s = took_s or time.monotonic() - began_s
    assert row.told or process.returncode not in (0, -signal.SIGKILL), (row.name, said)
    assert not row.told or "ready" in said, (row.name, said)
    return took_s, said


def test_every_wrong_start_is_named_with_its_remedy_within_ten_seconds() -> None:
    with tempfile.TemporaryDirectory() as kept:
        checkpoint = Path(kept) / "model"
        shutil.copytree(BUNDLED["tiny"], checkpoint)  # under another name than the bundled one: it must be fetched
        with fleet(str(checkpoint), "--threads", "1", "--kv-gb", "0.05") as three:
            bad = []
            for row in (*worker_rows(three, Path(kept)), *server_rows(three)):
                took_s, said = run(row, three)
                good = row.said in said and row.remedy in said and took_s < WITHIN_S
                last = [line for line in said.splitlines() if row.said in line] or said.splitlines()[-1:]
                print(f"{row.name:48} {took_s:4.1f} s  {'' if good else 'BAD '}{' '.join(last)}")
                bad += [] if good else [(row.name, took_s, said)]
            assert not bad, bad
            assert three.server.pools()["workers"], "the server has seen all that, and serves"


def test_trust_on_the_servers_side_only_is_named() -> None:
    with fleet("fake", "--trusted-network") as three:
        right = [*join_line(three.server), "--role", "decode"]
        row = Row(name="trusted there", said="step 'greet'", remedy="add --trusted-network", command=right)
        took_s, said = run(row, three)
        assert row.said in said and row.remedy in said and took_s < WITHIN_S, said
        print(f"{'--trusted-network there only':48} {took_s:4.1f} s  {said.splitlines()[-1]}")
