"""Block pool of one engine: reference counts, the free list and the prefix index. Pure.

| state | refs | blank       | in `_idle` | has a key |
|-------|------|-------------|------------|-----------|
| held  | >= 1 | no          | no         | maybe     |
| idle  | 0    | no          | yes        | yes       |
| blank | 0    | yes         | no         | no        |

Idle blocks keep their contents and stay in the prefix index until they are reallocated, least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from operator import mul

_STRIDE = 256
"""Gaps at least this wide are searched in strides; for narrower ones a byte pattern search is faster."""
_MANY = 1024
"""Above this pool size the search stops at a gap half as wide as the widest one."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._is_blank = bytearray(b"\1" * num_blocks)
        self._num_blank = num_blocks
        self._wide = num_blocks
        """Width of the last gap found, up to a factor of two."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return self._num_blank + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self._num_blank - len(self._idle)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix. Takes no references: call `acquire` before allocating anything else."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Number of these blocks that `acquire` would remove from the free list."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks]) if blocks else 0

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take a reference to each block returned by `match`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Number of blocks that become free if all these block tables are released: those without another reference."""
        held = Counter(block for table in tables for block in table)
        return sum(self._refs[block] == count for block, count in held.items())

    def can_allocate(self, count: int) -> bool:
        return count <= self._num_blank + len(self._idle)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Allocate blocks, contiguous where possible and following block `after`, so that the sequence can be read in
        place.

        A new sequence starts in the middle of the widest gap, which leaves room to grow for it and for the sequence
        before it.
        """
        assert count <= self._num_blank + len(self._idle), f"{count} blocks wanted, {self.num_free} free"
        blocks: list[int] = []
        for _ in range(count):
            near = after + 1 if after is not None else self._middle_of_widest_gap()
            after = self._take_blank(near) if self._num_blank else self._forget_oldest()
            self._refs[after] = 1
            blocks.append(after)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The tail becomes idle first, because a prefix is useless without its head."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released too often"
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._is_blank[block] = 1
                    self._num_blank += 1

    def publish(self, block: int, key: bytes) -> None:
        """Add a full, held block to the prefix index. A second block with the same key is not indexed."""
        assert self._refs[block] > 0, "a published block must be held"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def _take_blank(self, near: int) -> int:
        """Block `near` if it is blank, else the next blank one, wrapping around."""
        block = self._is_blank.find(1, near)
        block = self._is_blank.find(1) if block < 0 else block
        self._is_blank[block] = 0
        self._num_blank -= 1
        return block

    def _middle_of_widest_gap(self) -> int:
        """Middle of the widest gap; block 0 while the whole pool is blank."""
        if self._num_blank == self.num_blocks:
            return 0
        if self.num_blocks > _MANY:
            return self._middle_of_wide_gap()
        widths = list(map(len, self._is_blank.split(b"\0")))
        widest = max(widths)
        number = widths.index(widest)
        return sum(widths[:number]) + number + widest // 2  # one held or idle block separates adjacent gaps

    def _middle_of_wide_gap(self) -> int:
        """Middle of a gap at least half as wide as the widest: with thousands of blocks an exact search takes longer
        than a step.
        """
        width = min(4 * self._wide, 1 << self._num_blank.bit_length() >> 1)
        while width:
            begin = self._first_gap(width)
            if begin >= 0:
                stop = self._is_blank.find(0, begin)
                self._wide = width
                return begin + ((self.num_blocks if stop < 0 else stop) - begin) // 2
            width //= 2
        return 0

    def _first_gap(self, width: int) -> int:
        """First block of the first gap of at least this width; -1 if there is none."""
        blank = self._is_blank
        if width < _STRIDE:
            return blank.find(b"\1" * width)
        # Every such gap contains a multiple of its width, so only those positions need to be checked.
        for position in range(0, self.num_blocks, width):
            if blank[position]:
                begin, stop = blank.rfind(0, 0, position) + 1, blank.find(0, position)
                if (self.num_blocks if stop < 0 else stop) - begin >= width:
                    return begin
        return -1

    def _forget_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Every reference has an owner among `tables`, every block is in exactly one state, the index is one to one."""
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        for block, (refs, num_owners) in enumerate(zip(self._refs, owners, strict=True)):
            assert refs == num_owners, f"block {block}: {refs} refs, {num_owners} owners"
        assert sum(self._is_blank) == self._num_blank, "blank blocks are miscounted"
        assert not any(map(mul, owners, self._is_blank)), "a block is held and blank"
        for block in self._idle:
            assert not owners[block] and not self._is_blank[block], f"idle block {block} is held or blank"
            assert block in self._key_of, f"idle block {block} has no key"
        for block in self._key_of:
            assert not self._is_blank[block], f"blank block {block} has a key"
        assert owners.count(0) == self.num_free, "a block is neither held nor free"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "index is not one to one"


class HeldBlocks:
    """References to blocks that are being copied from or to the cache pool and belong to no sequence."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.lists: list[list[int]] = []

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        """Take references to the blocks of the longest cached prefix until `let_go`."""
        blocks = self._pool.match(keys)
        self._pool.acquire(blocks)
        self.lists.append(blocks)
        return blocks

    def keep_more(self, blocks: list[int], count: int) -> None:
        """Allocate up to `count` more blocks, to be filled by the caller, and append them to `blocks`."""
        blocks.extend(self._pool.allocate(min(count, self._pool.num_free), after=blocks[-1] if blocks else None))

    def let_go(self, blocks: list[int], keys: Sequence[bytes] = ()) -> None:
        """Publish the blocks that have a key and drop all references."""
        self.lists = [held for held in self.lists if held is not blocks]
        for block, key in zip(blocks, keys, strict=False):
            self._pool.publish(block, key)
        self._pool.release(blocks)
