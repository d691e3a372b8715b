"""What can happen to a process: killed, stopped and woken again, cut off."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

_PIDFD_GETFD = 438


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def wake(pid: int) -> None:
    """It may have been killed in its sleep."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def cut(pid: int, to: Callable[[str], bool]) -> int:
    """Shut down every connection of a process whose peer's address is like that. Returns how many there were."""
    num_cut = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
        except FileNotFoundError:
            continue  # closed meanwhile
        try:
            with _borrowed(pid, int(entry.name)) as end:
                peer = end.getpeername()
                if end.family == socket.AF_UNIX and isinstance(peer, str) and to(peer):
                    end.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):  # one that listens, or was closed meanwhile
                raise
    return num_cut


@contextlib.contextmanager
def _borrowed(pid: int, number: int) -> Iterator[socket.socket]:
    """Another process's socket, as if it were ours."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(pidfd)
    with socket.socket(fileno=fd) as end:
        yield end


def cut_clients(pid: int) -> int:
    """Shut down a gateway's connections to its clients. Returns how many there were."""
    num_cut = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or one that listens
            if not os.readlink(entry).startswith("socket:"):
                continue
            with _borrowed(pid, int(entry.name)) as end:
                if end.family == socket.AF_INET and end.getpeername():
                    end.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut


def cut_from_coordinator(pid: int) -> None:
    assert cut(pid, lambda peer: peer.endswith("/coordinator.sock")) > 0


def cut_supervisor_channel(pid: int) -> None:
    """Of a child: both ends of the pair are nameless, and the only nameless ones of that kind it has."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    found = re.search(r"--supervisor-channel (\d+)", command)
    assert found, command
    with _borrowed(pid, int(found[1])) as end:
        end.shutdown(socket.SHUT_RDWR)
