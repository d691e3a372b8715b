"""Links between the ranks of two hosts, with real host servers and connections and without a model."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hosts.in_process import TOKEN
from tripool.control.allocation import Want
from tripool.control.instance import Instance, map_file, slabs_file
from tripool.control.joined_instance import JoinedInstance, read_present
from tripool.control.topology import Machine, NumaNode
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Bell, Layout
from tripool.experts.slabs import attach_slabs
from tripool.hosts import wire
from tripool.hosts.connection import dial
from tripool.hosts.directory import OwnHost
from tripool.hosts.experts import BEAT, RECORDS, ExpertLinks
from tripool.hosts.keys import HostKeys
from tripool.hosts.leader import Leader, SharedModel, SpreadInstance, write_models
from tripool.hosts.server import HostServer
from tripool.messages import RemoteRank, SilentRank, WorkerId

LAYOUT = Layout(ranks=3, layers=2, experts=8, top_k=2, hidden=64, slab_rows=4)
DEADLINE_S = 30.0
MACHINE = Machine((NumaNode(0, (0, 1, 2, 3)),))
KEYS = HostKeys(TOKEN)


class Running:
    """A host server and its links; `told`: what its supervisor was."""

    def __init__(self, folder: Path, own: OwnHost, listener: socket.socket, leads: bool) -> None:
        self.folder, self.own = folder, own
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        own.write(folder)
        self.links = ExpertLinks(folder, own, self.told.put)
        leader = Leader(folder) if leads else None
        self.server = HostServer(folder, listener, WorkerId("host-server", 1), own, leader, self.links)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(lambda: not self._stopped.is_set(),), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(DEADLINE_S)

    def view(self) -> SharedView:
        return SharedView(*attach_slabs(slabs_file(self.folder, "d")))


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[tuple[Running, Instance, str]]:
    folder = tmp_path / "a"
    folder.mkdir()
    spread = SpreadInstance(Want("d", "decode", 3, 1, hosts=2), 2, asdict(LAYOUT))
    write_models(folder, (SharedModel("m", "fake", False, (), (spread,)),))
    instance = Instance("d", folder, LAYOUT, hosts=2)
    with listening() as (listener, address):
        own = OwnHost("a", TOKEN, False, machine=MACHINE, ranks={"d": (0, 1)})
        running = Running(folder, own, listener, leads=True)
        running.start()
        yield running, instance, address
        running.stop()


def joined(tmp_path: Path, stack: ExitStack, join: str, name: str = "b") -> tuple[Running, JoinedInstance]:
    folder = tmp_path / name
    folder.mkdir()
    instance = JoinedInstance("d", folder, LAYOUT)
    listener, address = stack.enter_context(listening())
    own = OwnHost(name, TOKEN, False, address, join, {}, ("decode",), machine=MACHINE, ranks={"d": (2,)})
    running = Running(folder, own, listener, leads=False)
    stack.callback(running.stop)
    running.start()
    return running, instance


def test_ranks_come_and_go_with_their_host(leader: tuple[Running, Instance, str], tmp_path: Path) -> None:
    a, instance, address = leader
    instance.enter(0)
    with ExitStack() as stack:
        b, ranks = joined(tmp_path, stack, address)
        ranks.enter(2)
        process = read_present(tmp_path / "b" / "d.present")[2]

        def entered() -> bool:
            message = a.told.get(timeout=DEADLINE_S)
            return message == RemoteRank("d", 2, process)

        until(entered)
        instance.remote(2, process)
        copy = map_file(b.folder, "d")
        until(lambda: copy.exists() and ExpertMap.decode(copy.read_bytes()).epoch == instance.epoch)
        ranks.outdated()

        # A request, its answer, and the counts of the other host's rank.
        there, here = b.view(), a.view()
        bell = Bell(instance.epoch, 1, 1)
        slab = here.slab(0, 0)
        slab.head[0], slab.segments[2], slab.entries[0] = (1, 1), (0, 1), (3, 0, 5, 0.5)
        slab.rows.values[3] = 7
        here.dispatch_bell(2, 0, 0).ring(bell)
        until(lambda: there.dispatch_bell(2, 0, 0).read() == bell)
        assert (there.slab(0, 0).rows.values[3] == 7).all() and not there.slab(0, 0).rows.values[2].any()
        there.answers(2, 0, 0)[0] = 9.5
        there.combine_bell(0, 2, 0).ring(bell)
        until(lambda: here.combine_bell(0, 2, 0).read() == bell)
        assert (here.answers(2, 0, 0)[0] == 9.5).all()
        there.routed(2)[1, 4] = 11
        until(lambda: here.routed(2)[1, 4] == 11)

        a.links.silent(SilentRank(WorkerId("d-r0", 1), 2, 4, 0.6, "d"))
        assert b.told.get(timeout=DEADLINE_S) == SilentRank(WorkerId("d-r0", 1), 2, 4, 0.6, "d")

        a.links._links["d", "b"].close()  # what happens when its connections end
        until(lambda: a.told.get(timeout=DEADLINE_S) == RemoteRank("d", 2, 0))
        until(lambda: not copy.exists())
        assert ranks.outdated() == [2], "it was given up, and must begin anew"


def test_who_takes_which_ranks(leader: tuple[Running, Instance, str]) -> None:
    a, _, address = leader

    def ask(name: str, role: Any) -> wire.Answer:
        connection = dial(address, KEYS)
        connection.send(wire.TakeRanks("m", wire.Host(name, "tcp://127.0.0.1:1", roles=(role,), machine=MACHINE)))
        answer = connection.receive(wire.ANSWERS)
        connection.close()
        return answer

    assert a.server._leader is not None and a.server._leader.missing(a.own.host, ()) == "decode"
    assert ask("p", "prefill") == wire.Ranks()
    given = ask("b", "decode")
    assert isinstance(given, wire.Ranks)
    assert (given.instance, given.ranks, given.attention_ranks) == ("d", (2,), 2) and "host b" in given.reason
    assert Layout(**given.shape) == LAYOUT
    assert ask("c", "decode") == wire.Ranks(), "b will be there soon"
    assert ask("b", "decode") == given, "asked again"
    assert a.server._leader.missing(a.own.host, a.server._hosts.others()) is None


@pytest.mark.parametrize("frame", [(RECORDS, 2**31), (RECORDS, 16), (BEAT, 2**30), (BEAT, 3), (99, 0)])
def test_a_damaged_frame_ends_the_connection_only(
    leader: tuple[Running, Instance, str], tmp_path: Path, frame: tuple[int, int]
) -> None:
    _, instance, address = leader
    instance.enter(0)
    with ExitStack() as stack:
        b, _ = joined(tmp_path, stack, address)
        until(lambda: map_file(b.folder, "d").exists())
        connection = dial(address, KEYS)
        connection.timeout(DEADLINE_S)
        connection.send(wire.OpenExchange("d", "b"))
        assert isinstance(connection.receive(wire.ANSWERS), wire.Data)
        data = np.array(frame, "<u4").tobytes() + bytes(min(frame[1], 16))
        connection.write([memoryview(data)])
        assert connection.read_some(memoryview(bytearray(1))) == 0, "closed"
        connection.close()
        copy = map_file(b.folder, "d")
        until(lambda: copy.exists() and ExpertMap.decode(copy.read_bytes()).epoch == instance.epoch)
        other = dial(address, KEYS)
        other.send(wire.OpenExchange("d", "stranger"))
        assert isinstance(other.receive(wire.ANSWERS), wire.No)
        other.close()
