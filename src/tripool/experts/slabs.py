"""The shared memory of an exchange as a file that all ranks of an instance map."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np

from tripool.errors import ExchangeError
from tripool.experts.layout import Layout, Memory
from tripool.experts.prompt_layout import PromptLayout


def create_slabs(path: Path, layout: Layout | PromptLayout) -> None:
    """Make the file. Its memory is reserved now: a lack of it is an error here and not a bus error in a step."""
    if sys.platform != "linux":
        raise ExchangeError("ranks need Linux", hint="serve with one rank: ranks wait for each other on a futex")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, layout.num_bytes)
        os.pwrite(fd, layout.header().tobytes(), 0)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        hint = "take fewer slab_rows or ranks, or give the shared-memory file system more"
        raise ExchangeError(f"no room for {layout.num_bytes / 2**20:.0f} MB of slabs", hint=hint) from error
    finally:
        os.close(fd)


def attach_slabs(path: Path) -> tuple[Layout, Memory]:
    """Map the file. The mapping lasts as long as the array."""
    memory = _mapped(path)
    return Layout.read(memory), memory


def attach_prompts(path: Path) -> tuple[PromptLayout, Memory]:
    """The same for prompts that ranks compute together."""
    memory = _mapped(path)
    return PromptLayout.read(memory), memory


def _mapped(path: Path) -> Memory:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
