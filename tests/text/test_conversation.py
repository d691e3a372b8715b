from __future__ import annotations

import enum
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest

from tripool.errors import InvalidRequest
from tripool.text.conversation import MAX_DEPTH, plain_data, plain_messages, plain_tools


class Role(str, enum.Enum):  # noqa: UP042 - StrEnum prints its value; the older kind, which does not, is the hard case
    USER = "user"


def nested(levels: int) -> object:
    value: object = "x"
    for _ in range(levels):
        value = [value]
    return value


def test_whatever_mapping_it_was_it_becomes_exact_json_types() -> None:
    message = MappingProxyType(
        {"role": Role.USER, "content": ("a", "b")[0], "meta": OrderedDict(x=(1, 2.5, True, None))}
    )
    (plain,) = plain_messages((message,))
    assert plain == {"role": "user", "content": "a", "meta": {"x": [1, 2.5, True, None]}}
    assert type(plain["role"]) is str
    assert type(plain["meta"]) is dict


def test_tool_calls_may_stand_without_content() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    absent, null = plain_messages(
        [{"role": "a", "tool_calls": calls}, {"role": "a", "content": None, "tool_calls": calls}]
    )
    assert "content" not in absent
    assert null["content"] is None


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert plain_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert plain_messages([{"role": "user", "content": []}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        ("hello", "list of messages, not str"),
        (None, "not NoneType"),
        ({"role": "user", "content": "x"}, "not dict"),
        ([], "empty"),
        (["hello"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "", "content": "x"}], "has no role"),
        ([{"role": 3, "content": "x"}], "has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        ([{"role": "user", "content": 3}], "neither text nor a list"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "neither text nor a list"),
        ([{"role": "user", "content": ["x"]}], "part that is not an object"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"text": "x"}]}], "type None"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "without text"),
        ([{"role": "user", "content": "x", "name": object()}], r"messages\[0\] holds a object"),
        ([{"role": "user", "content": "x", "name": nested(MAX_DEPTH + 1)}], "nested more than"),
    ],
)
def test_refuses_what_is_no_conversation(conversation: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        plain_messages(conversation)
    assert caught.value.param == "messages"


def test_tools_are_a_list_of_objects_or_nothing() -> None:
    assert plain_tools(None) is None
    assert plain_tools([]) is None
    assert plain_tools(({"type": "function"},)) == [{"type": "function"}]
    for wrong in ("tools", {"type": "function"}, ["weather"], 3):
        with pytest.raises(InvalidRequest, match="tools") as caught:
            plain_tools(wrong)
        assert caught.value.param == "tools"


def test_depth_is_bounded_but_real_schemas_pass() -> None:
    assert plain_data(nested(MAX_DEPTH), "tools") == nested(MAX_DEPTH)
    with pytest.raises(InvalidRequest, match="nested"):
        plain_data(nested(100_000), "tools")
