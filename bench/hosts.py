"""KV and cache blocks between two hosts, beside bare connections that do nothing else; and how soon a worker serves.

    python bench/hosts.py            two network namespaces, and the start of a worker of the bundled model
    python bench/hosts.py --quick    fewer repetitions
    python bench/hosts.py --only links,decode

Ours is what serves: a worker asks its host's server, which receives, decrypts and checks every block in the worker's
memory; a cached block is looked up at its member, sent, received into the buffer that is to hold it, and checked. The
bare pair sends as many bytes over one connection of the same kind (TLS 1.3 with the same key, or TCP) into as much
memory, and looks at none of them; Mooncake's is one read of its TransferEngine. Sides take turns. Needs root, for
namespaces; links of 1 Gbit/s are token buckets of tc.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import Origin, Row, Worker, print_table, take_turns, write_json

START_S = 6.0
START = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
WITHIN_S = 60.0
LINK_MB_PER_S = 125.0
TINY_BLOCK_BYTES = 368_640
SIDES = str(Path(__file__).with_name("hosts_sides.py"))


# ---- two hosts ------------------------------------------------------------------------------------------------------


class Net:
    """Two namespaces and two links between them: 10.78.0.x and 10.78.1.x, .1 the sender's."""

    def __init__(self) -> None:
        tag = f"hosttransfer{os.getpid() % 10_000}"
        self.names = [f"{tag}a", f"{tag}b"]

    def make(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        one, two = self.names
        for link in range(2):
            _run("ip", "-n", one, "link", "add", f"l{link}", "type", "veth", "peer", "name", f"l{link}", "netns", two)
            for end, name in enumerate(self.names, 1):
                _run("ip", "-n", name, "address", "add", f"10.78.{link}.{end}/24", "dev", f"l{link}")
                _run("ip", "-n", name, "link", "set", f"l{link}", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def limit(self, on: bool) -> None:
        for link in range(2):
            what = ["replace"] if on else ["del"]
            tbf = ["tbf", "rate", "1gbit", "burst", "128k", "latency", "20ms"] if on else []
            _run("ip", "netns", "exec", self.names[0], "tc", "qdisc", *what, "dev", f"l{link}", "root", *tbf)

    def set(self, link: int, state: str) -> None:
        _run("ip", "-n", self.names[0], "link", "set", f"l{link}", state)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Hosts:
    """A sender in one namespace; in the other two host servers, of which the second knows both links."""

    def __init__(self, net: Net, trusted: bool, stack: ExitStack, block_bytes: int, num_blocks: int) -> None:
        self._net, self._trusted, self._stack = net, trusted, stack
        self._base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.sender, folder = self._side(0, "sender")
        kind = {"trusted": trusted, "block_bytes": block_bytes, "num_blocks": num_blocks}
        self._told = self._ask(self.sender, do="sender", folder=str(folder), **kind)
        port = self._told["port"]
        self._folders = []
        for number, links in enumerate(((0,), (0, 1))):
            host, folder = self._side(1, f"host{number}")
            addresses = [f"tcp://10.78.{link}.1:{port}" for link in links]
            self._ask(host, do="host", folder=str(folder), trusted=trusted, addresses=addresses)
            self._folders.append(folder)

    def _side(self, end: int, name: str, prefix: Sequence[str] = ()) -> tuple[Worker, Path]:
        folder = self._base / name
        folder.mkdir()
        command = ["ip", "netns", "exec", self._net.names[end], *prefix, sys.executable, SIDES]
        side = Worker(command, self._base / f"{name}.log")
        self._stack.callback(side.close)
        return side, folder

    def probe(self, name: str, links: int = 1, pinned: Sequence[str] = ()) -> Worker:
        """A worker of the receiving host, `links` to the sender."""
        side, _ = self._side(1, name, pinned)
        where = {"folder": str(self._folders[links - 1]), "trusted": self._trusted, "told": self._told}
        kind = {"do": "decoder"} if pinned else {"do": "probe", "address": "10.78.0.1", "name": name}
        self._ask(side, **kind, **where)
        return side

    def _ask(self, side: Worker, **message: Any) -> dict[str, Any]:
        return side.ask(within_s=WITHIN_S, **message)


@contextmanager
def hosts(trusted: bool, block_bytes: int = 2**20, num_blocks: int = 64) -> Iterator[tuple[Net, Hosts]]:
    with ExitStack() as stack:
        net = Net()
        stack.callback(net.remove)
        net.make()
        yield net, Hosts(net, trusted, stack, block_bytes, num_blocks)


def ask(side: Worker, **message: Any) -> dict[str, Any]:
    return side.ask(within_s=WITHIN_S, **message)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- rows -----------------------------------------------------------------------------------------------------------


def pair_rows(trusted: bool, repetitions: int, repeat: int) -> list[Row]:
    kind, mode = ("TCP", "trusted") if trusted else ("TLS", "encrypted")
    with hosts(trusted) as (net, both):
        probe = both.probe("probe")
        ask(probe, do="store")
        sides = {"ours": lambda _: ask(probe, do="kv")["mb_per_s"], "bare": lambda _: ask(probe, do="bare")["mb_per_s"]}
        if trusted and _has_mooncake():
            there = ask(both.sender, do="mooncake", address="10.78.0.1")
            sides["mooncake"] = lambda _: ask(probe, do="mooncake", own="10.78.0.2", **there)["mb_per_s"]
        for side in sides.values():
            side(0)
        kv = take_turns(sides, repetitions)
        block = take_turns(
            {
                "ours": lambda _: statistics.median(ask(probe, do="block", repeat=repeat)["us"]),
                "bare": lambda _: statistics.median(ask(probe, do="bare", num_blocks=1, repeat=repeat)["us"]),
            },
            repetitions,
        )
        net.limit(True)
        ask(probe, do="kv")
        slow = statistics.median(ask(probe, do="kv")["mb_per_s"] for _ in range(repetitions))
        net.limit(False)
    rows = [
        Row(
            name=f"64 MB of KV, {mode}", ours=kv.median("ours"), peer=kv.median("bare"),
            unit="MB/s", target=0.7, note=f"peer: a bare {kind} pair",
        ),
        Row(
            name=f"1 MB block of another host, {mode}", ours=block.median("ours"),
            peer=block.median("bare"), unit="µs", target=2.0, lower_is_better=True, note=f"peer: a bare {kind} pair",
        ),
        Row(
            name=f"64 MB of KV at 1 Gbit/s, {mode}", ours=slow, peer=LINK_MB_PER_S, unit="MB/s", target=0.9,
            note="peer: the link, headers of packets included",
        ),
    ]  # fmt: skip
    if "mooncake" in sides:
        rows.append(
            Row(
                name="64 MB of KV, trusted, beside Mooncake", ours=kv.median("ours"), peer=kv.median("mooncake"),
                unit="MB/s", target=1.0, note="peer: one read of Mooncake's TransferEngine over TCP, unchecked",
            )
        )  # fmt: skip
    return rows


def _has_mooncake() -> bool:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError:
        return False
    return True


def link_rows(repetitions: int, seconds: float) -> list[Row]:
    """Two links of 1 Gbit/s, and one of them cut while KV arrives."""
    with hosts(True) as (net, both):
        probes = {"one": both.probe("one"), "two": both.probe("two", links=2)}
        net.limit(True)
        sides = {name: lambda _, side=side: ask(side, do="kv")["mb_per_s"] for name, side in probes.items()}
        for side in sides.values():
            side(0)
        rate = take_turns(sides, repetitions)
    with hosts(True, num_blocks=8) as (net, both):
        probe = both.probe("two", links=2)
        net.limit(True)
        longest_s = []
        for state in ("up", "down"):
            ask(probe, do="bulk", on=True)
            time.sleep(seconds)
            net.set(1, state)
            time.sleep(seconds)
            got = ask(probe, do="bulk", on=False)
            assert not got["failed"], "KV was lost"
            longest_s.append(got["longest_s"])
    return [
        Row(
            name="64 MB of KV over two links", ours=rate.median("two"), peer=rate.median("one"), unit="MB/s",
            target=1.8, note="peer: one link; 1 Gbit/s each",
        ),
        Row(
            name="one of two links cut", ours=longest_s[1], peer=0.5, unit="s", target=1.0, lower_is_better=True,
            note=f"longest time between two arrivals of 8 MB, two at a time; uncut {longest_s[0]:.2f} s",
        ),
    ]  # fmt: skip


def cache_rows(repetitions: int, repeat: int) -> list[Row]:
    """Cache reads alone, and while KV takes what it gets of the same link."""
    with hosts(True) as (net, both):
        reader, bulk = both.probe("reader"), both.probe("bulk")
        ask(reader, do="store")
        net.limit(True)
        took: dict[str, list[float]] = {"alone": [], "beside": []}
        rates, missed = [], 0
        for _ in range(repetitions):
            took["alone"] += ask(reader, do="block", repeat=repeat, rest_s=0.01)["us"]
            ask(bulk, do="bulk", on=True)
            time.sleep(0.3)
            got = ask(reader, do="block", repeat=repeat, rest_s=0.01)
            took["beside"] += got["us"]
            missed += got["missed"]
            rates.append(ask(bulk, do="bulk", on=False)["mb_per_s"])
    note = f"peer: without KV; 1 MB blocks on a link of 1 Gbit/s, KV at {statistics.median(rates):.0f} MB/s beside; "
    return [
        Row(
            name=f"cache read {name}, KV beside it", ours=percentile(took["beside"], share),
            peer=percentile(took["alone"], share), unit="µs", target=target, lower_is_better=True,
            note=note + f"{missed} missed",
        )
        for name, share, target in (("p50", 0.5, None), ("p99", 0.99, 1.3))
    ]  # fmt: skip


def decode_rows(trusted: bool, repetitions: int, steps: int) -> list[Row]:
    """A decode worker on the first core, everything else on the others; KV arrives at 1 Gbit/s."""
    with hosts(trusted, TINY_BLOCK_BYTES, 64) as (net, both):
        cores = f"1-{(os.cpu_count() or 2) - 1}"
        for pid in _children(os.getpid()):
            subprocess.run(["taskset", "-apc", cores, str(pid)], check=False, capture_output=True)
        decoder = both.probe("decoder", pinned=("taskset", "-c", "0"))
        net.limit(True)
        ask(decoder, do="steps", count=steps, kv=True)
        took: dict[bool, list[float]] = {False: [], True: []}
        rates = []
        for _ in range(repetitions):
            for kv in (False, True):
                got = ask(decoder, do="steps", count=steps, kv=kv)
                took[kv] += got["ms"]
                rates += [got["mb_per_s"]] * kv
    mode = "trusted" if trusted else "encrypted"
    note = f"peer: without KV; 8 sequences of tiny, one core; KV arrives at {statistics.median(rates):.0f} MB/s"
    return [
        Row(
            name=f"decode step {name} while KV arrives, {mode}", ours=percentile(took[True], share),
            peer=percentile(took[False], share), unit="ms", target=target, lower_is_better=True, note=note,
        )
        for name, share, target in (("p50", 0.5, 1.05), ("p99", 0.99, 1.2))
    ]  # fmt: skip


def _children(pid: int) -> list[int]:
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
    return found + [below for one in found for below in _children(one)]


# ---- how soon a worker serves ---------------------------------------------------------------------------------------


def start_row(repetitions: int) -> Row:
    """From the command on another host until its worker has joined: the bundled model, fetched over the network."""
    took_s = []
    command = [sys.executable, "-c", START]
    serve = ["serve", "tiny", "--port", "0", "--listen", "127.0.0.1:0", "--threads", "1"]
    with subprocess.Popen([*command, *serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        banner = ""
        while "Ctrl-C" not in banner:
            line = server.stdout.readline()
            assert line, "the server did not start"
            banner += line
        found = re.search(r"tripool (worker --join \S+ --token \S+)", banner)
        assert found
        for _ in range(repetitions):
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as cache:
                argv = [*command, *found[1].split(), "--role", "decode", "--threads", "1"]
                environment = os.environ | {"XDG_CACHE_HOME": cache}
                joining = subprocess.Popen(
                    argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
                )
                with joining:
                    assert joining.stdout is not None
                    while not (line := joining.stdout.readline()).startswith("ready"):
                        assert line, "the worker did not start"
                    took_s.append(time.monotonic() - began_s)
                    joining.terminate()
        server.terminate()
    took = sorted(took_s)[len(took_s) // 2]
    note = "peer: the bar; from the command to a worker that is ready"
    return Row(
        name="a worker of another host serves", ours=took, peer=START_S, unit="s", target=1.0, lower_is_better=True,
        note=note,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="some of: encrypted, trusted, links, cache, decode, start")
    options = parser.parse_args()
    origin, quick = Origin.now(), options.quick
    repetitions, repeat = (5, 8) if quick else (15, 32)
    parts = {
        "encrypted": lambda: pair_rows(False, repetitions, repeat),
        "trusted": lambda: pair_rows(True, repetitions, repeat),
        "links": lambda: link_rows(5 if quick else 9, 2.0),
        "cache": lambda: cache_rows(10 if quick else 20, 50),
        "decode": lambda: [
            row for trusted in (False, True) for row in decode_rows(trusted, 2 if quick else 4, 100 if quick else 250)
        ],
        "start": lambda: [start_row(1 if quick else 3)],
    }
    made = [
        row for name, part in parts.items() if not options.only or name in options.only.split(",") for row in part()
    ]
    print_table(made, origin, "Between hosts")
    if options.json:
        write_json(made, origin, options.json)
    return 0 if all(row.ok is not False for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
