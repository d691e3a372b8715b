"""What a split server tells about a request, while it runs and after, as programs and as people read it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tripool.cli.main import create_cli

from .serving import SplitServer, split_server

PROMPT = list(range(4, 204))


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server("fake:step_ms=1", prefill=2, decode=2) as running:
        yield running


def ask(server: SplitServer, name: str, **more: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1, "request_id": name, **more}
    server.http.post("/v1/completions", json=body).raise_for_status()


def explain(server: SplitServer, name: str) -> dict:
    return server.http.get(f"/v1/requests/{name}/explain").raise_for_status().json()


def test_a_finished_request_says_where_it_ran_and_why(server: SplitServer) -> None:
    ask(server, "ran", n=2)
    told = explain(server, "ran")
    (placement,) = told["placement"]
    assert placement["mode"] == "split"
    assert placement["placements"] == 3 and placement["workers lost"] == 0
    prefill, *decodes = placement["steps"]
    assert (prefill["what"], [step["what"] for step in decodes]) == ("prefill", ["decode", "decode"])
    assert prefill["worker"] in ("prefill-0", "prefill-1")
    assert "prefill-0: 0 requests, 0 tokens" in prefill["candidates"]
    assert {step["worker"] for step in decodes} == {"decode-0", "decode-1"}


def test_what_was_cached_says_where_it_came_from(server: SplitServer) -> None:
    """The least recently used prefill worker is next, so that three in a row use both."""
    for number in range(3):
        ask(server, f"turn-{number}", seed=number)
    told = [explain(server, f"turn-{number}") for number in range(3)]
    assert told[-1]["cached_tokens"] == 192
    (placement,) = told[-1]["placement"]
    words = (placement["cached at the prefill worker"], placement["fetched from the cache pool"])
    assert words in (("192 tokens", "0 tokens"), ("0 tokens", "192 tokens (192 from memory, 0 from disk)"))


def test_a_refused_request_says_why(server: SplitServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": [4, 999_999], "request_id": "unknown"})
    assert answer.status_code == 400
    (placement,) = explain(server, "unknown")["placement"]
    assert "unknown token" in placement["failed"]


def test_the_command_shows_it_all(server: SplitServer) -> None:
    ask(server, "shown")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(create_cli(), ["explain", "shown", "--url", server.url])
    assert done.exit_code == 0
    for word in ("finished (1 length)", "200 prompt tokens", "candidates", "prefill-", "decode-", "first token after"):
        assert word in done.stdout


def test_an_unknown_request_is_an_error_with_a_hint(server: SplitServer) -> None:
    done = CliRunner().invoke(create_cli(), ["explain", "nobody", "--url", server.url])
    assert "remembers" in str(getattr(done.exception, "hint", ""))
