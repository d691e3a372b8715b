"""Reads facts about the operating system from its files below a root folder, which tests can replace.

Missing files, as on another system, mean "unknown" and no bound.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tripool.observe.machine import Cpu, Memory

ROOT = Path("/")


def read_cpu(root: Path = ROOT) -> Cpu:
    info: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    load = _read(root / "proc/loadavg").split()
    return Cpu(
        model=info.get("model name") or platform.processor() or platform.machine(),
        machine=platform.machine().lower(),
        num_cores=os.cpu_count() or 1,
        num_usable=len(os.sched_getaffinity(0)),
        quota_cores=quota_cores(root),
        load=float(load[0]) if load else 0.0,
        flags=frozenset((info.get("flags") or info.get("Features") or "").split()),
    )


def read_memory(root: Path = ROOT) -> Memory:
    info = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        info[name] = int(value.split()[0]) * 1024 if value.split() else 0
    total = info.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = memory_limit(root)
    if limit is not None and limit >= total:
        limit = None
    available = info.get("MemAvailable", info.get("MemFree", total))
    return Memory(total_bytes=total, available_bytes=available, limit_bytes=limit, limit_used_bytes=used)


def quota_cores(root: Path = ROOT) -> float | None:
    """The tightest bound of this process's control group and those above it."""
    found = []
    for group in _groups(root, "cpu"):
        second = _read(group / "cpu.max").split()
        first = _read(group / "cpu.cfs_quota_us").split() + _read(group / "cpu.cfs_period_us").split()
        quota, period = (second or first or ["max", "0"])[:2]
        if quota.isdigit() and int(quota) > 0 and int(period) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> tuple[int | None, int]:
    """The tightest bound in bytes, and the used bytes under it that cannot be reclaimed."""
    found = []
    for group in _groups(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                found.append((int(limit), max(0, int(used) - _droppable(group))))
    return min(found, key=lambda one: one[0] - one[1], default=(None, 0))


def _droppable(group: Path) -> int:
    """File pages that count as used but can be reclaimed."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group, from itself to the root. Version 2 has one tree, version 1 several."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        here = top / path.strip("/")
        # In a container the path may be the host's and missing here; the root is then the container's own.
        folders += [here, *(parent for parent in here.parents if parent.is_relative_to(top))]
    return folders


def listener(port: int, root: Path = ROOT) -> str | None:
    """Name and process id of the process that listens on a TCP port, or "unknown"."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in (root / "proc").glob("[0-9]*"):
        if any(target in inodes for target in _open_files(process)):
            return f"{_read(process / 'comm').strip() or 'a process'} (pid {process.name})"
    return "a process of another user"


def _open_files(process: Path) -> Iterator[str]:
    try:
        for link in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile, such as the descriptor of this listing
                yield os.readlink(link)
    except OSError:
        return  # of another user, or ended


def file_system(path: Path, root: Path = ROOT) -> str:
    """Type of the file system of a folder."""
    best, kind = -1, ""
    for line in _read(root / "proc/self/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and path.is_relative_to(fields[1]) and len(fields[1]) >= best:
            best, kind = len(fields[1]), fields[2]
    return kind


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
