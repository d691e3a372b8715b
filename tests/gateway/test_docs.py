"""docs/http.md is true: its endpoints, parameters and metrics are those of the code, none missing and none invented."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tripool.gateway.ollama import parse as ollama
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION
from tripool.gateway.responses.fields import INCLUDED, RESPONSES
from tripool.gateway.responses.tools import HOSTED

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text("utf-8")


def part(title: str) -> str:
    """From a heading to the next one of any level."""
    return re.split(r"\n#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1)[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([\w:]+)`", text))


def test_endpoints(server):
    said = set(re.findall(r"\| `([A-Z]+ /[^`]*)`", part("Endpoints")))
    paths = server.http.get("/openapi.json").json()["paths"]
    real = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert said == real


def test_served_parameters():
    said = words(part("Parameters"))
    served = {*CHAT.known, *COMPLETION.known, *ANTHROPIC.known}
    assert served - said == set()
    inner = {"param", "include_usage", "continuous_usage_stats", "format", "effort"}
    assert said - served - inner == {"text", "tool_use", "tool_result"}


def test_ignored_parameters():
    openai, anthropic = part("Ignored").split("- Messages:")
    assert words(openai) == set(CHAT.ignored) == set(COMPLETION.ignored)
    assert words(anthropic.split(";")[0]) == set(ANTHROPIC.ignored)


def test_parameters_that_may_ask_for_nothing():
    said = words(part("Accepted only with the default value"))
    assert said == {*(CHAT.only_plain or ()), *(COMPLETION.only_plain or ()), *(ANTHROPIC.only_plain or ())}


def test_responses():
    served, rest = part("Responses").split("**Items.**")
    ignored, plain = rest.split("Ignored fields:")[1].split("Accepted only")
    assert words(served) - {"format", "effort"} == set(RESPONSES.known)
    assert words(ignored) == set(RESPONSES.ignored)
    assert words(plain) == {*(RESPONSES.only_plain or ())}
    assert words(rest) >= {*HOSTED, *INCLUDED[1:]} - {"reasoning.encrypted_content"}


def test_ollama():
    said = words(part("Ollama"))
    assert said >= {*ollama.CHAT.known, *ollama.GENERATE.known, *ollama.SERVED_OPTIONS}


def test_metrics(server):
    server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    server.http.post("/v1/completions", json={})
    server.wait_empty()
    said = set(re.findall(r"`((?:tripool_|vllm:)\w+)`", part("Metrics")))
    real = {family.name for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    assert said == real
