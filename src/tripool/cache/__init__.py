"""The cache room: which KV blocks exist, who holds them and what they contain. Pure; knows no tensor.

`blocks` and `keys` serve one engine, `index` and `ring` the pool that all workers share. What touches the world is
imported by its module: `cache.member` (owns an arena), `cache.client` (copies blocks in and out of every arena).
"""

from tripool.cache.blocks import BlockPool, KeptBlocks
from tripool.cache.index import PoolIndex
from tripool.cache.keys import PUBLIC_NAMESPACE, block_key, next_key, root_key, stretches
from tripool.cache.records import namespace_tag
from tripool.cache.ring import Ring

__all__ = [
    "PUBLIC_NAMESPACE",
    "BlockPool",
    "KeptBlocks",
    "PoolIndex",
    "Ring",
    "block_key",
    "namespace_tag",
    "next_key",
    "root_key",
    "stretches",
]
