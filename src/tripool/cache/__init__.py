"""The KV cache: the block pool of one engine, and the cache pool that all workers share.

The names exported here are pure and use no tensors. `blocks` and `keys` serve one engine; `index` and `ring` serve the
shared pool. Modules with side effects are imported directly: `cache.member` (the process that owns an arena) and
`cache.client` (copies blocks in and out of the arenas).
"""

from tripool.cache.blocks import BlockPool, HeldBlocks
from tripool.cache.index import PoolIndex
from tripool.cache.keys import PUBLIC_NAMESPACE, block_key, namespace_ranges, next_key, root_key
from tripool.cache.records import namespace_tag
from tripool.cache.ring import Ring

__all__ = [
    "PUBLIC_NAMESPACE",
    "BlockPool",
    "HeldBlocks",
    "PoolIndex",
    "Ring",
    "block_key",
    "namespace_tag",
    "next_key",
    "root_key",
    "namespace_ranges",
]
