"""Decides at the start of a server whether it asks for API keys, and opens its key store and usage log.

| the key store at the start | `open` | address | the server |
|---|---|---|---|
| has a key | either | any | asks for keys |
| has none, or does not exist | yes | any | is open |
| has none, or does not exist | no | loopback | is open |
| does not exist, and was named | no | any | does not start |
| has none, or does not exist | no | reachable from other machines | does not start |

An open server asks for keys from its first key on, and a server that asks for keys does so until it ends, whatever
happens to the key store. In a split server this holds across restarts of the gateway: the run folder of an open server
has a mark, which is removed with the first key. Without the mark, keys are asked for.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from tripool.errors import TripoolError
from tripool.fabric.folder import is_marked_open, unmark_open
from tripool.gateway.auth import Access
from tripool.tenants.key_store import KeyStore, KeyStoreError, KeyStoreMissing, default_path
from tripool.tenants.key_watcher import KeyWatcher
from tripool.tenants.usage_log import UsageLog


class OpenToAll(TripoolError, code="open_to_all"):
    """A server without keys, on an address that other machines reach or although a key store was named."""


@dataclass(frozen=True, slots=True)
class AccessConfig:
    keys: Path | None = None
    """The key store; None: the user's own, if there is one."""
    open: bool = False
    """Serve other machines although there are no keys. Where there are keys, they are asked for."""

    @property
    def path(self) -> Path:
        return self.keys or default_path()

    def starts_open(self, listener: socket.socket) -> bool:
        """Whether the server starts without keys. Raises OpenToAll if that was not asked for and is not safe."""
        missing = False
        try:
            with KeyStore(self.path) as key_store:
                if key_store.key_table().keys:
                    return False
        except KeyStoreMissing:
            missing = True
        if self.open:
            return True
        hint = (
            f"make a key with `tripool keys add NAME --keys {self.path}`, or say --open if all who reach it may use it"
        )
        check_loopback(listener, hint)
        if self.keys is not None and missing:
            raise OpenToAll(f"there is no key store {self.path}, so there are no API keys", hint=hint)
        return True

    def open_for(self, listener: socket.socket) -> Access:
        """For a server of one process."""
        return Access(KeyWatcher(self.path, may_be_open=self.starts_open(listener)), UsageLog(self.path))


def check_loopback(listener: socket.socket, hint: str) -> None:
    """Of a server without keys. Raises OpenToAll."""
    host: str = listener.getsockname()[0]
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise OpenToAll(f"other machines reach {host}, and there are no API keys", hint=hint)


def gateway_access(folder: Path, path: Path) -> Access:
    """For a gateway process, the first of its run or a later one."""

    def on_keyed() -> None:
        try:
            unmark_open(folder)
        except OSError as error:
            raise KeyStoreError(f"{folder} cannot be changed: {error.strerror}", hint="restart the server") from error

    return Access(KeyWatcher(path, may_be_open=is_marked_open(folder), on_keyed=on_keyed), UsageLog(path))
