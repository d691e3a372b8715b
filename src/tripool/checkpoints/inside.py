"""Opens the files of a checkpoint: regular files that lie inside the checkpoint's folder, wherever links lead.

A checkpoint is a stranger's: a link in it to a private file would show that file to whoever uses the model. Links that
stay inside are fine, and so is Hugging Face's cache, where `models--ORG--NAME/snapshots/REVISION` links to files in
`models--ORG--NAME/blobs`. What counts is the file that was opened, not the name that was looked at before: a link that
changes in between changes nothing. Hard links cannot be told from the files themselves.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tripool.errors import CheckpointError, CheckpointMissing

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a pipe without a writer is no reason to wait
_DESCRIPTORS = Path("/proc/self/fd")


def open_inside(path: Path, *, anywhere: bool = False, hint: str = "fetch the file again") -> int:
    """A descriptor. `anywhere`: for a file that the user named himself, which may be a link to any file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # looked at first: opening a device may do something already
            raise _no_file(path)
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError as error:
        raise CheckpointMissing("no such file", hint=hint, file=path) from error
    except ValueError as error:  # a zero byte, or half of a character
        problem = f"{path.name[:100]!a} is no name that a file can have"
        raise CheckpointError(problem, hint=hint, file=path.parent) from error
    except OSError as error:
        hint = "check that it is a file and that you may read it"
        raise CheckpointError(f"cannot be opened: {error.strerror}", hint=hint, file=path) from error
    try:
        _check(path, descriptor, anywhere=anywhere)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, descriptor: int, *, anywhere: bool) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _no_file(path)
    if anywhere:
        return
    try:
        found, root = _path_of(path, descriptor), _root(path.parent.resolve())
    except OSError as error:
        raise CheckpointError(f"cannot be followed: {error.strerror}", hint="check the folder", file=path) from error
    if root not in found.parents:
        hint = "do not trust this checkpoint; if you made the link yourself, put the file itself there"
        raise CheckpointError("is a link that leads out of the checkpoint's folder", hint=hint, file=path)


def _path_of(path: Path, descriptor: int) -> Path:
    """Where the opened file lies, without links."""
    if _DESCRIPTORS.is_dir():
        return Path(os.readlink(_DESCRIPTORS / str(descriptor)))
    found = path.resolve()
    if not os.path.samestat(os.fstat(descriptor), found.stat()):
        raise CheckpointError("was replaced while it was opened", hint="try again", file=path)
    return found


def _root(folder: Path) -> Path:
    """What the files in `folder` may lie in."""
    model = folder.parent.parent
    return model if folder.parent.name == "snapshots" and model.name.startswith("models--") else folder


def _no_file(path: Path) -> CheckpointError:
    hint = "a checkpoint consists of regular files; fetch it again"
    return CheckpointError("is no regular file", hint=hint, file=path)
