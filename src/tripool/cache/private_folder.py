"""Creates folders that only this user can change (mode 700), and refuses those that another user could replace.

A user who can write to a parent folder can rename what is below it and substitute files or links. So every folder on
the path, with links followed step by step, must belong to this user or the system and must not be writable by others. A
sticky folder such as /tmp is allowed, because only owners can rename there.
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
    """The folder belongs to another user, or another user could replace it."""

    code = "folder_not_private"


def make_private(folder: Path) -> None:
    """Create the folder and missing parents. Raises NotPrivate, and OSError if it cannot be created."""
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
            check_private(each)  # created meanwhile, perhaps by another process of this user
    check_private(folder)


def check_private(folder: Path, *, is_last: bool = True) -> None:
    """Raise NotPrivate unless the path is safe. `is_last`: the folder itself is to be used, and must belong to this
    user.
    """
    at, steps, num_links = Path("/"), list(folder.absolute().parts[1:]), 0
    trusted = {0, os.geteuid(), os.lstat("/").st_uid}  # in a user namespace root may have another uid
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
        raise _refusal(at, "does not belong to this user")
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
    """Whether this is the user's private group, named like the user: its folders are often group-writable."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _refusal(at: Path, why: str) -> NotPrivate:
    return NotPrivate(f"{at} {why}", hint="use a folder of your own whose parent folders belong to you or the system")
