"""Starts child processes with a supervisor channel, kills and reaps them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tripool.control.evidence import CpuUse
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import WorkerId


@dataclass(frozen=True, slots=True)
class Spec:
    """One process that should run."""

    name: str
    argv: tuple[str, ...]
    """Arguments of `tripool`; `--epoch` and `--supervisor-channel` are added at each start."""
    pass_fds: tuple[int, ...] = ()
    cache: tuple[str, ...] = ()
    """Cache members that hold this worker's blocks: they start once it has reported the size of one."""
    instance: str = ""
    """The instance of several ranks that it belongs to, if it does."""
    rank: int = 0
    cpus: tuple[int, ...] = ()
    """Those that it runs on; empty: any."""

    @property
    def role(self) -> str:
        """What it is one of several of: "gateway" of "gateway-1"."""
        return self.name.rstrip("-0123456789")


@dataclass(slots=True, eq=False)
class Child:
    spec: Spec
    worker_id: WorkerId
    process: subprocess.Popen[bytes]
    supervisor_channel: SupervisorChannel
    started_s: float
    heard_s: float
    cpu: CpuUse
    pidfd: int | None
    """Readable once the process has ended; None where the system has no such thing."""
    ready: bool = False

    def kill(self) -> None:
        """Kill the child's process group, also if it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)


def bind(pid: int, cpus: Sequence[int]) -> None:
    """Let all threads of a process run on these CPUs only; none: on those that it has."""
    if cpus and sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has ended; or these are not ours to give, and it runs anywhere
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cpus)


def launch(
    spec: Spec, epoch: int, now_s: float, *, command: Sequence[str] = (sys.executable, "-m", "tripool")
) -> Child:
    """Start a child in its own process group: Ctrl-C in a terminal reaches only the supervisor, which ends its
    children.
    """
    supervisor_channel, theirs = SupervisorChannel.pair()
    with theirs:
        worker_id_options = ("--epoch", str(epoch), "--supervisor-channel", str(theirs.fileno()))
        try:
            process = subprocess.Popen(
                [*command, *spec.argv, *worker_id_options],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *spec.pass_fds),
                process_group=0,
            )
        except OSError:
            supervisor_channel.close()
            raise
    worker_id, pidfd = WorkerId(spec.name, epoch), os.pidfd_open(process.pid) if sys.platform == "linux" else None
    return Child(spec, worker_id, process, supervisor_channel, now_s, now_s, CpuUse(process.pid), pidfd)
