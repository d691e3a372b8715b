"""Keys of KV blocks: chained hashes, so that equal keys mean equal tokens from the first one on.

The hash is cryptographic: a tenant that could forge collisions could read or poison another tenant's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_KEY_BYTES = 16
PUBLIC_NAMESPACE = "\x1epublic"
"""Namespace of blocks that hold only public tokens. No tenant name or client salt can be equal to it."""


@lru_cache(maxsize=4096)
def root_key(model: str, namespace: str) -> bytes:
    """Root of the chains of a model and namespace. Lengths are hashed too, so ("ab", "c") differs from ("a", "bc")."""
    parts = [model.encode(), namespace.encode()]
    salted = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(salted, digest_size=_KEY_BYTES, person=b"tripool-root").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block that follows the block (or root) with key `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


def next_key(keys: Sequence[bytes], tokens: Sequence[int], *, model: str, namespace: str, num_public: int = 0) -> bytes:
    """Key of the full block that follows the blocks `keys`; the only place where chains are built.

    The first `num_public` blocks hang on the public root: a function of their tokens alone, equal for all tenants. The
    first block after them is salted with the namespace, and so are all that follow.
    """
    position = len(keys)
    if position == 0:
        parent = root_key(model, PUBLIC_NAMESPACE if num_public else namespace)
    elif position == num_public:
        parent = _salted(keys[-1], namespace)
    else:
        parent = keys[-1]
    return block_key(parent, tokens)


def namespace_ranges(namespace: str, num_public: int, num_blocks: int) -> list[tuple[str, int, int]]:
    """Namespaces of the blocks of a chain: (namespace, start, stop), in order, without empty ranges."""
    if not num_public:
        return [(namespace, 0, num_blocks)] if num_blocks > 0 else []
    num_public = min(num_public, num_blocks)
    parts = [(PUBLIC_NAMESPACE, 0, num_public), (namespace, num_public, num_blocks)]
    return [part for part in parts if part[1] < part[2]]


def _salted(parent: bytes, namespace: str) -> bytes:
    return blake2b(parent + namespace.encode(), digest_size=_KEY_BYTES, person=b"tripool-salt").digest()
