"""A worker's side of the cache pool: finds the longest known prefix, copies blocks out, and copies new ones in.

Synchronous, for the loop of one thread. The pool is a help, never a need: whatever is wrong with it is a miss after a
bounded wait, not an error. Blocks are checked after they were copied, so what a caller gets is what was stored.

    with pool.find(keys, namespace="tenant") as prefix:
        blocks = allocate(prefix.num_blocks)
        num_blocks = prefix.read(blocks)
    pool.store(keys, computed, namespace="tenant", first=num_blocks)

`keys` is always the chain from its first block: where a block lives depends on the segment it is in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tripool.cache import wire
from tripool.cache.arena import MAX_WORKER_NAME_BYTES, Arena, as_bytes
from tripool.cache.link import Link
from tripool.cache.records import Block, namespace_tag
from tripool.cache.ring import Ring
from tripool.errors import InvalidRequest
from tripool.messages import Life, Reaped, Suspect

_LOOK_S = 0.01
_STOP_WRITING = 0.8
"""Part of the time a writer has after which it begins no other block."""


_SHARED_BLOCKS = 3
"""As many or more are read by two threads."""


@dataclass(slots=True)
class _Held:
    """One member's part of a prefix."""

    link: Link
    arena: Arena
    """The one its slots are of: the link may have another by the time they are read."""
    lease: int
    bad: tuple[int, ...] = ()


class Prefix:
    """Blocks that are there, and stay there until the lease ends: soon. Release it, or use it with `with`."""

    def __init__(
        self, blocks: list[tuple[_Held, bytes, Block]], held: list[_Held], helper: ThreadPoolExecutor | None = None
    ) -> None:
        self._blocks, self._held, self._helper = blocks, held, helper

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def forms(self) -> list[int]:
        """What the writer of each block said of it."""
        return [block.form for _, _, block in self._blocks]

    def read(self, into: Sequence[Any]) -> int:
        """Fill these writable buffers, one per block from the first on; returns how many hold their block.

        Buffers behind that number may hold anything.
        """
        pairs = list(zip(into, self._blocks, strict=False))
        good = [False] * len(pairs)
        bad: list[int] = []

        def read_from(first: int, step: int) -> None:
            for number in range(first, len(pairs), step):
                buffer, (held, key, block) = pairs[number]
                target = as_bytes(buffer)
                intact = len(target) == block.num_bytes and held.arena.read(block.slot, target) == block.checksum
                if not held.arena.holds(block.slot, key):
                    return  # the lease was lost, and the slot is someone else's: not our business
                if not intact:
                    if len(target) == block.num_bytes:
                        bad.append(number)
                    return
                good[number] = True

        if self._helper is None or len(pairs) < _SHARED_BLOCKS:
            read_from(0, 1)
        else:
            # Copying and hashing let go of the interpreter, and one core cannot keep the memory busy.
            other = self._helper.submit(read_from, 1, 2)
            read_from(0, 2)
            other.result()
        for number in bad:
            held, _, block = pairs[number][1]
            held.bad += (block.slot,)
        return good.index(False) if False in good else len(good)

    def release(self) -> None:
        for held in self._held:
            held.link.release(held.lease, held.bad)
        self._held, self._blocks = [], []

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class PoolClient:
    """`life` must be this client's alone, and end with its process: then all it was writing is free again."""

    def __init__(
        self, folder: Path, members: Sequence[str], life: Life, *, wait_s: float = 0.25, retry_s: float = 0.5
    ) -> None:
        if len(life.worker.encode()) > MAX_WORKER_NAME_BYTES:
            hint = f"at most {MAX_WORKER_NAME_BYTES} bytes"
            raise InvalidRequest(f"the worker's name {life.worker!r} is too long", hint=hint)
        self._ring = Ring(members)
        self._links = {member: Link(folder, member, life, wait_s, retry_s) for member in self._ring.members}
        self._helper = ThreadPoolExecutor(1, "tripool-cache-read")

    def flush(self) -> None:
        """Let go, now, of what was read. Otherwise that goes with the next question, or ends with the lease's time."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        self._helper.shutdown()
        for link in self._links.values():
            link.close()

    def wait(self, within_s: float) -> list[str]:
        """Until every member is there, or the time is over; returns those that are missing then."""
        deadline_s = time.monotonic() + within_s
        while missing := [member for member, link in self._links.items() if not link.answers()]:
            if time.monotonic() >= deadline_s:
                break
            time.sleep(_LOOK_S)
        return missing

    # ---- blocks -------------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], into: Sequence[Any], *, namespace: str, first: int = 0) -> int:
        """Find and read at once: buffers for the blocks from `first` on. Returns how many were filled."""
        with self.find(keys[: first + len(into)], namespace=namespace, first=first) as prefix:
            return prefix.read(into)

    def find(self, keys: Sequence[bytes], *, namespace: str, first: int = 0) -> Prefix:
        """The longest known stretch of the chain that begins at position `first`."""
        places = self._places(keys, first)
        tag = namespace_tag(namespace)
        asked = [
            (link, positions, link.look_up(tag, tuple(keys[position] for position in positions)))
            for link, positions in places.items()
        ]
        held: list[_Held] = []
        found: dict[int, tuple[_Held, bytes, Block]] = {}
        for link, positions, number in asked:
            answer = link.answer(number, wire.Found)
            if answer is None or not answer.lease or link.arena is None:
                continue
            part = _Held(link, link.arena, answer.lease)
            held.append(part)
            columns = zip(answer.slots, answer.checksums, answer.sizes, answer.forms, strict=True)
            for position, column in zip(positions, columns, strict=False):
                found[position] = part, keys[position], Block(*column)
        blocks: list[tuple[_Held, bytes, Block]] = []
        while first + len(blocks) in found:
            blocks.append(found[first + len(blocks)])
        return Prefix(blocks, held, self._helper)

    def store(
        self, keys: Sequence[bytes], blocks: Sequence[Any], *, namespace: str, first: int = 0, form: int = 0
    ) -> int:
        """Publish blocks (contiguous buffers) of the chain from position `first` on; returns how many were written.

        Fewer than given when others have them already, or when there is no room.
        """
        began_s = time.monotonic()
        places = self._places(keys[: first + len(blocks)], first)
        tag = namespace_tag(namespace)
        asked = [
            (link, positions, link.reserve(tag, tuple(keys[position] for position in positions)))
            for link, positions in places.items()
        ]
        granted = [(link, positions, link.answer(number, wire.Granted)) for link, positions, number in asked]
        num_written = 0
        for link, positions, grant in granted:
            if grant is None or not grant.ticket:
                continue
            until_s = began_s + _STOP_WRITING * link.write_s
            written = self._write(link, grant, [blocks[position - first] for position in positions], until_s)
            link.commit(grant.ticket, written, form)
            num_written += len(written)
        return num_written

    def _write(
        self, link: Link, grant: wire.Granted, blocks: Sequence[Any], until_s: float
    ) -> list[tuple[int, int, int]]:
        written: list[tuple[int, int, int]] = []
        for position, slot in zip(grant.positions, grant.slots, strict=True):
            source, arena = as_bytes(blocks[position]), link.arena
            if arena is None or len(source) > arena.slot_bytes or time.monotonic() > until_s:
                break
            written.append((slot, arena.write(slot, source), len(source)))
        return written

    def _places(self, keys: Sequence[bytes], first: int) -> dict[Link, list[int]]:
        """Positions by member, for members that are there. A chain is cut where the first absent one comes in."""
        places: dict[Link, list[int]] = {}
        if not self._links:
            return places
        for stretch in self._ring.stretches(keys, first):
            link = self._links[stretch.member]
            if not link.ready():
                break
            places.setdefault(link, []).extend(range(stretch.start, stretch.stop))
        return places

    # ---- for those who look after it ----------------------------------------------------------------------------

    def stats(self) -> dict[str, wire.Told | None]:
        """What each member says of itself; None for those that say nothing."""
        asked = {member: link.count() if link.ready() else None for member, link in self._links.items()}
        return {member: self._links[member].answer(number, wire.Told) for member, number in asked.items()}

    def report(self, fate: Suspect | Reaped) -> list[str]:
        """Tell every member what became of a worker; returns those that were not there to hear it.

        Tell those again when they are back: until then they keep what a dead writer had reserved.
        """
        return [member for member, link in self._links.items() if not (link.ready() and link.tell(fate))]

    def purge(self, namespace: str) -> int:
        """Forget a tenant; returns how many blocks went. Members that are away keep theirs until asked again."""
        tag = namespace_tag(namespace)
        asked = [(link, link.purge(tag)) for link in self._links.values() if link.ready()]
        answers = [link.answer(number, wire.Purged) for link, number in asked]
        return sum(answer.num_blocks for answer in answers if answer is not None)
