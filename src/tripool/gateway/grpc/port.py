"""The port of gRPC, taken before a model is loaded. Imports no gRPC, which may be missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from tripool.errors import TripoolError
from tripool.gateway.server import listen

_MODULES = ("grpc", "grpc_health", "grpc_reflection")


class GrpcMissing(TripoolError, code="grpc_missing"):
    """The packages of the extra `grpc` are not installed."""


def check_installed() -> None:
    if not all(map(importlib.util.find_spec, _MODULES)):
        raise GrpcMissing("--grpc-port needs grpcio, which is not installed", hint="pip install 'tripool[grpc]'")


@contextmanager
def reserved(host: str, port: int | None) -> Iterator[str | None]:
    """Hold an address for gRPC by a socket that accepts nothing. gRPC opens a listener of its own beside it: here, or
    in a gateway and in the next one. Port 0 picks a free one; None: there is no gRPC."""
    if port is None:
        yield None
        return
    check_installed()
    with listen(host, port, option="--grpc-port") as free:  # a shared socket gives no error where the port is taken
        port = free.getsockname()[1]
    with listen(host, port, option="--grpc-port", shared=True) as held:
        host, port = held.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
