"""An invented machine on which everything is well, to be changed where a test wants it."""

from tripool.observe.machine import (
    Clock,
    Cpu,
    Folder,
    Kernels,
    Machine,
    Memory,
    Model,
    Package,
    Port,
    Shared,
    Software,
)

GB = 10**9

GOOD = Machine(
    software=Software(
        python=(3, 12, 1),
        tripool="0.1.0",
        packages=(
            Package(name="torch", needs=">=2.11,<=2.13.0", found="2.13.0+cpu"),
            Package(name="typer", needs=">=0.12", found="0.20.0"),
        ),
        extras={"ray": None},
    ),
    cpu=Cpu(
        model="a CPU",
        machine="x86_64",
        num_cores=8,
        num_usable=8,
        quota_cores=None,
        load=0.5,
        flags=frozenset({"avx2", "fma", "avx512f", "avx512_vnni"}),
    ),
    kernels=Kernels(compiled=("avx2", "avx512", "plain"), usable=("avx512", "avx2", "plain")),
    memory=Memory(total_bytes=32 * GB, available_bytes=20 * GB, limit_bytes=None),
    shared=Shared(path="/dev/shm", is_memory=True, total_bytes=16 * GB, free_bytes=15 * GB),
    open_files=20_000,
    open_files_most=100_000,
    port=Port(host="127.0.0.1", port=8000),
    loopback_error=None,
    clock=Clock(wall_s=2e9, installed_s=1.9e9, backwards=False, jump_s=0.0),
    folders=(Folder(purpose="models", path="/cache", writable=True, free_bytes=50 * GB, needs_bytes=GB),),
    leftovers=(),
    num_runs=0,
    model=Model(name="tiny", path="/m", present=True, weight_bytes=GB, kv_bytes=2 * GB),
)
