"""Messages as nobody of ours would send them: bytes flipped, cut and made up, and values of the wrong kind or size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_NUMBERS = (0, 1, -1, 2, 255, 256, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_ODD: tuple[Any, ...] = (
    *_NUMBERS, 0.5, -1.0, 1e300, float("nan"), float("inf"), True, None, "", "x", "\0", "../x", "..", "é" * 40,
    "a" * 300, b"", b"\xff" * 16, b"x" * 17, [], {}, [[]], [0] * 300, {"a": 1},
)  # fmt: skip


def mutations(valid: Sequence[bytes], count: int, rng: random.Random) -> Iterator[bytes]:
    """The valid ones are among them, so that there is something to destroy."""
    yield from valid
    for _ in range(count):
        data = rng.choice(valid)
        way = rng.random()
        if way < 0.05:
            yield rng.randbytes(rng.randrange(200))
        elif way < 0.35:
            yield _flipped(data, rng)
        elif way < 0.9:
            yield _changed(data, rng)
        else:
            yield data


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def _changed(data: bytes, rng: random.Random) -> bytes:
    """Still well formed, with one or two values that are not what they should be."""
    tree = msgspec.msgpack.decode(data)
    for _ in range(rng.randint(1, 2)):
        tree = _replaced(tree, rng)
    return msgspec.msgpack.encode(tree)


def _replaced(tree: Any, rng: random.Random) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        return tree | {key: _replaced(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        at = rng.randrange(len(tree))
        at = max(at, 1) if isinstance(tree[0], str) and len(tree) > 1 else at  # mostly not the tag
        if rng.random() < 0.1:
            return tree[:at] + tree[at + 1 :]
        return [*tree[:at], _replaced(tree[at], rng), *tree[at + 1 :]]
    if type(tree) is int and rng.random() < 0.3:
        return max(-(2**63), min(2**64 - 1, tree + rng.choice((-1, 1, 64, 2**20))))
    if isinstance(tree, str) and rng.random() < 0.3:
        return tree[::-1]
    return rng.choice(_ODD)
