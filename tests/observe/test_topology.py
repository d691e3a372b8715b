"""What a machine's system files say about its nodes, CPUs, memory, GPUs and links."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tripool.cli.main import main
from tripool.cli.topology import ranges, render
from tripool.control.topology import Link, Machine, NumaNode
from tripool.observe.topology import read_machine


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "ascii")


def test_two_nodes_with_gpus_and_links(tmp_path: Path) -> None:
    node, pci, net = "sys/devices/system/node/node", "sys/bus/pci/devices/0000:", "sys/class/net/"
    write(
        tmp_path,
        {
            f"{node}0/cpulist": "0-3,8\n",
            f"{node}0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree: 1 kB\n",
            f"{node}10/cpulist": "4-7\n",
            f"{node}2/cpulist": "\n",  # memory only
            f"{pci}17:00.0/class": "0x030200\n",
            f"{pci}17:00.0/vendor": "0x10de\n",
            f"{pci}17:00.0/numa_node": "10\n",
            f"{pci}01:00.0/class": "0x030000\n",  # a display on the mainboard
            f"{pci}01:00.0/vendor": "0x1a03\n",
            f"{net}eth0/type": "1\n",
            f"{net}eth0/operstate": "up\n",
            f"{net}eth0/speed": "25000\n",
            f"{net}eth1/type": "1\n",
            f"{net}eth1/operstate": "down\n",
            f"{net}lo/type": "772\n",
            f"{net}lo/operstate": "up\n",
            f"{net}veth/type": "1\n",
            f"{net}veth/operstate": "up\n",
            f"{net}veth/speed": "-1\n",
        },
    )
    found = read_machine(tmp_path, usable=range(1, 8))
    assert found == Machine(
        (NumaNode(0, (1, 2, 3), 1024 * 1024), NumaNode(10, (4, 5, 6, 7), 0, ("0000:17:00.0",))),
        (Link("eth0", 25_000), Link("veth", 0)),
    )
    assert found.mbit == 25_000 and found.cpus == (1, 2, 3, 4, 5, 6, 7)


def test_a_system_without_such_files_is_one_node(tmp_path: Path) -> None:
    found = read_machine(tmp_path, usable=(0, 1))
    assert [node.cpus for node in found.nodes] == [(0, 1)] and found.nodes[0].memory_bytes > 0


def test_the_command_shows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["topology", "--format", "json"])
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    assert {cpu for node in host["machine"]["nodes"] for cpu in node["cpus"]} == os.sched_getaffinity(0)
    with pytest.raises(SystemExit):
        main(["topology"])
    assert "this machine" in capsys.readouterr().out
    hosts = [{"host": "b", "ranks": {"decode-0": [2, 3]}, "machine": {"nodes": [], "links": []}}]
    Console(file=(text := StringIO())).print(render({"hosts": hosts, "places": []}))
    assert "decode-0 ranks 2-3: host b" in text.getvalue()
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
