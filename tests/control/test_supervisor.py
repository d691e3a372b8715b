"""The supervisor over real, small children: each life ends before the next begins, and nobody is left in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tripool.control.evidence import CpuUse, is_ending, is_runnable, is_stopped, times_of, was_busy
from tripool.control.instance import Instance, map_file, slabs_file
from tripool.control.launch import Spec, bind, launch
from tripool.control.supervisor import COORDINATOR, GATEWAY, STANDBY, Backoff, Supervisor
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Layout
from tripool.experts.slabs import attach_slabs

DEADLINE_S = 60.0

CHILD = """
import hashlib, os, signal, sys, threading, time
from pathlib import Path
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import Assign, Drain, MapChanged, WorkerId, Ready, Reaped, SilentRank, Suspect

folder, name, epoch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4])
supervisor = SupervisorChannel.inherited(int(sys.argv[6]))
if name == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"{name}.{epoch}.arena").write_text("")
def begin():
    with open(folder / "lives", "a") as lives:
        lives.write(f"{name} {epoch} {os.getpid()}\\n")
begin()
while not supervisor.ended:
    supervisor.send(Ready(WorkerId(name, epoch)))
    for message in supervisor.receive():
        if isinstance(message, Drain):
            sys.exit()
        if isinstance(message, MapChanged):
            continue
        if isinstance(message, Assign):
            supervisor.send(Ready(WorkerId(name, epoch)))  # of the standby: it does not mean that the rank is there
            time.sleep(0.1)
            (_, name), epoch = message.argv, message.epoch
            begin()
            supervisor.send(Ready(WorkerId(name, epoch)))
            continue
        with open(folder / "told", "a") as told:
            told.write(f"{message.worker_id.name} {message.worker_id.epoch}" + " crashed" * message.crashed + "\\n")
    if name == "coordinator" and (folder / "suspect").exists():
        worker, number = (folder / "suspect").read_text().split()
        (folder / "suspect").unlink()
        supervisor.send(Suspect(WorkerId(worker, int(number))))
    if name == "d-r0" and (folder / "silent").exists():
        rank, map_epoch, silence_s = (folder / "silent").read_text().split()
        (folder / "silent").unlink()
        supervisor.send(SilentRank(WorkerId(name, epoch), int(rank), int(map_epoch), float(silence_s)))
    if name == "busy":  # many threads, so that it has its part of a core also on a busy machine
        def compute():
            while True:
                hashlib.sha256(bytes(2**22))
        for _ in range(16):
            threading.Thread(target=compute).start()
        compute()
    time.sleep(0.02)
"""


class Run:
    def __init__(
        self,
        folder: Path,
        *names: str,
        command: Callable[[str], str] = lambda name: sys.executable,
        ranks: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.ready = threading.Event()
        specs = [Spec(name, (str(folder), name)) for name in names]
        specs += [Spec(name, (str(folder), name), instance="d", rank=rank) for rank, name in enumerate(ranks)]
        layout = Layout(ranks=max(1, len(ranks)), layers=1, experts=4, top_k=1, hidden=64, slab_rows=1)
        self.supervisor = Supervisor(
            specs,
            folder,
            instances=[Instance("d", folder, layout)] if ranks else [],
            standby=Spec(STANDBY, (str(folder), STANDBY)) if ranks else None,
            start=lambda spec, *worker_id: launch(spec, *worker_id, command=(command(spec.name), "-c", CHILD)),
        )
        self.thread = threading.Thread(target=self.supervisor.run, args=(self.ready.set,))
        self.thread.start()
        assert self.ready.wait(DEADLINE_S)

    def worker_ids(self, name: str) -> list[tuple[int, int]]:
        """(epoch, pid) of all that ever were in this place."""
        rows = [line.split() for line in (self.folder / "lives").read_text("ascii").splitlines()]
        return [(int(row[1]), int(row[2])) for row in rows if row[0] == name]

    def told(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "told").read_text("ascii").splitlines()
        return []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*names: str, **options: Any) -> Run:
        runs.append(Run(tmp_path, *names, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.supervisor.stopping = True
        run.thread.join(DEADLINE_S)
        assert not run.thread.is_alive()


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


def ends(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of processes that were not to end."""
    return [vars(record) for record in caplog.records if record.levelname == "WARNING"]


def test_who_falls_is_reaped_told_of_and_replaced(start: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    run = start(COORDINATOR, "decode-0")
    epoch, pid = run.worker_ids("decode-0")[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(run.worker_ids("decode-0")) == 2)
    until(lambda: run.told() == [f"decode-0 {epoch}"])
    assert run.worker_ids("decode-0")[1][0] > epoch
    assert not (run.folder / f"decode-0.{epoch}.arena").exists(), "what a dead life left is removed"
    (said,) = ends(caplog)
    assert (said["msg"], said["child"], said["child_pid"], said["epoch"]) == ("process ended", "decode-0", pid, epoch)
    assert (said["signal"], said["again_in_s"]) == ("SIGKILL", 0.1)
    assert len(run.worker_ids(COORDINATOR)) == 1


def test_a_clock_that_is_set_back_makes_no_life_older(start: Callable[..., Run], monkeypatch) -> None:
    """The coordinator takes a life that is older than the last for one that is over: it would never be welcome."""
    clock = count(10**18, -(10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    monkeypatch.setattr(time, "time", lambda: next(clock) / 1e9)
    run = start(COORDINATOR, "decode-0")
    for number in (1, 2):
        os.kill(run.worker_ids("decode-0")[-1][1], signal.SIGKILL)
        until(lambda number=number: len(run.worker_ids("decode-0")) == number + 1)
    epochs = [epoch for epoch, _ in run.worker_ids("decode-0")]
    assert epochs == sorted(set(epochs)) and epochs[0] > 0


def test_what_cannot_be_started_now_is_tried_again_and_the_others_go_on(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def command(name: str) -> str:
        """The second process of decode-0 finds no program, as another might find no memory."""
        tries.append(name)
        return "/nowhere" if tries.count("decode-0") == 2 and name == "decode-0" else sys.executable

    run = start(COORDINATOR, "decode-0", command=command)
    os.kill(run.worker_ids("decode-0")[0][1], signal.SIGKILL)
    until(lambda: len(run.worker_ids("decode-0")) == 2)
    assert tries.count("decode-0") == 3
    assert [said["msg"] for said in ends(caplog)] == ["process ended", "process not started"]
    assert len(run.worker_ids(COORDINATOR)) == 1


def test_a_suspect_is_ended_even_when_it_is_stopped(start: Callable[..., Run]) -> None:
    run = start(COORDINATOR, "decode-0")
    epoch, pid = run.worker_ids("decode-0")[0]
    os.kill(pid, signal.SIGSTOP)
    (run.folder / "suspect").write_text(f"decode-0 {epoch}", "ascii")
    until(lambda: len(run.worker_ids("decode-0")) == 2)
    until(lambda: run.told() == [f"decode-0 {epoch}"])
    (run.folder / "suspect").write_text(f"decode-0 {epoch}", "ascii")  # said again: about a life that is over
    until(lambda: not (run.folder / "suspect").exists())
    until(lambda: run.told() == [f"decode-0 {epoch}"])
    assert not Path(f"/proc/{pid}").exists()
    assert len(run.worker_ids("decode-0")) == 2


def test_a_suspect_that_computes_instead_of_answering_has_crashed(start: Callable[..., Run]) -> None:
    """Unlike one that was stopped or killed: what it computes may do the same to the next one."""
    run = start(COORDINATOR, "busy")
    epoch, pid = run.worker_ids("busy")[0]
    until(lambda: (times := times_of(pid)) is not None and times[0] > 1.5)
    (run.folder / "suspect").write_text(f"busy {epoch}", "ascii")
    until(lambda: f"busy {epoch} crashed" in run.told())


@pytest.mark.parametrize(
    ("used_s", "waited_s", "busy"),
    [(2.0, 0.0, True), (0.6, 1.4, True), (0.0, 0.0, False), (0.3, 0.2, False), (0.1, 1.9, False), (6.0, 0.0, True)],
    ids=["computing", "among others", "stopped", "waiting", "starved", "several threads"],
)
def test_busy_is_who_ran_when_it_could(used_s: float, waited_s: float, busy: bool) -> None:
    assert was_busy(2.0, used_s, waited_s) == busy


def test_a_killed_process_is_ending_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_ending(child.pid)
        child.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(child.pid))
        assert not is_ending(child.pid)
        child.kill()
        assert is_ending(child.pid), "at once, also while it is not on a core yet"
    assert is_ending(child.pid)


def test_a_process_is_runnable_while_one_of_its_threads_computes() -> None:
    thread = "import threading; threading.Thread(target=exec, args=('while True: pass',)).start(); input()"
    for code, expected in ((thread, True), ("input()", False)):
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
            until(lambda pid=child.pid, expected=expected: is_runnable(pid) == expected)
            child.kill()
    assert not is_runnable(child.pid)


def test_a_process_that_computed_and_was_stopped_is_not_busy() -> None:
    """However busy it was before: a worker may be stopped right after it has started."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        use = CpuUse(child.pid)
        use.look(0.0)
        until(lambda: (times := times_of(child.pid)) is not None and times[0] > 1.0)
        assert use.is_busy(1.0)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: is_stopped(child.pid))
        assert not use.is_busy(1.0)
    finally:
        child.kill()
        child.wait()


def map_of(run: Run) -> ExpertMap:
    return ExpertMap.decode(map_file(run.folder, "d").read_bytes())


def test_ranks_that_come_and_go_change_the_map(start: Callable[..., Run]) -> None:
    run = start(COORDINATOR, ranks=["d-r0", "d-r1"])
    assert (map_of(run).epoch, map_of(run).gone) == (2, frozenset())
    os.kill(run.worker_ids("d-r1")[0][1], signal.SIGKILL)
    until(lambda: map_of(run).epoch == 4)
    assert map_of(run).gone == frozenset() and len(run.worker_ids("d-r1")) == 2


def test_a_standby_becomes_the_rank_that_died(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.control.supervisor._STANDBY_S", 0.1)
    run = start(COORDINATOR, ranks=["d-r0", "d-r1"])
    for number in (1, 2):
        until(lambda number=number: len(run.worker_ids(STANDBY)) == number and run.supervisor._is_ready(STANDBY))
        epoch, pid = run.worker_ids(STANDBY)[-1]
        os.kill(run.worker_ids("d-r1")[-1][1], signal.SIGKILL)
        until(lambda number=number: map_of(run).epoch == 2 + 2 * number)
        assert run.worker_ids("d-r1")[-1][1] == pid and run.worker_ids("d-r1")[-1][0] > epoch
        told = {line.split()[0] for line in run.told()}
        assert told <= {"d-r1"}, "a standby holds nothing"


def test_a_stopped_rank_is_ended_at_once_and_a_slow_one_later(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(COORDINATOR, ranks=["d-r0", "d-r1"])

    def report(map_epoch: int, silence_s: float) -> None:
        (run.folder / "new").write_text(f"1 {map_epoch} {silence_s}", "ascii")
        (run.folder / "new").rename(run.folder / "silent")
        until(lambda: not (run.folder / "silent").exists())

    runnable = [True]
    monkeypatch.setattr("tripool.control.supervisor.is_runnable", lambda pid: runnable.pop() or None)
    report(0, 9.0)  # under an older map
    report(2, 0.6)
    until(lambda: not runnable)
    assert len(run.worker_ids("d-r1")) == 1
    runnable.append(False)
    report(2, 0.6)
    until(lambda: map_of(run).epoch == 4)
    report(4, 11.0)  # silent for so long that it does not matter why
    until(lambda: map_of(run).epoch == 6)
    assert len(run.worker_ids("d-r1")) == 3 and len(run.worker_ids("d-r0")) == 1


def test_a_report_counts_though_experts_have_moved_since(start: Callable[..., Run]) -> None:
    run = start(COORDINATOR, ranks=["d-r0", "d-r1"])
    SharedView(*attach_slabs(slabs_file(run.folder, "d"))).routed(0)[0] = (8000, 1, 1, 1)
    until(lambda: map_of(run).epoch > 2)
    (run.folder / "new").write_text("1 2 11.0", "ascii")
    (run.folder / "new").rename(run.folder / "silent")
    until(lambda: len(run.worker_ids("d-r1")) == 2)


def test_a_silent_gateway_is_replaced(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(GATEWAY)
    os.kill(run.worker_ids(GATEWAY)[0][1], signal.SIGSTOP)
    monkeypatch.setattr("tripool.control.supervisor._SILENCE_S", 0.5)  # not before: a busy machine makes others silent
    until(lambda: len(run.worker_ids(GATEWAY)) >= 2)


def test_in_the_end_nobody_is_left(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tripool.control.supervisor._END_S", 0.5)
    run = start(GATEWAY, "decode-0", "stubborn")
    pids = [run.worker_ids(name)[0][1] for name in (GATEWAY, "decode-0", "stubborn")]
    run.supervisor.stopping = True
    run.thread.join(DEADLINE_S)
    assert not run.thread.is_alive()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not ends(caplog)


def test_restarts_wait_longer_each_time_up_to_a_bound_and_a_good_run_is_forgiven() -> None:
    backoff = Backoff()
    waits = [backoff.failed(1.0) for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert backoff.failed(60.0) == 0.1
    assert backoff.failed(1.0) == 0.2


def test_a_process_is_bound_to_the_cpus_of_its_node() -> None:
    (cpu, *_) = os.sched_getaffinity(0)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            bind(process.pid, ())
            assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
            bind(process.pid, (cpu,))
            assert os.sched_getaffinity(process.pid) == {cpu}
            bind(process.pid, (10_000,))  # not there: it goes on as it is
            assert os.sched_getaffinity(process.pid) == {cpu}
        finally:
            process.kill()
