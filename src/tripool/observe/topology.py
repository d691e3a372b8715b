"""Reads this machine's NUMA nodes, CPUs, memory, GPUs and network links from the system's files."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from tripool.control.topology import Link, Machine, NumaNode
from tripool.observe.system import ROOT, read_memory

_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
"""Of PCI: displays, 3D controllers, accelerators. A display counts if a maker of GPUs that compute has made it."""
_GPU_VENDORS = ("0x10de", "0x1002")


def read_machine(root: Path = ROOT, usable: Collection[int] | None = None) -> Machine:
    """`usable`: CPUs that count; those of this process when not given."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    gpus = _gpus(root)
    nodes: list[NumaNode] = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=_number):
        number = _number(folder)
        cpus = tuple(cpu for cpu in _numbers(_read(folder / "cpulist")) if cpu in usable)
        # Of a GPU the system may not know the node, where there is one only.
        near = tuple(sorted(gpu for gpu, node in gpus.items() if node == number or (node < 0 and not nodes)))
        nodes.append(NumaNode(number, cpus, _memory(folder), near))
    if not nodes:
        nodes = [NumaNode(0, tuple(sorted(usable)), read_memory(root).total_bytes, tuple(sorted(gpus)))]
    return Machine(tuple(node for node in nodes if node.cpus), _links(root))


def _memory(folder: Path) -> int:
    for line in _read(folder / "meminfo").splitlines():
        fields = line.split()  # Node 0 MemTotal: 24634468 kB
        if len(fields) > 3 and fields[2] == "MemTotal:":
            return int(fields[3]) * 1024
    return 0


def _gpus(root: Path) -> dict[str, int]:
    """PCI address -> NUMA node, -1 where that is unknown."""
    found = {}
    for device in (root / "sys/bus/pci/devices").glob("*"):
        kind, vendor = _read(device / "class").strip()[:6], _read(device / "vendor").strip()
        if kind in _GPU_CLASSES and vendor in _GPU_VENDORS:
            found[device.name] = int(_read(device / "numa_node").strip() or -1)
    return found


def _links(root: Path) -> tuple[Link, ...]:
    """Interfaces that are up, without loopback."""
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        loops = _read(folder / "type").strip() == "772"
        if not loops and _read(folder / "operstate").strip() == "up":
            speed = _read(folder / "speed").strip()
            found.append(Link(folder.name, int(speed) if speed.isdecimal() else 0))
    return tuple(found)


def _numbers(text: str) -> list[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # missing, or an interface that is down
        return ""
