"""Assemblies: `build_colocated` and `build_split` make a server, for the command line, tests and Python users alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tripool.serving.access import AccessConfig
    from tripool.serving.colocated import ColocatedServer, build_colocated
    from tripool.serving.split import SplitServer, build_split
    from tripool.serving.weight_cache import WeightCacheConfig

__all__ = ["AccessConfig", "ColocatedServer", "SplitServer", "WeightCacheConfig", "build_colocated", "build_split"]


def __getattr__(name: str) -> object:
    """Imported on first use: a worker process needs no web server."""
    if name == "AccessConfig":
        from tripool.serving.access import AccessConfig

        return AccessConfig
    if name == "WeightCacheConfig":
        from tripool.serving.weight_cache import WeightCacheConfig

        return WeightCacheConfig
    if name in ("ColocatedServer", "build_colocated"):
        from tripool.serving import colocated

        return getattr(colocated, name)
    if name in ("SplitServer", "build_split"):
        from tripool.serving import split

        return getattr(split, name)
    raise AttributeError(f"module 'tripool.serving' has no attribute '{name}'")
