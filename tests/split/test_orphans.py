"""A supervisor that dies before its child has looked around: the child must not stay for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tripool.fabric.supervisor_channel import SupervisorChannel

DEADLINE_S = 60.0

START_AND_DIE = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[2:], pass_fds=[int(sys.argv[1])], process_group=0, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_cache_member_that_was_born_an_orphan_leaves(tmp_path: Path) -> None:
    ours, theirs = SupervisorChannel.pair()
    sizes = ("--slot-bytes", "512", "--num-slots", "8", "--epoch", "1", "--supervisor-channel", str(theirs.fileno()))
    member = (sys.executable, "-m", "tripool", "cache-member", "--folder", str(tmp_path), "--name", "cache-0", *sizes)
    with theirs:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", START_AND_DIE, str(theirs.fileno()), *member],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        with supervisor:
            assert supervisor.stdout is not None
            pid = int(supervisor.stdout.readline())
    ours.close()
    gone = ["timeout", str(DEADLINE_S), "tail", f"--pid={pid}", "-f", "/dev/null"]
    left = subprocess.run(gone, check=False).returncode == 0
    if not left:
        subprocess.run(["kill", "-9", str(pid)], check=False)
    assert left, "it stayed"
