"""Facts for `doctor`: one machine, one installation, one model, at one moment. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    name: str
    needs: str
    """Version bounds, such as `>=2.11,<=2.13.0`; empty: any."""
    found: str | None
    """None: not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    python: tuple[int, int, int]
    tripool: str
    packages: tuple[Package, ...]
    """Requirements of the installation. Empty: it was not installed as a package."""
    torch_error: str | None = None
    """Why torch cannot be loaded."""
    torch_cuda: bool = False
    """The large build, for GPUs."""
    extras: Mapping[str, str | None] = field(default_factory=dict)
    """Optional packages with their installed versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    model: str
    machine: str
    """x86_64, aarch64, ..."""
    num_cores: int
    num_usable: int
    """Cores usable by this process."""
    quota_cores: float | None
    """Of the control group; None: no bound."""
    load: float
    """Mean number of runnable threads over the last minute."""
    flags: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    compiled: tuple[str, ...]
    usable: tuple[str, ...]
    """Kernels this CPU can run, best first; the first one is used."""
    error: str | None = None
    """Why that one cannot be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """Of the control group; None: no bound."""
    limit_used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Where a split server's processes share memory."""

    path: str
    is_memory: bool
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    host: str
    port: int
    error: str | None = None
    """Why one cannot listen there."""
    holder: str | None = None
    """The process that listens there, if it can be determined."""
    url: str = ""
    server: str | None = None
    """Version of the Tripool that answers there."""
    ready: bool = False
    says: str = ""
    """The server's message when it is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    wall_s: float
    installed_s: float
    """Time of the newest file of the installation: a lower bound of the present."""
    backwards: bool
    """The monotonic clock ran backwards."""
    jump_s: float
    """Drift of the wall clock against the monotonic clock during the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    purpose: str
    path: str
    writable: bool
    free_bytes: int
    needs_bytes: int = 0
    """Bytes that may still have to be written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    path: str
    present: bool
    """False: it will be fetched."""
    error: str | None = None
    hint: str = ""
    weight_bytes: int = 0
    """In memory, in the precision that will run."""
    kv_bytes: int = 0
    """Default KV size."""
    precision: str = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    software: Software
    cpu: Cpu
    kernels: Kernels
    memory: Memory
    shared: Shared
    open_files: int
    open_files_most: int
    """As far as the user may raise it."""
    port: Port
    loopback_error: str | None
    clock: Clock
    folders: tuple[Folder, ...]
    leftovers: tuple[Leftover, ...]
    num_runs: int
    """Split servers of this user that run now."""
    model: Model
