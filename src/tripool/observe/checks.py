"""Findings of `doctor` from facts about a machine, with remedies. Pure: reads no files.

`fail`: serving this model here cannot work. `warn`: it works, but slower, with less room or less safely than it could.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from tripool.observe.machine import Machine, Package

Verdict = Literal["ok", "warn", "fail"]

_PYTHON = (3, 11)
_BASE_BYTES = 300 * 10**6
"""Memory of a process besides weights and KV: see bench/start.py."""
_LEAST_KV_BYTES = 64 * 10**6
_SHARED_BYTES = 512 * 2**20
"""Shared memory of a split server with default options: transfers of one prefill worker and a cache pool of 256 MB."""
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_JUMP_S = 0.5
_REINSTALL = "install a C compiler, then the package again (in a clone: `touch setup.py && make serve`)"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Verdict
    says: str
    remedy: str = ""


def check_machine(machine: Machine) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(machine)]


def _python(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.software.python))
    if machine.software.python[:2] < _PYTHON:
        yield Finding("python", "fail", f"{version} is too old", f"install Python {_PYTHON[0]}.{_PYTHON[1]} or newer")
    else:
        yield Finding("python", "ok", f"{version}, Tripool {machine.software.tripool}")


def _packages(machine: Machine) -> Iterator[Finding]:
    packages = machine.software.packages
    if not packages:
        remedy = "install it: `pip install .` in a clone, or `make serve`"
        yield Finding("packages", "warn", "Tripool runs from a folder that is not installed", remedy)
        return
    bad = [package for package in packages if not _fits(package)]
    for package in bad:
        found = f"is {package.found}" if package.found else "is not installed"
        remedy = f"pip install '{package.name}{package.needs}'"
        yield Finding("packages", "fail", f"{package.name} {found}; {package.needs or 'any version'} is needed", remedy)
    if not bad:
        yield Finding("packages", "ok", f"all {len(packages)} are there and fit")


def _torch(machine: Machine) -> Iterator[Finding]:
    software = machine.software
    found = next((p.found for p in software.packages if p.name == "torch"), None) or "torch"
    if software.torch_error is not None:
        yield Finding("torch", "fail", f"cannot be loaded: {software.torch_error}", "install it again")
    else:
        build = "CUDA build; the CPU build is smaller and enough" if software.torch_cuda else "CPU build"
        yield Finding("torch", "ok", f"{found}, {build}")


def _extras(machine: Machine) -> Iterator[Finding]:
    extras = machine.software.extras
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in extras.items())
    yield Finding("extras", "ok", f"{listed} (needed on one machine: none)")


def _kernels(machine: Machine) -> Iterator[Finding]:
    kernels, flags = machine.kernels, machine.cpu.flags
    best = "avx512" if {"avx512f", "avx512_vnni"} <= flags else "avx2" if {"avx2", "fma"} <= flags else "plain"
    if kernels.error is not None:
        yield Finding("kernels", "fail", f"cannot be loaded: {kernels.error}", _REINSTALL)
    elif not kernels.usable:
        problem = "none were compiled at install: float32 runs instead, slower and exact only up to rounding"
        yield Finding("kernels", "warn", problem, _REINSTALL)
    elif best not in kernels.usable:
        problem = f"{kernels.usable[0]} runs; this CPU could run {best}, which was not compiled"
        yield Finding("kernels", "warn", problem, _REINSTALL)
    else:
        yield Finding("kernels", "ok", f"{kernels.usable[0]} runs; compiled: {', '.join(kernels.compiled)}")
    if kernels.usable and kernels.usable[0] == best == "plain" and machine.cpu.machine in ("x86_64", "amd64"):
        yield Finding("cpu flags", "warn", "no AVX2: 8-bit products are several times slower", "use a newer CPU")


def _cpu(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    usable = (
        f"{cpu.num_usable} of {cpu.num_cores} cores" if cpu.num_usable < cpu.num_cores else f"{cpu.num_cores} cores"
    )
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.num_usable:
        problem = f"{usable}, but the control group grants only {cpu.quota_cores:g}: more threads than that only wait"
        yield Finding(
            "cpu", "warn", problem, f"serve with --threads {max(1, ceil(cpu.quota_cores))}, or raise the quota"
        )
    else:
        yield Finding("cpu", "ok", f"{usable}, {cpu.model}")
    if cpu.load > cpu.num_usable:
        problem = f"{cpu.load:.1f} threads wanted to run over the last minute: others compute here too"
        yield Finding("load", "warn", problem, "end them, or expect less speed")


def _memory(machine: Machine) -> Iterator[Finding]:
    memory, model = machine.memory, machine.model
    free = memory.available_bytes
    where = f"{_gb(free)} of {_gb(memory.total_bytes)} available"
    if memory.limit_bytes is not None and memory.limit_bytes - memory.limit_used_bytes < free:
        free = max(0, memory.limit_bytes - memory.limit_used_bytes)
        where = f"{_gb(free)} left of the control group's {_gb(memory.limit_bytes)}"
    if model.error is not None:
        yield Finding("memory", "ok", where)
        return
    fixed = model.weight_bytes + _BASE_BYTES
    wants = f"{model.name} in {model.precision} takes {_gb(model.weight_bytes)} and {_gb(model.kv_bytes)} of KV"
    if free < fixed + min(model.kv_bytes, _LEAST_KV_BYTES):
        yield Finding("memory", "fail", f"{where}; {wants}", "free some, or serve a smaller model")
    elif free < fixed + model.kv_bytes:
        least = (free - fixed) / 2**30
        yield Finding("memory", "warn", f"{where}; {wants}", f"give KV less than {least:.1f} GB: --kv-gb")
    else:
        yield Finding("memory", "ok", f"{where}; {wants}")


def _shared(machine: Machine) -> Iterator[Finding]:
    shared = machine.shared
    where = f"{_gb(shared.free_bytes)} of {_gb(shared.total_bytes)} free in {shared.path}"
    if not shared.is_memory:
        problem = f"{shared.path} is no memory: a split server's blocks would be written to a disk"
        yield Finding("shared memory", "warn", problem, "mount a tmpfs on /dev/shm, or serve without --split")
    elif shared.free_bytes < _SHARED_BYTES:
        remedy = "make it larger (in a container: --shm-size=2g), or serve without --split"
        yield Finding("shared memory", "warn", f"{where}: little for a split server", remedy)
    else:
        yield Finding("shared memory", "ok", where)


def _open_files(machine: Machine) -> Iterator[Finding]:
    limit, most = machine.open_files, machine.open_files_most
    remedy = f"ulimit -n {most}" if most > limit else "raise the limit for this user"
    if limit < _TOO_FEW_FILES:
        yield Finding("open files", "fail", f"at most {limit}: not enough to start", remedy)
    elif limit < _FEW_FILES:
        yield Finding("open files", "warn", f"at most {limit}, and every client is one", remedy)
    else:
        yield Finding("open files", "ok", f"at most {limit:,}")


def _port(machine: Machine) -> Iterator[Finding]:
    port = machine.port
    where = f"{port.host} port {port.port}"
    if port.server is not None:
        if port.ready:
            yield Finding("server", "ok", f"Tripool {port.server} answers at {port.url} and is ready")
        else:
            problem = f"Tripool {port.server} answers at {port.url} and is not ready: {port.says}"
            yield Finding("server", "warn", problem, "wait, see `tripool status`, or restart it")
    elif port.holder is not None:
        yield Finding("port", "warn", f"{where} is in use by {port.holder}", "choose another with --port")
    elif port.error is not None:
        yield Finding("port", "fail", f"cannot listen on {where}: {port.error}", "choose another with --host or --port")
    else:
        yield Finding("port", "ok", f"{where} is free")


def _loopback(machine: Machine) -> Iterator[Finding]:
    if machine.loopback_error is None:
        yield Finding("loopback", "ok", "127.0.0.1 works")
    else:
        problem = f"127.0.0.1 does not work: {machine.loopback_error}"
        yield Finding("loopback", "fail", problem, "bring the lo interface up, and let no firewall close it")


def _clock(machine: Machine) -> Iterator[Finding]:
    clock = machine.clock
    if clock.backwards:
        problem = "the monotonic clock ran backwards: every time-out here depends on it"
        yield Finding("clock", "fail", problem, "a fault of the kernel or the virtual machine; restart or move it")
    elif clock.wall_s < clock.installed_s:
        problem = f"the date is {(clock.installed_s - clock.wall_s) / 86400:,.1f} days before this was installed"
        yield Finding("clock", "warn", problem, "set the clock; use NTP")
    elif abs(clock.jump_s) > _JUMP_S:
        problem = f"the date jumped by {clock.jump_s:+.1f} s while this looked"
        yield Finding("clock", "warn", problem, "let NTP slew it instead of stepping")
    else:
        yield Finding("clock", "ok", "moves forward, and the date is plausible")


def _folders(machine: Machine) -> Iterator[Finding]:
    for folder in machine.folders:
        where = f"{folder.path} ({folder.purpose})"
        if not folder.writable:
            yield Finding("disk", "warn", f"{where} cannot be written", "give this user the right, or use another")
        elif folder.free_bytes < folder.needs_bytes:
            problem = f"{where}: {_gb(folder.free_bytes)} free, {_gb(folder.needs_bytes)} are needed"
            yield Finding("disk", "warn", problem, "free some space")
        else:
            yield Finding("disk", "ok", f"{where}: {_gb(folder.free_bytes)} free")


def _leftovers(machine: Machine) -> Iterator[Finding]:
    found = machine.leftovers
    if found:
        size, many = sum(one.num_bytes for one in found), "folder" if len(found) == 1 else "folders"
        problem = (
            f"{len(found)} {many} of runs whose processes are dead, {_gb(size)}: {', '.join(o.path for o in found)}"
        )
        yield Finding(
            "leftovers", "warn", problem, "`tripool doctor --fix` removes them; so does the next split server"
        )
    else:
        runs = f"; split servers that run: {machine.num_runs}" if machine.num_runs else ""
        yield Finding("leftovers", "ok", f"none{runs}")


def _model(machine: Machine) -> Iterator[Finding]:
    model = machine.model
    if model.error is not None:
        yield Finding("model", "fail", f"{model.name}: {model.error}", model.hint or "see `tripool models`")
    elif not model.present:
        yield Finding("model", "ok", f"{model.name} is not here yet; it is fetched on first use")
    else:
        yield Finding("model", "ok", f"{model.name} can be read: {model.path}")


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python, _packages, _torch, _kernels, _cpu, _memory, _model, _shared, _open_files, _port, _loopback, _clock,
    _folders, _leftovers, _extras,
)  # fmt: skip


def _fits(package: Package) -> bool:
    """Whether a version is within the bounds; only the leading numbers of an unusual version count."""
    if package.found is None:
        return False
    version = _numbers(package.found)
    for bound in filter(None, package.needs.split(",")):
        matched = re.fullmatch(r"\s*(>=|<=|==|!=|>|<|~=)\s*([^\s]+)\s*", bound)
        if matched is None:
            continue  # an unknown kind of bound
        other = _numbers(matched[2])
        width = max(len(version), len(other))
        ours, theirs = (n + (0,) * (width - len(n)) for n in (version, other))
        within = {
            ">=": ours >= theirs, "<=": ours <= theirs, "==": ours == theirs, "!=": ours != theirs,
            ">": ours > theirs, "<": ours < theirs, "~=": ours >= theirs and ours[: len(other) - 1] == other[:-1],
        }  # fmt: skip
        if not within[matched[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:,.0f} MB"
