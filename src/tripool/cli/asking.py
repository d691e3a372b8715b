"""HTTP requests of the command line to a running server, and their errors."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from tripool.config import GatewayConfig
from tripool.errors import TripoolError

_TIMEOUT_S = 5.0
_GATEWAY = GatewayConfig()
DEFAULT_URL = f"http://{_GATEWAY.host}:{_GATEWAY.port}"

Url = Annotated[str, typer.Option(help="Of the server.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="TRIPOOL_API_KEY", help="An admin key, if the server has keys.")
]


class NoAnswer(TripoolError):
    status = 503
    code = "no_answer"


def ask(url: str, path: str, api_key: str | None, *, without: str) -> dict[str, Any]:
    """`without`: the hint for a server that does not have the path."""
    address = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    request = urllib.request.Request(address, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        error.close()
        hint = "give an admin key with --api-key or TRIPOOL_API_KEY" if error.code in (401, 403) else without
        raise NoAnswer(f"{address} answers {error.code}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{address} does not answer: {error}", hint="is `tripool serve` running?") from error
