"""What eviction and the disk tier are worth: production traces replayed through the cache pool's own policies.

    python bench/tiers.py [--quick] [--traces ../shared/traces] [--json FILE]

Memory has a quarter of the blocks that a trace ever names (--quick), or a tenth, a quarter and a half. Each request
looks up its prompt and then stores what was missing, in the order of arrival, through `TieredIndex`: the index, the
eviction order and the disk tier that a member runs, with a disk that is instant and 4 times as large as memory. Writes
are bounded by twice the trace's own mean rate of new blocks, unless a row says otherwise.

Hit rate: share of all prompt blocks that were found, as a prefix. Saved: the same, weighed by what they cost to
compute, which grows with their position (attention). Unlimited: a memory that forgets nothing, computed here from a
plain set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Origin, Row, print_table, write_json
from tripool.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest, parse_trace
from tripool.cache import PoolIndex
from tripool.cache.disk_records import PAGE, footprint
from tripool.cache.disk_tier import DiskTier
from tripool.cache.eviction import ATTENTION_BLOCKS, CostAware
from tripool.cache.records import Hit, Written
from tripool.cache.tiered_index import TieredIndex
from tripool.core import BLOCK_TOKENS
from tripool.messages import WorkerId

TRACES = ("conversation", "synthetic")
ATTENTION = ATTENTION_BLOCKS * BLOCK_TOKENS / TRACE_BLOCK_TOKENS
"""The same position, in blocks of the trace."""
DISK_PER_MEMORY = 4
WITH_DISK = 0.95
_SEGMENTS = 64
_STEP_S = 0.25
_SPACE = bytes(16)
_WRITER, _READER = WorkerId("writer", 1), WorkerId("reader", 1)


@dataclass(frozen=True)
class Kept:
    """Shares of all prompt blocks, and of the time to compute them."""

    hit_rate: float
    saved: float
    lost: int = 0
    """Blocks that memory forgot before they were written."""


class Tally:
    def __init__(self) -> None:
        self.asked = self.found = 0
        self.cost = self.saved = 0.0

    def add(self, num_blocks: int, num_found: int) -> None:
        self.asked += num_blocks
        self.found += num_found
        self.cost += _cost(num_blocks)
        self.saved += _cost(num_found)

    def kept(self, lost: int = 0) -> Kept:
        return Kept(self.found / self.asked, self.saved / self.cost, lost)


def _cost(num_blocks: int) -> float:
    """Of the first blocks of a chain, in units of the first one."""
    return num_blocks + num_blocks * (num_blocks - 1) / 2 / ATTENTION


def unlimited(trace: Sequence[TraceRequest]) -> Kept:
    seen: set[int] = set()
    tally = Tally()
    for request in trace:
        missing = (n for n, block in enumerate(request.block_ids) if block not in seen)
        tally.add(len(request.block_ids), next(missing, len(request.block_ids)))
        seen.update(request.block_ids)
    return tally.kept()


def replay(trace: Sequence[TraceRequest], num_slots: int, order: CostAware, disk: DiskTier | None = None) -> Kept:
    """Through the policies, with a disk that answers at once."""
    tiered_index = TieredIndex(PoolIndex(num_slots, lease_s=1e9, write_s=1e9, order=order), WorkerId("member", 1))
    if disk is not None:
        tiered_index.add_tier(disk)
    tally, written_s = Tally(), 0.0
    for request in trace:
        now_s = request.arrival_s
        keys = [block.to_bytes(16, "big") for block in request.block_ids]
        hit = tiered_index.lookup(keys, _READER, _SPACE, now_s, wait_s=1e9)
        for read in tiered_index.take_reads(disk) if disk is not None else ():
            tiered_index.was_read(read, read.copy.checksum)
        if not isinstance(hit, Hit):
            ((_, hit),) = tiered_index.answers(now_s)
        tally.add(len(keys), len(hit.blocks))
        tiered_index.index.release(hit.lease, _READER)
        grant = tiered_index.index.reserve(keys, _WRITER, _SPACE, now_s)
        tiered_index.index.commit(grant.ticket, _WRITER, [Written(slot, 1, PAGE) for slot in grant.slots])
        tiered_index.take_changes()
        if disk is not None:
            write(disk, written_s, now_s)
        written_s = now_s
    tiered_index.check()
    return tally.kept(disk.counters.lost if disk is not None else 0)


def write(disk: DiskTier, from_s: float, to_s: float) -> None:
    """As fast as the tier's own bound allows; traces jump by seconds."""
    times_s = [from_s + n * _STEP_S for n in range(1, int((to_s - from_s) / _STEP_S) + 1)]
    for now_s in [*times_s, to_s]:
        while writes := disk.next_writes(now_s):
            for each in writes:
                disk.written(each.copy.number)


def new_disk(num_blocks: int, blocks_per_s: float) -> DiskTier:
    segment_bytes = PAGE + max(1, num_blocks // _SEGMENTS) * footprint(PAGE)
    return DiskTier(_SEGMENTS, segment_bytes, bytes_per_s=blocks_per_s * footprint(PAGE))


def measure(name: str, trace: Sequence[TraceRequest], shares: Sequence[float], rates: Sequence[float]) -> list[Row]:
    num_unique = len({block for request in trace for block in request.block_ids})
    mean_rate = num_unique / max(1.0, trace[-1].arrival_s)
    best = unlimited(trace)
    rows = []
    for share in shares:
        num_slots, of = max(1, int(share * num_unique)), f"{name}, memory {100 * share:g} %"
        lru = replay(trace, num_slots, CostAware(num_slots, weight=0.0))
        cost = replay(trace, num_slots, CostAware(num_slots, attention_blocks=ATTENTION))
        rows += [
            _row(f"{of}: LRU / unlimited", "hit rate", lru.hit_rate, best.hit_rate, None),
            _row(f"{of}: cost-aware / LRU", "hit rate", cost.hit_rate, lru.hit_rate, 1.0),
            _row(f"{of}: cost-aware / LRU", "saved", cost.saved, lru.saved, 1.0),
        ]
        for rate in rates:
            disk = new_disk(DISK_PER_MEMORY * num_slots, rate * mean_rate)
            both = replay(trace, num_slots, CostAware(num_slots, attention_blocks=ATTENTION), disk)
            target = WITH_DISK if (share, rate) == (0.25, 2.0) else None
            lost = f"writing {rate:g} x the mean rate ({rate * mean_rate:.0f} blocks/s); {both.lost:,} blocks lost"
            row = _row(f"{of}: with disk / unlimited", "hit rate", both.hit_rate, best.hit_rate, target, lost)
            rows += [row, _row(f"{of}: with disk / unlimited", "saved", both.saved, best.saved, None, lost)]
    return rows


def _row(name: str, unit: str, ours: float, peer: float, target: float | None, note: str = "") -> Row:
    by = f"{100 * (ours / peer - 1):+.2f} %"
    return Row(name=name, ours=ours, peer=peer, unit=unit, target=target, note=f"{by}; {note}" if note else by)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="memory of a quarter only: about a minute")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder of the .jsonl files")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin = Origin.now()
    shares, rates = ((0.25,), (2.0,)) if options.quick else ((0.1, 0.25, 0.5), (2.0, 0.5))
    rows: list[Row] = []
    for name in TRACES:
        file = options.traces / f"{name}_trace.jsonl"
        if not file.exists():
            parser.error(f"{file} is missing: --traces names the folder with Mooncake's traces")
        with file.open() as lines:
            rows += measure(name, parse_trace(lines), shares, rates)
    print_table(rows, origin, "Memory, eviction and disk on production traces")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
