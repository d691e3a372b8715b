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
ApiKey = Annotated[str | None, typer.Option(envvar="TRIPOOL_API_KEY", help="An admin key, if the server has keys.")]


class NoAnswer(TripoolError, status=503, code="no_answer"):
    """The server does not answer, or not as asked."""


class Refused(TripoolError, code="refused"):
    """The server refuses what it is asked to do."""


def ask(url: str, path: str, api_key: str | None, *, without: str) -> dict[str, Any]:
    """`without`: the hint for a server that does not have the path."""
    address, answer = _exchange(url, path, api_key, None, _TIMEOUT_S)
    if isinstance(answer, dict):
        return answer
    answer.close()
    hint = "give an admin key with --api-key or TRIPOOL_API_KEY" if answer.code in (401, 403) else without
    raise NoAnswer(f"{address} answers {answer.code}", hint=hint) from answer


def post(url: str, path: str, api_key: str | None, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    address, answer = _exchange(url, path, api_key, json.dumps(body).encode(), timeout_s)
    if isinstance(answer, dict):
        return answer
    with answer:
        try:
            reason = str(json.load(answer)["error"]["message"])
        except (ValueError, KeyError, TypeError):  # not a Tripool error
            reason = str(answer.reason)
    raise Refused(reason, hint=f"{address} answers {answer.code}") from answer


def _exchange(
    url: str, path: str, api_key: str | None, body: bytes | None, timeout_s: float
) -> tuple[str, dict[str, Any] | urllib.error.HTTPError]:
    """The whole address, and the answer or what the server answers instead."""
    address = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    headers = {"Content-Type": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=timeout_s) as answer:
            return address, json.load(answer)
    except urllib.error.HTTPError as error:
        return address, error
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{address} does not answer: {error}", hint="is `tripool serve` running?") from error
