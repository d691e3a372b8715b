"""Who a server lets in: decided once, when `tripool serve` starts. With keys if its book has any, else open.

| the book at the start | `--open` | address | the server |
|---|---|---|---|
| has a key | either | any | asks for keys |
| has none, or is not there | yes | any | is open |
| has none, or is not there | no | this machine alone | is open |
| is not there, and `--keys` names it | no | any | does not start |
| has none, or is not there | no | other machines reach it | does not start |

An open server asks for keys from its first key on, and one that asks for keys does so until it ends, whatever becomes
of the book. In a split server this holds over gateways that fall and start again: the run folder of an open server has
a mark, which goes with the first key. Where there is none, keys are asked for.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.errors import TripoolError

if TYPE_CHECKING:
    from tripool.gateway.auth import Access

Open = Annotated[
    bool,
    typer.Option("--open", help="Serve other machines although there are no API keys; where there are, they count."),
]
_OPEN_MARK = "open"


class OpenToAll(TripoolError):
    """A server without keys, on an address that other machines reach or although it was given a key book."""

    code = "open_to_all"


def starts_open(listener: socket.socket, named: Path | None, *, may_be_open: bool) -> bool:
    """Whether the server starts without keys. `named`: the book that `--keys` names.

    Refuses to serve other machines without keys, or with a book that is not there, unless that is what was asked for.
    """
    from tripool.tenants.key_store import KeyStore, KeyStoreMissing, default_path

    path, missing = named or default_path(), False
    try:
        with KeyStore(path) as key_store:
            if key_store.key_table().keys:
                return False
    except KeyStoreMissing:
        missing = True
    if may_be_open:
        return True
    hint = f"make a key with `tripool keys add NAME --keys {path}`, or say --open if all who reach it may use it"
    host: str = listener.getsockname()[0]
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise OpenToAll(f"other machines reach {host}, and there are no API keys", hint=hint)
    if named is not None and missing:
        raise OpenToAll(f"there is no key book {path}, and so there are no API keys", hint=hint)
    return True


def open_access(path: Path, *, may_be_open: bool) -> Access:
    from tripool.gateway.auth import Access
    from tripool.tenants.key_watcher import KeyWatcher
    from tripool.tenants.usage_log import UsageLog

    return Access(KeyWatcher(path, may_be_open=may_be_open), UsageLog(path))


def mark_open(folder: Path) -> None:
    """For the gateways of a run that starts open."""
    (folder / _OPEN_MARK).touch(0o600)


def gateway_access(folder: Path, path: Path) -> Access:
    """For a gateway, the first of its run or a later one."""
    from tripool.gateway.auth import Access
    from tripool.tenants.key_store import KeyStoreError
    from tripool.tenants.key_watcher import KeyWatcher
    from tripool.tenants.usage_log import UsageLog

    mark = folder / _OPEN_MARK

    def on_keyed() -> None:
        try:
            mark.unlink(missing_ok=True)
        except OSError as error:
            raise KeyStoreError(f"{mark} cannot be removed: {error.strerror}", hint="restart the server") from error

    return Access(KeyWatcher(path, may_be_open=mark.exists(), on_keyed=on_keyed), UsageLog(path))
