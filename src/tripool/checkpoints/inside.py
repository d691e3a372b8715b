"""Opens the files of a checkpoint: regular files that are inside the checkpoint's folder after following links.

A checkpoint is untrusted: a link in it to a private file would expose that file to users of the model. Links that stay
inside are allowed, and so is Hugging Face's cache, where `models--ORG--NAME/snapshots/REVISION` links to files in
`models--ORG--NAME/blobs`. The check is on the opened file, not on its name, so replacing a link meanwhile has no
effect. Hard links cannot be distinguished from files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tripool.errors import CheckpointError, CheckpointMissing

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # do not block on a pipe without a writer
_DESCRIPTORS = Path("/proc/self/fd")


def open_inside(path: Path, *, anywhere: bool = False, hint: str = "fetch the file again") -> int:
    """A file descriptor. `anywhere`: for a file named by the user, which may be a link to any file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # checked first: opening a device may have side effects
            raise _no_file(path)
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError as error:
        raise CheckpointMissing("no such file", hint=hint, file=path) from error
    except ValueError as error:  # a zero byte or a lone surrogate
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
        hint = "do not trust this checkpoint; if the link is yours, replace it by the file"
        raise CheckpointError("is a link that leads out of the checkpoint's folder", hint=hint, file=path)


def _path_of(path: Path, descriptor: int) -> Path:
    """Path of the opened file, without links."""
    if _DESCRIPTORS.is_dir():
        return Path(os.readlink(_DESCRIPTORS / str(descriptor)))
    found = path.resolve()
    if not os.path.samestat(os.fstat(descriptor), found.stat()):
        raise CheckpointError("was replaced while it was opened", hint="try again", file=path)
    return found


def _root(folder: Path) -> Path:
    """The folder that must contain all files of `folder`."""
    model = folder.parent.parent
    return model if folder.parent.name == "snapshots" and model.name.startswith("models--") else folder


def _no_file(path: Path) -> CheckpointError:
    hint = "a checkpoint consists of regular files; fetch it again"
    return CheckpointError("is no regular file", hint=hint, file=path)
