"""Extreme values in every field of every endpoint, as the table of fields has them: refused by type, never a 5xx.

A field that is added to the table is swept here without a word about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.test_malformed import GOOD
from tripool.engine.fake import fake_text
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.body import MAX_INTEGER, MIN_INTEGER, decode_json
from tripool.gateway.options import (
    ANTHROPIC,
    ANTHROPIC_COUNT,
    CHAT,
    COMPLETION,
    DETOKENIZE,
    ONE_MODEL,
    TOKENIZE,
    Fields,
)
from tripool.gateway.parse import Parser
from tripool.gateway.tokens import TokenService
from tripool.text import Tokenizer

TOKENIZER = Tokenizer(fake_text())
PARSER = Parser(TOKENIZER, "fake")
TOKENS = TokenService(PARSER, TOKENIZER, lambda: 2048)
ENDPOINTS: dict[str, tuple[Fields, Callable[[bytes], Any]]] = {
    "/v1/chat/completions": (CHAT, PARSER.chat),
    "/v1/completions": (COMPLETION, PARSER.completion),
    "/v1/messages": (ANTHROPIC, PARSER.messages),
    "/v1/messages/count_tokens": (ANTHROPIC_COUNT, TOKENS.count),
    "/tokenize": (TOKENIZE, TOKENS.tokenize),
    "/detokenize": (DETOKENIZE, TOKENS.detokenize),
    "/v1/models/load": (ONE_MODEL, lambda raw: ONE_MODEL.checked(decode_json(raw))),
}
BODIES = GOOD | {"/v1/models/load": {"model": "fake"}}
BEYOND = [str(10**30), str(2**64), str(-(2**63) - 1), str(10**308)]
"""More than 64 bits: taken for a number, never for an integer."""
INFINITE = [str(10**400), str(-(10**400)), "1e309", "-1e999", "1" + "0" * 4299]
"""No number at all: refused wherever it stands, also in a field that is ignored."""
INSIDE = [
    *map(str, (2**31, 2**32, 2**63, MAX_INTEGER, MIN_INTEGER, -1, 0)),
    *("1e308", "-1e308", "5e-324", "1e-400", "-0.0", "1e22"),
    *('""', '"\\u0000"', '"\\uffff"', '"\\u202e"', '"' + "9" * 5000 + '"', '"1e999"', '"nan"', '"' + "x" * 10**4 + '"'),
]
NAMES = (
    "tpot_ms",
    "ttft_ms",
    "type",
    "5",
    "99999999999999999",
    "json",
    "schema",
    "budget_tokens",
    "effort",
    "function",
)


def shapes(value: str) -> Iterator[str]:
    """As it is, in lists, in objects under the names that mean something somewhere."""
    yield from (value, f"[{value}]", f"[[{value}]]", f'[{{"role": "user", "content": {value}}}]')
    yield from (f'{{"{name}": {value}}}' for name in NAMES)
    yield f'{{"type": "json_schema", "json_schema": {{"schema": {{"maximum": {value}}}}}}}'
    yield f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"maximum": {value}}}}}}}]'


def bodies(path: str, values: list[str]) -> Iterator[tuple[str, bytes]]:
    fields = ENDPOINTS[path][0]
    for name in (*fields.known, *fields.ignored, *(fields.only_plain or ())):
        before, _, after = json.dumps(BODIES[path] | {name: "@"}).partition('"@"')
        for value in values:
            for shape in shapes(value):
                yield f"{name}: {shape[:60]}", (before + shape + after).encode()


def refusal(parse: Callable[[bytes], Any], raw: bytes) -> Exception | None:
    try:
        parse(raw)
    except Exception as error:  # noqa: BLE001  # which ones there may be is what is tested
        return error
    return None


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_answer_is_a_job_or_a_typed_refusal(path):
    parse = ENDPOINTS[path][1]
    for what, raw in bodies(path, BEYOND + INSIDE):
        error = refusal(parse, raw)
        assert error is None or (isinstance(error, TripoolError) and 400 <= error.status < 500), what
        assert len(str(error)) < 2000, what


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_no_number_is_refused_wherever_it_stands(path):
    parse = ENDPOINTS[path][1]
    for what, raw in bodies(path, INFINITE):
        assert isinstance(refusal(parse, raw), InvalidRequest), what


def test_no_integer_behind_the_decoder_has_more_than_64_bits():
    values = [MIN_INTEGER, MAX_INTEGER, 0, -1, 10**18]
    assert decode_json(json.dumps({"a": values}).encode())["a"] == values
    for digits in BEYOND:
        (value,) = decode_json(f'{{"a": {digits}}}'.encode()).values()
        assert type(value) is float and value == float(digits)


def test_the_values_that_once_were_a_500(server, check_refusal):
    def send(path: str, field: str, value: str) -> Any:
        body = json.dumps(GOOD[path] | {field: "@"}).replace('"@"', value)
        return server.http.post(path, content=body.encode(), headers={"content-type": "application/json"})

    for path in ("/v1/chat/completions", "/v1/completions"):
        check_refusal(send(path, "slo", f'{{"tpot_ms": {10**400}}}'), None)
        check_refusal(send(path, "slo", f'{{"ttft_ms": {10**30}}}'), "slo.ttft_ms")
    check_refusal(send("/v1/completions", "prompt", f"[{10**30}]"), "prompt")
    check_refusal(send("/detokenize", "tokens", f"[{10**30}]"), "tokens")


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e999", "9" * 5000, "0", "-1", "", "1,5", "\u00b2"])
def test_promises_in_headers(server, check_refusal, value):
    body = {"prompt": "a", "max_tokens": 1}
    for header in ("x-tripool-tpot-ms", "x-tripool-ttft-ms"):
        headers = {header: value.encode("latin-1")}
        check_refusal(server.http.post("/v1/completions", json=body, headers=headers), header)


@pytest.mark.parametrize(
    "name", ["%00", "%ff%fe", "a%2F..%2F..", "%F0%9F%98%80", "9" * 5000, "%0d%0aset-cookie:a", "%25"]
)
def test_names_in_paths_and_queries(server, name):
    for path in (f"/v1/requests/{name}/explain", f"/v1/models/{name}", f"/{name}"):
        response = server.http.get(path)
        assert response.status_code == 404 and response.json()["error"]["message"]
    response = server.http.post(f"/drain?resume={name}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "resume"
