"""The cache room: which KV blocks exist, who holds them and what they contain. Pure; knows no tensor."""

from tripool.cache.blocks import BlockPool
from tripool.cache.keys import block_key, root_key

__all__ = ["BlockPool", "block_key", "root_key"]
