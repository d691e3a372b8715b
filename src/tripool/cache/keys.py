"""Names of KV blocks: a chain of hashes, so that equal keys mean equal tokens from the first one on.

A cryptographic hash: a tenant who could forge collisions could read another's cache or poison it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 16


def root_key(model: str, namespace: str) -> bytes:
    """Start of every chain of this model and namespace. Lengths are hashed too, so ("ab", "c") is not ("a", "bc")."""
    parts = [model.encode(), namespace.encode()]
    salted = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(salted, digest_size=_KEY_BYTES, person=b"tripool-root").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of one full block that follows the block (or root) called `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=_KEY_BYTES).digest()
