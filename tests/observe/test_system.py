"""The system's own files, invented: control groups of both versions, sockets, mounts, and nothing at all."""

import os
import socket
from pathlib import Path

import pytest

from tripool.observe.system import file_system, listener, memory_limit, quota_cores, read_cpu, read_memory


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def test_version_2_groups_bind_up_to_the_top(tmp_path, write):
    write("proc/self/cgroup", "0::/kube/pod\n")
    write("sys/fs/cgroup/kube/pod/cpu.max", "400000 100000\n")
    write("sys/fs/cgroup/kube/cpu.max", "150000 100000\n")
    write("sys/fs/cgroup/cpu.max", "max 100000\n")
    write("sys/fs/cgroup/kube/pod/memory.max", "max\n")
    write("sys/fs/cgroup/kube/pod/memory.current", "900\n")
    write("sys/fs/cgroup/kube/memory.max", "1000\n")
    write("sys/fs/cgroup/kube/memory.current", "900\n")
    write("sys/fs/cgroup/kube/memory.stat", "anon 500\ninactive_file 300\n")
    assert quota_cores(tmp_path) == 1.5
    assert memory_limit(tmp_path) == (1000, 600)


def test_version_1_groups_have_a_tree_each(tmp_path, write):
    write("proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/c\n")
    write("sys/fs/cgroup/cpu/b/cpu.cfs_quota_us", "50000\n")
    write("sys/fs/cgroup/cpu/b/cpu.cfs_period_us", "100000\n")
    write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2000\n")
    write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "100\n")
    assert quota_cores(tmp_path) == 0.5
    assert memory_limit(tmp_path) == (2000, 100)


def test_without_any_of_these_files_nothing_is_bound(tmp_path):
    assert quota_cores(tmp_path) is None
    assert memory_limit(tmp_path) == (None, 0)
    assert listener(80, tmp_path) is None
    cpu, memory = read_cpu(tmp_path), read_memory(tmp_path)
    assert cpu.num_usable >= 1 and not cpu.flags
    assert memory.total_bytes > 0 and memory.limit_bytes is None


def test_cpu_and_memory_are_read(tmp_path, write):
    write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags : x\n")
    write("proc/loadavg", "1.25 1.0 0.9 1/100 4242\n")
    write("proc/meminfo", "MemTotal:        2000 kB\nMemFree: 10 kB\nMemAvailable:    1500 kB\nHugePages_Total: 0\n")
    cpu, memory = read_cpu(tmp_path), read_memory(tmp_path)
    assert (cpu.model, cpu.load, cpu.flags) == ("A CPU", 1.25, {"fpu", "avx2", "fma"})
    assert (memory.total_bytes, memory.available_bytes) == (2000 * 1024, 1500 * 1024)


def test_a_limit_above_what_there_is_is_none(tmp_path, write):
    write("proc/self/cgroup", "0::/\n")
    write("proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 1 kB\n")
    write("sys/fs/cgroup/memory.max", str(2**63 - 1))
    write("sys/fs/cgroup/memory.current", "5")
    assert read_memory(tmp_path).limit_bytes is None


def test_who_listens_here_is_found_by_its_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in (listener(port) or "")
    assert listener(port) is None


def test_the_longest_mount_point_decides(tmp_path, write):
    write("proc/self/mounts", "disk / ext4 rw 0 0\nshm /dev/shm tmpfs rw 0 0\nx /dev/shm/inner ext4 rw 0 0\n")
    assert file_system(Path("/dev/shm/tripool-1"), tmp_path) == "tmpfs"
    assert file_system(Path("/dev/shm/inner/a"), tmp_path) == "ext4"
    assert file_system(Path("/dev/shmother"), tmp_path) == "ext4"
