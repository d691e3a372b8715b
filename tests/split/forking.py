"""A supervisor whose children are forked from it after torch and this package are imported: they start in a moment.

Run as a program, with the arguments of `tripool`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, cast

import tripool.engine.load
import tripool.kernels.cpu8.exchange
import tripool.serving.gateway
import tripool.serving.worker  # noqa: F401
from tripool.cli.main import main
from tripool.control.evidence import CpuUse
from tripool.control.launch import Child, Spec
from tripool.control.supervisor import Supervisor
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import WorkerId


@dataclass
class Forked:
    """What the supervisor uses of a `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork(spec: Spec, epoch: int, now_s: float) -> Child:
    channel, theirs = SupervisorChannel.pair()
    with theirs:
        pid = os.fork()
        if pid == 0:
            run([*spec.argv, "--epoch", str(epoch), "--supervisor-channel", str(theirs.detach())])
    process = cast(Any, Forked(pid))
    return Child(spec, WorkerId(spec.name, epoch), process, channel, now_s, now_s, CpuUse(pid), os.pidfd_open(pid))


def run(argv: list[str]) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        main(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    assert Supervisor.__init__.__kwdefaults__ is not None
    Supervisor.__init__.__kwdefaults__["start"] = fork
    gc.freeze()
    main()
