"""Lines of the log: one for each record whatever is in it, the same fields in both formats, and nothing private."""

from __future__ import annotations

import json
import logging
import re
import sys
from base64 import urlsafe_b64encode
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tripool.errors import InvalidRequest
from tripool.observe.lines import MAX_LINE_BYTES, LineFormatter

CANARY = "kanarienvogel"
FORGED = 'x\n2026-01-01T00:00:00.000Z INFO server[1] request status=200 "\r\x1b[2J\u2028\u202e\x85\x7f'
QUOTED = r'"(?:[^"\\]|\\.)*"'
LINE = re.compile(rf'\S+Z INFO gateway\[7\] ({QUOTED}|[^"=]+)((?: [a-z_]+=(?:{QUOTED}|[^" ]+))*)')
FIELD = re.compile(rf' ([a-z_]+)=({QUOTED}|[^" ]+)')


def line(style: str, message: str = "hello", *args: Any, name: str = "tripool.gateway", **fields: Any) -> str:
    record = logging.getLogger(name).makeRecord(name, logging.INFO, "", 1, message, args, None, extra=fields)
    record.created = 1_800_000_000.25
    return LineFormatter(style, "gateway", 7).format(record)


def raised(style: str, error: Exception, *, serving: bool) -> str:
    record = logging.makeLogRecord({"name": "tripool.x", "msg": "oh", "levelname": "ERROR"})
    try:
        try:
            raise KeyError(CANARY)
        except KeyError as cause:
            raise error from cause
    except type(error):
        record.exc_info = sys.exc_info()
    lines = LineFormatter(style, "gateway", 7)
    lines.serving = serving
    return lines.format(record)


def read_text(text: str) -> dict[str, str]:
    """The fields of a line of text, read as anybody would."""
    found = LINE.fullmatch(text)
    assert found, text
    return {k: json.loads(v) if v.startswith('"') else v for k, v in FIELD.findall(found[2])}


def test_text_and_json_say_the_same() -> None:
    fields = {"request_id": "r-1", "status": 200, "stream": False, "total_ms": 1.5, "reason": "it's so", "error": None}
    assert line("text", "request", **fields) == (
        "2027-01-15T08:00:00.250Z INFO gateway[7] request"
        ' request_id=r-1 status=200 stream=false total_ms=1.5 reason="it\'s so"'
    )
    told = json.loads(line("json", "request", **fields))
    head = {"time": "2027-01-15T08:00:00.250Z", "level": "info", "process": "gateway", "pid": 7}
    del fields["error"]
    assert told == head | {"logger": "tripool.gateway", "message": "request"} | fields
    assert list(told)[-5:] == list(fields), "in the order in which they were given"


@given(st.text(), st.text())
@example(FORGED, FORGED)
@example("\ud800", "\udfff" * 5000)
@example('" status=500', '\\" status=500 ')
def test_no_text_makes_a_second_line_or_another_field(said: str, value: str) -> None:
    text, read = line("text", "said %s", said, model=value), json.loads(line("json", "said %s", said, model=value))
    for one in (text, line("json", "said %s", said, model=value)):
        assert re.fullmatch("[ -~]+", one) and len(one) < MAX_LINE_BYTES
    fields = read_text(text)
    assert list(fields) == ["model"] and len(read) == 7
    if len(value) < 1000 and not re.search("[\ud800-\udfff]", value) and "tp-" not in value:
        assert (fields["model"], read["model"]) == (value, value)


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_line_is_bounded(style: str) -> None:
    fields = {f"field_{i}": "\U0001f600" * 10_000 for i in range(30)}
    for some in (fields, {"several": [10**400] * 10_000}, {"number": float("nan")}):
        one = line(style, "x" * 100_000, **some)
        assert len(one) < MAX_LINE_BYTES
        assert style == "text" or json.loads(one)["message"].startswith("xxx")


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_an_exception_says_is_told_only_before_requests_come(style: str) -> None:
    before = raised(style, RuntimeError(CANARY), serving=False)
    assert CANARY in before and "RuntimeError" in before
    for error in (RuntimeError(CANARY), InvalidRequest(CANARY, hint=CANARY), OSError(28, CANARY, CANARY)):
        one = raised(style, error, serving=True)
        assert CANARY not in one and f"{type(error).__name__}" in one and " from KeyError" in one
        assert "observe/test_lines.py:" in one and "raised" in one
    assert "OSError(ENOSPC)" in raised(style, OSError(28, CANARY), serving=True)


@pytest.mark.parametrize("style", ["text", "json"])
def test_objects_are_named_and_keys_are_masked(style: str) -> None:
    key = "tp-" + "aB3_-" * 8
    one = line(style, "it was %s", key, request=InvalidRequest(CANARY), header=f"Bearer {key}", many=[key])
    assert CANARY not in one and "<InvalidRequest>" in one
    assert key[3:] not in one and one.count("tp-***") == 3
    assert "http-request-of-twenty-and-more" in line(style, request_id="http-request-of-twenty-and-more")


@pytest.mark.parametrize("style", ["text", "json"])
def test_keys_are_masked_wherever_they_stand(style: str) -> None:
    for seed in range(200):
        bare = urlsafe_b64encode(Random(seed).randbytes(32)).decode().rstrip("=")
        for before in ("", "a", "sk", "http", "Bearer=", "_", "9"):
            for key in (f"tp-{bare}", bare):
                for filler in (0, 150, 190, 199, 950, 990, 999):  # where long texts are cut
                    one = line(style, "oh", x="=" * filler + before + key + "=" * 900)
                    assert bare[:30] not in one and bare[12:30] not in one, (before, key, filler)


def test_names_are_no_keys() -> None:
    for name in (
        "Meta-Llama-3-70B-Instruct-with-a-long-name-of-its-own-GGUF-Q4_K_M",
        "test_that_a_function_of_a_very_long_name_is_told_by_its_name_2",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "http-request-of-twenty-and-more-words-that-are-joined-by-dashes",
        "chatcmpl-00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ):
        assert name in line("text", model=name)


def test_of_what_asyncio_says_the_arguments_are_left_out() -> None:
    said = f"Exception in callback Stream.put('{CANARY}')\nhandle: <Handle put('{CANARY}')>"
    assert json.loads(line("json", said, name="asyncio"))["message"] == "Exception in callback Stream.put"
    never = f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{CANARY}')>"
    assert json.loads(line("json", never, name="asyncio"))["message"] == "Task exception was never retrieved"
