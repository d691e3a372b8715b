"""Blocks of 1 MB from one process to another: Tripool's cache pool beside Mooncake's store, Redis and Ray objects.

    python bench/cache.py            needs bench/peers/install.py, and Debian's redis-server and libibverbs1
    python bench/cache.py --quick    fewer repetitions

One process puts blocks, another gets them by key into its own memory. Ours is look-up, lease, copy, checksum and
release; the peers look up and copy (Ray: an actor call for the key, `ray.get`, a copy) and hash nothing. All of them
are up at the same time and take turns, and whoever has not got the turn is stopped meanwhile, with all its processes:
what a store does while nobody asks it (Ray's agents, Mooncake's threads) would be time of the others otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness import Measured, Origin, Row, Worker, WorkerFailed, print_table, take_turns, write_json
from sides import INSTALL, LOGS, PEERS_ENV, PROGRAMS

BLOCK_BYTES = 2**20
NUM_BLOCKS, BATCH = 32, 16
FIRST_BLOCK_US, FURTHER_BLOCK_US = 250.0, 100.0
FASTER = 5.0
START_WITHIN_S, WORK_WITHIN_S = 120.0, 120.0
PEERS = {"Mooncake": "store_mooncake.py", "Redis": "store_redis.py", "Ray": "store_ray.py"}
DEBIAN = "Debian packages redis-server and libibverbs1"


@dataclass
class Store:
    """A store that is up, with its blocks in it and its reader waiting."""

    worker: Worker
    version: str

    def us(self, what: str, batch: int, repeat: int) -> float:
        return float(self.worker.ask(do=what, batch=batch, repeat=repeat, within_s=WORK_WITHIN_S)["us"])


def start(name: str, program: str, python: Path) -> Store:
    if not python.exists():
        raise WorkerFailed(f"not installed (run: {INSTALL}; {DEBIAN})")
    LOGS.mkdir(parents=True, exist_ok=True)
    worker = Worker([str(python), str(PROGRAMS / program)], LOGS / f"store {name}.log")
    blocks = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES}
    try:
        hosted = worker.ask(do="host", within_s=START_WITHIN_S)
        worker.ask(do="put", within_s=WORK_WITHIN_S, **blocks)
        worker.ask(do="join", place=hosted["place"], batch=BATCH, within_s=START_WITHIN_S, **blocks)
        store = Store(worker, hosted["version"])
        for batch in (1, BATCH):
            store.us("get", batch, 2)  # warm-up
        return store
    except WorkerFailed as failure:
        worker.close()
        raise WorkerFailed(f"{failure} (run: {INSTALL}; {DEBIAN})") from None


def processes_of(pid: int) -> list[int]:
    """A process and all that come from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


@contextmanager
def alone(store: Store, stores: Iterable[Store]) -> Iterator[None]:
    resting = [pid for other in stores if other is not store for pid in processes_of(other.worker.pid)]
    try:
        tell(resting, signal.SIGSTOP)
        yield
    finally:
        tell(resting, signal.SIGCONT)


def tell(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def measure(stores: dict[str, Store], repetitions: int, repeat: int) -> dict[tuple[str, int], Measured]:
    """By what and batch: one block, a batch of them, and the floor of both."""

    def us(store: Store, what: str, batch: int) -> float:
        with alone(store, stores.values()):
            return store.us(what, batch, max(1, repeat // batch))

    found = {}
    for batch in (1, BATCH):
        gets: dict[str, Callable[[int], float]] = {
            name: lambda _, store=store, batch=batch: us(store, "get", batch) for name, store in stores.items()
        }
        if "ours" in stores:
            gets["floor"] = lambda _, batch=batch: us(stores["ours"], "floor", batch)
        found["get", batch] = take_turns(gets, repetitions)
    return found


def rows(found: dict[tuple[str, int], Measured], failed: dict[str, str], versions: dict[str, str]) -> list[Row]:
    one, many = found["get", 1], found["get", BATCH]
    failed = failed | one.failed | many.failed

    def further(side: str) -> float | None:
        first, all_of_them = one.median(side), many.median(side)
        return None if first is None or all_of_them is None else (all_of_them - first) / (BATCH - 1)

    floor, floor_many = one.median("floor"), many.median("floor")
    floor_note = "" if floor is None else f"plain copy + xxh3 of the same block: {floor:.0f} µs"
    floor_each = "" if floor_many is None else f"plain copy + xxh3 of the same blocks: {floor_many / BATCH:.0f} µs each"
    our_failure = failed.get("ours", "")
    told = {"unit": "µs", "lower_is_better": True}
    made = [
        Row(
            name="one block, look-up to release", ours=one.median("ours"), peer=FIRST_BLOCK_US, target=1.0,
            note=our_failure or f"peer: the bar; {floor_note}", details={"floor_us": floor}, **told,
        ),
        Row(
            name=f"each further block of {BATCH}", ours=further("ours"), peer=FURTHER_BLOCK_US, target=1.0,
            note=our_failure or f"peer: the bar; {floor_each}", details={"batch_us": many.median("ours")}, **told,
        ),
    ]  # fmt: skip
    known = {name: us for name in PEERS if (us := one.median(name)) is not None}
    for name in PEERS:
        note = failed.get(name) or versions.get(name, "")
        made.append(
            Row(
                name=f"one block: {name}", ours=one.median("ours"), peer=known.get(name), target=None, note=note, **told
            )
        )
        made.append(
            Row(
                name=f"a further block: {name}",
                ours=further("ours"),
                peer=further(name),
                target=None,
                note=note,
                **told,
            )
        )
    best = min(known, key=lambda name: known[name], default=None)
    note = f"best: {best}; {floor_note}" if len(known) == len(PEERS) else "not all peers were there"
    peer = known[best] if best and len(known) == len(PEERS) else None
    made.append(
        Row(name="one block: the best peer", ours=one.median("ours"), peer=peer, target=1 / FASTER, note=note, **told)
    )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin = Origin.now()
    stores: dict[str, Store] = {}
    failed: dict[str, str] = {}
    programs = {"ours": ("store_ours.py", Path(sys.executable))}
    programs |= {name: (program, PEERS_ENV / "bin" / "python") for name, program in PEERS.items()}
    try:
        for name, (program, python) in programs.items():
            try:
                stores[name] = start(name, program, python)
            except WorkerFailed as failure:
                failed[name] = str(failure)
        repetitions, repeat = (3, 32) if options.quick else (11, 128)
        measured = measure(stores, repetitions, repeat)
    finally:
        for store in stores.values():
            store.worker.close()
    made = rows(measured, failed, {name: f"{name} {store.version}" for name, store in stores.items()})
    print_table(made, origin, "One megabyte from process to process")
    if options.json:
        write_json(made, origin, options.json)
    return 0 if all(row.ok is not False for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
