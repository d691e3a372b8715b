"""Client of the cache pool: finds the longest cached prefix, copies blocks out, and stores new ones.

Synchronous, for the loop of one thread. The pool is optional: any failure of it is a miss after a bounded wait, not an
error. Blocks are verified after copying, so a caller gets exactly what was stored.

    with pool.find(keys, namespace="tenant") as prefix:
        blocks = allocate(prefix.num_blocks)
        num_blocks = prefix.read(blocks)
    pool.store(keys, computed, namespace="tenant", first=num_blocks)

`keys` is always the chain from its first block: the member of a block depends on the segment it is in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any

from tripool.cache import wire
from tripool.cache.arena import MAX_WORKER_NAME_BYTES, Arena, as_bytes
from tripool.cache.copying import wake_helper
from tripool.cache.host import CacheHost
from tripool.cache.link import Acquired, FoundBlocks, Link
from tripool.cache.records import Block, Written, namespace_tag
from tripool.cache.ring import SEGMENT_BLOCKS, Ring
from tripool.cache.shared_reads import SharedBlocks
from tripool.errors import InvalidRequest
from tripool.messages import Reaped, Suspect, WorkerId

_LOOK_S = 0.01
_WATCH_S = 0.5
"""How often the members are looked at, where they may change."""
_HOT, _COUNTED = 3, 4096
"""Reads of a segment by this client before it is stored a second time, and how many segments are counted."""
_STOP_WRITING = 0.8
"""Share of the write deadline after which no further block is started."""


@dataclass(slots=True)
class _Held:
    """One member's part of a prefix."""

    link: Link
    lease: int | Acquired
    found: FoundBlocks

    def release(self) -> None:
        self.link.end(self.lease, self.found)


_Run = tuple[FoundBlocks, int, int]
"""Consecutive blocks of a chain: (blocks of one member, start, stop)."""


class Prefix:
    """Cached blocks under a lease that ends soon. Release it, or use it with `with`."""

    def __init__(self, runs: list[_Run], held: list[_Held]) -> None:
        self._runs, self._held = runs, held
        self.on_read: Callable[[Prefix, Sequence[Any]], None] | None = None
        """Takes the buffers that hold their blocks."""

    @property
    def num_blocks(self) -> int:
        return sum(stop - start for _, start, stop in self._runs)

    @property
    def blocks(self) -> list[Block]:
        return [block for found, start, stop in self._runs for block in list(found)[start:stop]]

    @property
    def from_disk(self) -> list[bool]:
        """Whether each block was only on disk when it was looked up."""
        return [block.from_disk for block in self.blocks]

    def read(self, into: Sequence[Any]) -> int:
        """Copy the blocks into these writable buffers, from the first on; returns how many buffers hold their block.

        The contents of the buffers after that number are undefined.
        """
        num_good = 0
        for found, start, stop in self._runs:
            wanted = into[num_good : num_good + stop - start]
            num_read = found.read(start, wanted)
            num_good += num_read
            if num_read < stop - start:
                break
        if self.on_read is not None:
            self.on_read(self, into[:num_good])
        return num_good

    def release(self) -> None:
        for held in self._held:
            held.release()
        self._held, self._runs = [], []

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


_Asked = tuple[Link, list[int], tuple[Acquired, SharedBlocks] | int | None]
"""A member, positions, and the result of a shared read, or else the number of the request."""


class PoolClient:
    """`worker_id` must be unique to this client and end with its process: then its reservations are freed."""

    def __init__(
        self,
        host: CacheHost,
        members: Sequence[str],
        worker_id: WorkerId,
        *,
        wait_s: float = 0.25,
        retry_s: float = 0.5,
        open_link: Callable[[str], Link] | None = None,
        watch: Callable[[], Sequence[str] | None] = lambda: None,
        host_of: Callable[[str], str] | None = None,
    ) -> None:
        """`open_link`: to a member that may be on another host. `watch`: the members, when they have changed.
        `host_of` a member: blocks that are read often get a second copy on another one; None: they do not."""
        if len(worker_id.name.encode()) > MAX_WORKER_NAME_BYTES:
            hint = f"at most {MAX_WORKER_NAME_BYTES} bytes"
            raise InvalidRequest(f"the worker's name {worker_id.name!r} is too long", hint=hint)
        self._now_s, self._watch, self._host_of = host.now_s, watch, host_of
        self._reads: Counter[bytes] = Counter()
        """Of segments, by the key of the first block."""
        self._open = open_link or (lambda member: Link(host, member, worker_id, wait_s, retry_s))
        self._watched_s = float("-inf")
        self._links: dict[str, Link] = {}
        self._ring = Ring(())
        self._change(members)

    def _change(self, members: Sequence[str]) -> None:
        """Blocks of members that are gone are lost; most of the others stay where they are."""
        self._ring = Ring(members)
        for gone in self._links.keys() - set(members):
            self._links.pop(gone).close()
        self._links = {member: self._links.get(member) or self._open(member) for member in self._ring.members}

    def _look(self) -> None:
        if self._now_s() >= self._watched_s + _WATCH_S:
            self._watched_s = self._now_s()
            members = self._watch()
            if members is not None:
                self._change(members)

    def flush(self) -> None:
        """Send pending releases now. Otherwise they go with the next request, or the leases expire."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def wait(self, within_s: float) -> list[str]:
        """Wait until every member answers, at most `within_s`; returns the members that do not."""
        deadline_s = self._now_s() + within_s
        while missing := [member for member, link in self._links.items() if not link.answers()]:
            if self._now_s() >= deadline_s:
                break
            time.sleep(_LOOK_S)
        return missing

    # ---- blocks -------------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], into: Sequence[Any], *, namespace: str, first: int = 0) -> int:
        """Find and read in one call: buffers for the blocks from `first` on. Returns how many were filled."""
        block_bytes = memoryview(into[0]).nbytes if into else 0
        with self.find(keys[: first + len(into)], namespace=namespace, first=first, block_bytes=block_bytes) as prefix:
            return prefix.read(into)

    def find(self, keys: Sequence[bytes], *, namespace: str, first: int = 0, block_bytes: int = 0) -> Prefix:
        """The longest cached part of the chain that starts at position `first`. `block_bytes`: it is read at once."""
        prefix = self._hear(self._ask(keys, namespace, first, block_bytes), keys, first)
        if self._host_of is not None and prefix.num_blocks:
            prefix.on_read = partial(self._copy_hot, tuple(keys), namespace, first)
        return prefix

    def _copy_hot(
        self, keys: Sequence[bytes], namespace: str, first: int, prefix: Prefix, blocks: Sequence[Any]
    ) -> None:
        """Store segments that are read often where they will be looked for if their host is lost."""
        assert self._host_of is not None
        if len(self._reads) > _COUNTED:
            self._reads.clear()
        found, at = prefix.blocks, first
        while at < first + len(blocks):
            start = at - at % SEGMENT_BLOCKS
            stop = min(start + SEGMENT_BLOCKS, first + len(blocks))
            self._reads[keys[start]] += 1
            here = self._host_of(self._ring.owner(keys[start]))
            away = [member for member in self._ring.members if self._host_of(member) == here]
            other = self._ring.next_owner(keys[start], away) if self._reads[keys[start]] == _HOT else None
            if other is not None and self._links[other].ready():
                for form, group in groupby(range(at, stop), lambda position: found[position - first].form):
                    positions = list(group)
                    places = {self._links[other]: positions}
                    part = [blocks[position - first] for position in positions]
                    self._store_at(places, keys, part, namespace, positions[0], form, ())
            at = stop

    def _ask(self, keys: Sequence[bytes], namespace: str, first: int, block_bytes: int) -> list[_Asked]:
        tag = namespace_tag(namespace)
        asked: list[_Asked] = []
        places = self._places(keys, first)
        if any(link.is_mapped for link in places):
            wake_helper(block_bytes)
        for link, positions in places.items():
            wanted = tuple(keys[position] for position in positions)
            asked.append((link, positions, link.find_here(tag, wanted) or link.look_up(tag, wanted)))
        return asked

    def _hear(self, asked: list[_Asked], keys: Sequence[bytes], first: int) -> Prefix:
        held: list[_Held] = []
        found: dict[int, tuple[FoundBlocks, int]] = {}
        for link, positions, lease in asked:
            part = _Held(link, *lease) if isinstance(lease, tuple) else self._answered(link, positions, lease, keys)
            if part is not None:
                held.append(part)
                if len(asked) > 1:
                    found |= {
                        position: (part.found, place) for place, position in enumerate(positions[: len(part.found)])
                    }
        runs: list[_Run] = []
        if len(asked) == 1 and held:  # the usual case: nothing to merge
            return Prefix([(held[0].found, 0, len(held[0].found))], held)
        while first in found:
            part_found, start = found[first]
            stop = start + 1
            first += 1
            while found.get(first) == (part_found, stop):
                stop, first = stop + 1, first + 1
            runs.append((part_found, start, stop))
        return Prefix(runs, held)

    def _answered(self, link: Link, positions: list[int], number: int | None, keys: Sequence[bytes]) -> _Held | None:
        found = link.found(number, [keys[position] for position in positions])
        return None if found is None else _Held(link, *found)

    def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        *,
        namespace: str,
        first: int = 0,
        form: int = 0,
        checksums: Sequence[int] = (),
    ) -> int:
        """Store blocks (contiguous buffers) of the chain from position `first` on; returns how many were written.

        Fewer than given if other workers stored them already, if there is no room, or from the first block on that does
        not have its checksum, where `checksums` are known.
        """
        places = self._places(keys[: first + len(blocks)], first)
        return self._store_at(places, keys, blocks, namespace, first, form, checksums)

    def _store_at(
        self,
        places: Mapping[Link, list[int]],
        keys: Sequence[bytes],
        blocks: Sequence[Any],
        namespace: str,
        first: int,
        form: int,
        checksums: Sequence[int],
    ) -> int:
        began_s = self._now_s()
        tag = namespace_tag(namespace)
        asked, num_written = [], 0
        for link, positions in places.items():
            wanted = tuple(keys[position] for position in positions)
            sent = link.send_blocks(tag, wanted, positions, blocks, checksums, first, form)
            if sent is None:
                asked.append((link, positions, link.reserve(tag, wanted, tuple(positions))))
            num_written += sent or 0
        granted = [(link, positions, link.answer(number, wire.Granted)) for link, positions, number in asked]
        for link, positions, grant in granted:
            if grant is None or not grant.ticket or not _fits(grant, len(positions), link.arena):
                continue
            until_s = began_s + _STOP_WRITING * link.write_s
            wanted_blocks = [blocks[position - first] for position in positions]
            sums = [checksums[position - first] for position in positions] if checksums else []
            written = self._write(link, grant, wanted_blocks, sums, form, until_s)
            link.commit(grant.ticket, written)
            num_written += len(written)
        return num_written

    def _write(
        self,
        link: Link,
        grant: wire.Granted,
        blocks: Sequence[Any],
        checksums: Sequence[int],
        form: int,
        until_s: float,
    ) -> list[Written]:
        written: list[Written] = []
        for position, slot in zip(grant.positions, grant.slots, strict=True):
            source, arena = as_bytes(blocks[position]), link.arena
            if arena is None or len(source) > arena.slot_bytes or self._now_s() > until_s:
                break
            found = arena.write(slot, source)
            if checksums and found != checksums[position]:
                break
            written.append(Written(slot, found, len(source), form))
        return written

    def _places(self, keys: Sequence[bytes], first: int) -> dict[Link, list[int]]:
        """Positions by member, for members that answer. The chain is cut at the first absent member."""
        places: dict[Link, list[int]] = {}
        self._look()
        if not self._links:
            return places
        for stretch in self._ring.member_ranges(keys, first):
            link = self._links[stretch.member]
            if not link.ready():
                break
            places.setdefault(link, []).extend(range(stretch.start, stretch.stop))
        return places

    # ---- administration -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, wire.Stats | None]:
        """Stats of each member; None for those that do not answer."""
        self._look()
        asked = {member: link.ask(wire.GetStats) if link.ready() else None for member, link in self._links.items()}
        return {member: self._links[member].answer(number, wire.Stats) for member, number in asked.items()}

    def report(self, fate: Suspect | Reaped) -> list[str]:
        """Report a worker's loss to every member; returns the members that could not be reached.

        Repeat it for those when they are back: until then they keep the worker's reservations.
        """
        return [member for member, link in self._links.items() if not (link.ready() and link.tell(fate))]

    def purge(self, tags: Sequence[bytes]) -> int:
        """Purge tenants, by namespace tag; returns the number of blocks. Absent members keep theirs until the purge is
        repeated.
        """
        asked = [(link, link.ask(wire.Purge, tag)) for link in self._links.values() for tag in tags if link.ready()]
        answers = [link.answer(number, wire.Purged) for link, number in asked]
        return sum(answer.num_blocks for answer in answers if answer is not None)

    def limit(self, slots: Mapping[str, Mapping[bytes, int]]) -> list[str]:
        """Set the quotas of each member by namespace tag; returns the members that could not be reached.

        A member loses the quotas when it restarts: repeat this from time to time.
        """
        asked = [
            (link, link.ask(wire.Quotas, dict(slots[name])) if link.ready() else None)
            for name, link in self._links.items()
        ]
        return [link.member for link, number in asked if link.answer(number, wire.Purged) is None]


def _fits(grant: wire.Granted, num_asked: int, arena: Arena | None) -> bool:
    """Whether a grant matches the request and its slots exist."""
    if arena is None or len(grant.positions) != len(grant.slots) or len(set(grant.slots)) != len(grant.slots):
        return False
    return max(grant.positions, default=0) < num_asked and max(grant.slots, default=0) < arena.num_slots
