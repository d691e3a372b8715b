"""One engine's KV blocks: reference counts, the free list and the index of what free blocks still remember.

| a block is | refs | blank       | in `_idle` | has a key |
|------------|------|-------------|------------|-----------|
| held       | >= 1 | no          | no         | maybe     |
| idle       | 0    | no          | yes        | yes       |
| blank      | 0    | yes         | no         | no        |

Idle blocks keep their contents and are found by key until someone needs the room; the least recently used goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from operator import mul

_STRIDE = 16
"""A search for a wider gap leaps; for a narrower one, matching bytes is faster."""
_MANY = 1024
"""From so many blocks on, a wide gap will do where the widest was wanted."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._is_blank = bytearray(b"\1" * num_blocks)
        self._num_blank = num_blocks
        self._wide = num_blocks
        """Width, up to a factor of two, of the gap that was found last."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, idle ones included."""
        return self._num_blank + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix. Nothing is held yet: `acquire` them before allocating anything else."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these would leave the free list if acquired."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def num_freed_by(self, tables: Iterable[Sequence[int]]) -> int:
        """How many blocks would become free if all these holders let go: those that nobody else holds."""
        held = Counter(block for table in tables for block in table)
        return sum(self._refs[block] == count for block, count in held.items())

    def can_allocate(self, count: int) -> bool:
        return count <= self._num_blank + len(self._idle)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Blocks that follow one another where they can, and follow block `after`: such a sequence is read in place.

        A new sequence starts in the middle of the widest gap, which leaves room to grow to it and to its neighbour.
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
        """Give back one reference of each. The tail becomes idle first: a prefix without its head is useless."""
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
        """Make a full, held block findable. A second block with the same contents stays nameless."""
        assert self._refs[block] > 0, "only a holder may publish"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def _take_blank(self, near: int) -> int:
        """That block if it is blank, else the next one that is, from the start again after the last."""
        block = self._is_blank.find(1, near)
        block = self._is_blank.find(1) if block < 0 else block
        self._is_blank[block] = 0
        self._num_blank -= 1
        return block

    def _middle_of_widest_gap(self) -> int:
        """The first block, in an untouched pool: there the whole pool is room to grow."""
        if self._num_blank == self.num_blocks:
            return 0
        if self.num_blocks > _MANY:
            return self._middle_of_wide_gap()
        widths = list(map(len, self._is_blank.split(b"\0")))
        widest = max(widths)
        number = widths.index(widest)
        return sum(widths[:number]) + number + widest // 2  # before each gap but the first there is one that is not

    def _middle_of_wide_gap(self) -> int:
        """Of one at least half as wide as the widest: among thousands, looking at each takes longer than a step."""
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
        """Where the first gap of at least this width begins; -1: there is none."""
        blank = self._is_blank
        if width < _STRIDE:
            return blank.find(b"\1" * width)
        # Every such gap holds a place that is a multiple of its width: few places to look at, and no pattern to match.
        for place in range(0, self.num_blocks, width):
            if blank[place]:
                begin, stop = blank.rfind(0, 0, place) + 1, blank.find(0, place)
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


class KeptBlocks:
    """Blocks that no sequence holds, while they are copied from or to the cache pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.lists: list[list[int]] = []

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest known prefix until `let_go`."""
        blocks = self._pool.match(keys)
        self._pool.acquire(blocks)
        self.lists.append(blocks)
        return blocks

    def keep_more(self, blocks: list[int], count: int) -> None:
        """Append blocks to be filled, as many of `count` as are free."""
        blocks.extend(self._pool.allocate(min(count, self._pool.num_free), after=blocks[-1] if blocks else None))

    def let_go(self, blocks: list[int], keys: Sequence[bytes]) -> None:
        """Those that have a key are full, and stay findable under it."""
        self.lists = [kept for kept in self.lists if kept is not blocks]
        for block, key in zip(blocks, keys, strict=False):
            self._pool.publish(block, key)
        self._pool.release(blocks)
