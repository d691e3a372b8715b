"""Ray's object store behind the store protocol: an actor knows which object has which key, `ray.get` maps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from store import Bytes, serve

QUIET: dict[str, Any] = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
NAMES = {"name": "blocks", "namespace": "bench"}


@ray.remote(num_cpus=0)
class Directory:
    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def put(self, key: str, holder: list[Any]) -> None:
        self._objects[key] = holder[0]

    def find(self, keys: Sequence[str]) -> list[Any]:
        return [self._objects[key] for key in keys]


class Ray:
    def host(self) -> tuple[str, str]:
        context = ray.init(num_cpus=2, object_store_memory=256 * 2**20, namespace="bench", **QUIET)
        self._directory = Directory.options(**NAMES).remote()
        return str(context.address_info["address"]), ray.__version__

    def join(self, place: str, buffers: Sequence[Bytes]) -> None:
        ray.init(address=place, namespace="bench", logging_level="error", log_to_driver=False)
        self._directory = ray.get_actor(NAMES["name"])

    def put(self, keys: Sequence[str], blocks: Sequence[Bytes]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            # In a list, or Ray would hand over the value instead of the object.
            ray.get(self._directory.put.remote(key, [ray.put(block)]))

    def get(self, keys: Sequence[str], into: Sequence[Bytes]) -> None:
        for view, target in zip(ray.get(ray.get(self._directory.find.remote(list(keys)))), into, strict=True):
            np.copyto(target, view)

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    serve(Ray())
