"""The door of a server, as `tripool serve` hangs it: with the keys of a book, or open, and then not to the world."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.errors import TripoolError

if TYPE_CHECKING:
    from tripool.gateway.auth import Access

Open = Annotated[bool, typer.Option("--open", help="Serve other machines although there are no API keys.")]


class OpenToAll(TripoolError):
    """A server without keys, on an address that other machines reach."""

    code = "open_to_all"


def open_access(path: Path) -> Access:
    from tripool.gateway.auth import Access
    from tripool.tenants.meter import Meter
    from tripool.tenants.watch import Watch

    return Access(Watch(path), Meter(path))


def check_door(listener: socket.socket, path: Path, *, may_be_open: bool) -> None:
    """Refuse to serve other machines without keys, unless that is what was asked for."""
    from tripool.tenants.watch import Watch

    watch = Watch(path)
    is_open = watch.roll().is_open
    watch.close()
    host: str = listener.getsockname()[0]
    if is_open and not may_be_open and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        hint = f"make a key with `tripool keys add NAME --keys {path}`, or say --open if all who reach it may use it"
        raise OpenToAll(f"other machines reach {host}, and there are no API keys", hint=hint)
