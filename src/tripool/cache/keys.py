"""Names of KV blocks: a chain of hashes, so that equal keys mean equal tokens from the first one on.

A cryptographic hash: a tenant who could forge collisions could read another's cache or poison it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_KEY_BYTES = 16
PUBLIC_NAMESPACE = "\x1epublic"
"""Of blocks that hold nothing but public tokens. Neither a tenant nor a client's salt can be called so."""


@lru_cache(maxsize=4096)
def root_key(model: str, namespace: str) -> bytes:
    """Start of every chain of this model and namespace. Lengths are hashed too, so ("ab", "c") is not ("a", "bc")."""
    parts = [model.encode(), namespace.encode()]
    salted = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(salted, digest_size=_KEY_BYTES, person=b"tripool-root").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of one full block that follows the block (or root) called `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


def next_key(keys: Sequence[bytes], tokens: Sequence[int], *, model: str, namespace: str, num_public: int = 0) -> bytes:
    """Key of the full block that follows those called `keys`, the only place where a chain is made.

    Its first `num_public` blocks hang on the public root: equal for everybody, a function of their tokens alone. The
    first block behind them is salted with the namespace, and so is all that follows it.
    """
    position = len(keys)
    if position == 0:
        parent = root_key(model, PUBLIC_NAMESPACE if num_public else namespace)
    elif position == num_public:
        parent = _salted(keys[-1], namespace)
    else:
        parent = keys[-1]
    return block_key(parent, tokens)


def stretches(namespace: str, num_public: int, num_blocks: int) -> list[tuple[str, int, int]]:
    """Whose the blocks of a chain are: (namespace, first, stop), in order, none of them empty."""
    num_public = min(num_public, num_blocks)
    parts = [(PUBLIC_NAMESPACE, 0, num_public), (namespace, num_public, num_blocks)]
    return [part for part in parts if part[1] < part[2]]


def _salted(parent: bytes, namespace: str) -> bytes:
    return blake2b(parent + namespace.encode(), digest_size=_KEY_BYTES, person=b"tripool-salt").digest()
