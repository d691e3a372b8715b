"""Folders that only this user can change: made with mode 700, and refused where somebody else could put another there.

Whoever can write to a folder on the way can rename what is below it, and give us files of their own making, or links to
ours. So every folder on the way, links followed step by step, must be ours or the system's, and writable by nobody
else; a sticky one such as /tmp is fine, because there only owners rename.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from tripool.errors import TripoolError

_MAX_LINKS = 40


class NotPrivate(TripoolError):
    """A folder that others could replace, or that is not ours."""

    code = "folder_not_private"


def make_private(folder: Path) -> None:
    """Raises NotPrivate, and OSError when it cannot be made. Folders that are missing on the way are made alike."""
    folder = folder.absolute()
    missing: list[Path] = []
    there = folder
    while not os.path.lexists(there):
        missing.append(there)
        there = there.parent
    check_private(there, is_last=not missing)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            check_private(each)  # somebody was faster: perhaps another process of ours
    check_private(folder)


def check_private(folder: Path, *, is_last: bool = True) -> None:
    """`is_last`: it is the one to be used, and must be ours; otherwise it is on the way."""
    at, steps, num_links = Path("/"), list(folder.absolute().parts[1:]), 0
    trusted = {0, os.geteuid(), os.lstat("/").st_uid}  # in a container of its own, root is not always number 0
    _check_folder(at, trusted)
    while steps:
        at = at.parent if steps[0] == ".." else at / steps[0]
        del steps[0]
        found = os.lstat(at)
        if stat.S_ISLNK(found.st_mode):
            num_links += 1
            if found.st_uid not in trusted or num_links > _MAX_LINKS:
                raise _refusal(at, f"is a link of another user (uid {found.st_uid})")
            target = Path(os.readlink(at))
            steps = [*target.parts[target.is_absolute() :], *steps]
            at = Path("/") if target.is_absolute() else at.parent
        else:
            _check_folder(at, trusted)
    if is_last and os.lstat(at).st_uid != os.geteuid():
        raise _refusal(at, "is not this user's own")
    if is_last and _others_write(os.lstat(at)):
        raise _refusal(at, "can be written to by others")


def _check_folder(at: Path, trusted: set[int]) -> None:
    found = os.lstat(at)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
    if found.st_uid not in trusted:
        raise _refusal(at, f"belongs to another user (uid {found.st_uid}), who could replace what is in it")
    if _others_write(found) and not found.st_mode & stat.S_ISVTX:
        raise _refusal(at, "can be written to by others, who could replace what is in it")


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """A group for one user alone, named like it, as many systems make them: its folders are often writable for it."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _refusal(at: Path, why: str) -> NotPrivate:
    return NotPrivate(f"{at} {why}", hint="one of your own, below folders of your own or the system's")
