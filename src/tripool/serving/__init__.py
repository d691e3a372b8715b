"""Assemblies: `build_colocated` and `build_split` make a server, for the command line, tests and Python users alike."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tripool.serving.access import AccessConfig
    from tripool.serving.colocated import ColocatedServer, build_colocated
    from tripool.serving.split import SplitServer, build_split
    from tripool.serving.weight_cache import WeightCacheConfig

_MODULE_OF = {
    "AccessConfig": "access",
    "ColocatedServer": "colocated",
    "SplitServer": "split",
    "WeightCacheConfig": "weight_cache",
    "build_colocated": "colocated",
    "build_split": "split",
}
__all__ = ["AccessConfig", "ColocatedServer", "SplitServer", "WeightCacheConfig", "build_colocated", "build_split"]


def __getattr__(name: str) -> object:
    """Imported on first use: a worker process needs no web server."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tripool.serving' has no attribute '{name}'")
    return getattr(import_module(f"tripool.serving.{_MODULE_OF[name]}"), name)
