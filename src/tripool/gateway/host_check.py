"""Protects a server without keys from web pages: every caller of such a server is its operator.

A page in a local browser can reach the server in two ways. A host name of the page's own site that resolves to the
server's address (DNS rebinding) makes the server part of that site: so `Host` must be a name that no other site can
have. And a form or script may post to any address without reading the answer: so a request that changes something may
not come from a page of another site. Programs send neither `Origin` nor foreign hosts. Where keys are required, they
are the defence, and nothing is checked here. Public paths are never checked: load balancers ask `/health` under any
name, and learn only whether the server works, and its version.

| connection | `Host` may be |
|---|---|
| to a loopback address | localhost, a loopback address, this machine's name, the address itself; missing |
| to any other address | also every IP address, names without a dot, and those that end in .local or .internal |
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from tripool.errors import TripoolError
from tripool.gateway.auth import needed_no_key
from tripool.gateway.refusals import HostRefused, OtherSite
from tripool.gateway.request_log import refuse

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = frozenset({"same-origin", "none"})
_PRIVATE_ENDS = (".local", ".internal")
"""Reserved: such a name cannot be registered."""
_SITES_HAVE = frozenset({"http", "https", "ws", "wss", "ftp", "ftps", "file", "data", "blob", "about", "javascript"})
"""Schemes of other sites' pages; apps use schemes of their own."""
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[0-9A-Za-z]+)?)\]|(?P<name>[0-9A-Za-z_-]+(?:\.[0-9A-Za-z_-]+)*)\.?)?(?::[0-9]{0,5})?"
)
_MAX_HOST_CHARS = 300
"""Longest host name with its port."""

Headers = Sequence[tuple[bytes, bytes]]


class HostCheck:
    """`guarded`: whether a guard in front of this marks callers without a key. `on_refused` is called with the code."""

    def __init__(
        self, app: ASGIApp, *, guarded: bool, on_refused: Callable[[str], object], origins: Collection[str] = ()
    ) -> None:
        """`origins`: of pages that the operator lets use the server."""
        self._app, self._guarded, self._on_refused = app, guarded, on_refused
        self._origins = frozenset(origins)
        self._own_name = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and needed_no_key(scope, guarded=self._guarded):
            try:
                check_host(scope["headers"], (scope.get("server") or ("",))[0], self._own_name)
                if scope["method"] not in _SAFE_METHODS:
                    check_site(scope["headers"], self._origins)
            except TripoolError as error:
                await refuse(scope, receive, send, error, self._on_refused, unauthenticated=True)
                return
        await self._app(scope, receive, send)


def check_host(headers: Headers, reached_at: str, own_name: str) -> None:
    """`reached_at`: the server's address of this connection; a connection without one does not come from a browser."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if not hosts:  # browsers always send it
        return
    if len(hosts) > 1 or len(hosts[0]) > _MAX_HOST_CHARS or not _may_be_called(hosts[0], reached_at, own_name):
        hint = (
            "call it localhost, or by its address; a server with API keys (`tripool keys add NAME`) may have any name"
        )
        raise HostRefused(f"this server without keys does not accept the host '{hosts[0][:100]}'", hint=hint)


def check_site(headers: Headers, origins: Collection[str] = ()) -> None:
    """Browsers send a page's origin with every post, and newer ones how it relates to this server: both must match.

    Pages of apps and extensions (`app://...`) are not web sites: a browser that lets them reach this address sends
    no relation to another site.
    """
    given: dict[bytes, list[str]] = {}
    for name, value in headers:
        given.setdefault(name, []).append(value.decode("latin-1").strip().lower())
    host = given.get(b"host", [""])[0]
    sent_by = given.get(b"origin", [])
    if len(sent_by) == 1 and sent_by[0] in origins:
        return
    own = all(site in _OWN_SITES for site in given.get(b"sec-fetch-site", []))
    if not own or not all(_is_own(origin, host) for origin in given.get(b"origin", [])):
        raise OtherSite("a page of another site may not do this", hint="call it from a program, or from this server")


def _is_own(origin: str, host: str) -> bool:
    scheme, mark, where = origin.partition("://")
    if not mark or not where:  # "null" is the origin of a page that hides it
        return False
    return where == host if scheme in ("http", "https") else scheme not in _SITES_HAVE


@lru_cache(maxsize=64)  # called for every request, nearly always with the same host
def _may_be_called(host: str, reached_at: str, own_name: str) -> bool:
    name, address = _name(host), _address(reached_at)
    literal = _address(name)
    if address is None:
        return True
    if literal is not None:
        return literal.is_loopback or literal.is_unspecified or literal == address or not address.is_loopback
    if name == "localhost" or name.endswith(".localhost") or name in (own_name, f"{own_name}.local"):
        return True
    return name != "" and not address.is_loopback and ("." not in name or name.endswith(_PRIVATE_ENDS))


def _name(host: str) -> str:
    """Without its port. A value with other characters is no host name: lenient parsing could find a valid one in it."""
    found = _HOST.fullmatch(host)
    return "?.?" if found is None else (found["address"] or found["name"] or "").lower()


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
