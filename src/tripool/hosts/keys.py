"""The token that the hosts of a run share, and the keys derived from it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tripool.errors import InvalidRequest
from tripool.hosts.certificate import self_signed

_TOKEN_BYTES = 24
_LEAST_CHARACTERS = 20
"""Who records a greeting may try tokens on it at leisure: a short one would be found."""


def new_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


def check_token(token: str) -> str:
    """`@FILE`: what is in that file. Other users of a machine may see a command line, and not a private file."""
    if token.startswith("@"):
        try:
            token = Path(token[1:]).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"no token in '{token[1:]}'", hint="is it there, and readable?", param="token"
            ) from error
    if len(token) < _LEAST_CHARACTERS or not token.isascii() or not token.isprintable():
        hint = f"copy the line that `tripool serve --listen` prints: at least {_LEAST_CHARACTERS} characters"
        raise InvalidRequest("this is not a token", hint=hint, param="token")
    return token


@dataclass(frozen=True)
class HostKeys:
    """`trusted`: the network is declared to be trusted, so that only the start of a connection is protected."""

    token: str
    trusted: bool = False

    def proof(self, side: bytes, greetings: bytes) -> bytes:
        """That `side` knows the token; of no use in any other connection, since greetings never repeat."""
        return hmac.digest(_derive(self.token, b"proof"), side + greetings, "sha256")

    def context(self, *, server: bool) -> ssl.SSLContext:
        return _context(self.token, server)


def _derive(token: str, purpose: bytes) -> bytes:
    return hashlib.blake2b(token.encode(), digest_size=32, person=b"tripool-" + purpose[:8]).digest()


@cache
def _context(token: str, server: bool) -> ssl.SSLContext:
    certificate, key = self_signed(_derive(token, b"tls"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key says who it is, the address does not
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if server:
        context.num_tickets = 0  # every connection proves anew that it knows the key
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key.pem"
        path.touch(0o600)
        path.write_text(certificate + key, "ascii")
        context.load_cert_chain(path)
    return context
