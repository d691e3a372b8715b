"""SamplingParams takes what it documents, refuses everything else with a typed error, and says which option it was."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.answer import Choice, Generation
from tripool.core import (
    GREEDY_BELOW,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STRUCTURE_BYTES,
    MAX_STRUCTURE_DEPTH,
    Request,
    SamplingParams,
    Slo,
    Stages,
    Structure,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from tripool.engine_protocol import renamed
from tripool.errors import InvalidRequest
from tripool.simulate.supernode.modelled_engine import TokenRun

token_ids = st.integers(0, 2**31)
valid_options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 100) | st.integers(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**31),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0, 100, exclude_min=True),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
        "logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
        "n": st.integers(1, 128),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
        "stop_token_ids": st.lists(token_ids, max_size=4),
        "min_tokens": st.integers(0, 10),
        "max_tokens": st.none() | st.integers(10, 2**31),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
option_names = st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)])


@given(valid_options)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_documented_values_are_kept(options: dict[str, Any]) -> None:
    params = SamplingParams.from_options(options)
    for name, value in options.items():
        if name == "stop":
            value = (value,) if isinstance(value, str) else tuple(value)
        elif name == "stop_token_ids":
            value = tuple(value)
        elif name == "top_k":
            value = max(value, 0)
        elif name == "temperature" and value < GREEDY_BELOW:
            value = 0
        assert getattr(params, name) == value
    assert params == SamplingParams(**options)
    assert dataclasses.replace(params) == params


@given(st.dictionaries(option_names, json_values, max_size=4))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_json_gives_params_or_a_typed_error(options: dict[str, Any]) -> None:
    """Nothing a body can hold gets past as another error, or as a value of a type that a later room trips over."""
    try:
        params = SamplingParams.from_options(options)
    except InvalidRequest:
        return
    for name in ("top_k", "n", "min_tokens", "max_tokens", "logprobs", "seed"):
        value = getattr(params, name)
        assert value is None or type(value) is int, name
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert math.isfinite(getattr(params, name)), name
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        assert type(getattr(params, name)) is bool, name
    assert all(isinstance(text, str) and text for text in params.stop)
    assert all(type(token) is int for token in (*params.stop_token_ids, *params.logit_bias))


BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, math.nan, math.inf, "1", None, True],
    "top_p": [0, -1, 1.01, math.nan, None],
    "top_k": [-2, 1.5, 2**31 + 1, "5", None, True],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, 101, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "logit_bias": [[1], "ab", None, 3, {"5": 1.0}, {-1: 1.0}, {5: 101.0}, {5: math.nan}, {5: None}, {1.5: 1.0}],
    "logprobs": [-1, MAX_LOGPROBS + 1, 0.5, True, "all"],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 0.5, True, "all"],
    "n": [0, 129, 1.5, None, True, "2"],
    "seed": [2**64, -(2**63) - 1, 1.5, "x", True, math.nan],
    "stop": [[""], "", [1], 5, None, [None], b"ab", ["a"] * 65, ["a" * 512] * 9],
    "stop_token_ids": [[-1], ["a"], "12", 5, None, [1.5], [True], [1] * 1025],
    "min_tokens": [-1, 0.5, None],
    "max_tokens": [0, -1, 2.5, "8", True],
    "ignore_eos": ["false", 0, None],
    "include_stop_str_in_output": ["yes", 1],
    "skip_special_tokens": ["no", 0],
    "structure": ["regex", 5, [], True, {}, {"regex": "a", "ebnf": "b"}, {"xml": "a"}],
}
CASES = [
    pytest.param(name, value, id=f"{name}={value!r:.40}") for name, values in BAD_VALUES.items() for value in values
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message
    with pytest.raises(InvalidRequest):
        SamplingParams.from_options({name: value})


def test_every_option_has_bad_values_here() -> None:
    assert {f.name for f in dataclasses.fields(SamplingParams)} == set(BAD_VALUES)


@given(st.dictionaries(st.text(max_size=12), json_values, min_size=1, max_size=3))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_unknown_options_are_refused_by_name(options: dict[str, Any]) -> None:
    known = {f.name for f in dataclasses.fields(SamplingParams)}
    unknown = next((name for name in options if name not in known), None)
    if unknown is None:
        return
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_options({"temperature": 0.5, **options})
    assert caught.value.param == unknown
    assert "temperature" in caught.value.hint, "the hint lists what there is"


def test_a_typo_is_named_and_the_hint_helps() -> None:
    with pytest.raises(InvalidRequest, match="unknown sampling option 'temprature'") as caught:
        SamplingParams.from_options({"temprature": 1.0})
    assert caught.value.param == "temprature"
    assert "temperature" in str(caught.value)


def test_sizes_are_checked_separately() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is above max_tokens") as caught:
        SamplingParams(min_tokens=3, max_tokens=2)
    assert caught.value.param == "min_tokens"
    SamplingParams(min_tokens=2, max_tokens=2)
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.0))
    assert caught.value.param == "logit_bias"
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 0.0))


def test_one_stop_string_is_not_a_list_of_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_minus_one_means_every_token() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_params_cannot_be_changed_under_a_running_request() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_share_is_above_nothing(weight: float) -> None:
    with pytest.raises(InvalidRequest):
        Slo(weight=weight)


def test_a_generation_shows_its_first_choice() -> None:
    first = Choice(0, "one", (1,), "stop")
    second = Choice(1, "two", (2, 3), "length")
    answer = Generation("r", (7, 8), (first, second), Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=0))
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.logprobs) == ("one", (1,), "stop", None)
    assert answer.usage.total_tokens == 5


STRUCTURES: list[tuple[Any, Any, Any]] = [
    ("json_schema", {"type": "object", "b": 1, "a": "é"}, '{"type": "object", "b": 1, "a": "é"}'),
    ("json_schema", '{"b":1,\n"a":2}', '{"b": 1, "a": 2}'),
    ("json_object", "", ""),
    ("json_object", True, ""),
    ("regex", "[a-z]+", "[a-z]+"),
    ("ebnf", "start: X", "start: X"),
    ("choice", ["a", "b"], ("a", "b")),
    ("choice", ("a",), ("a",)),
    ("tool_calls", {"functions": []}, '{"functions": []}'),
]


@pytest.mark.parametrize(("kind", "value", "kept"), STRUCTURES)
def test_structures_are_kept_as_text(kind: Any, value: Any, kept: Any) -> None:
    structure = Structure(kind, value)
    assert structure.value == kept
    assert structure == Structure(kind, value, "response_format") == Structure.of({kind: value})
    assert hash(structure) == hash(Structure(kind, value))
    assert SamplingParams.from_options({"structure": {kind: value}}).structure == structure
    assert SamplingParams(structure=structure).structure is structure


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"items": value}
    return value


BAD_STRUCTURES: list[tuple[Any, Any]] = [
    ("yaml", "a"),
    (["regex"], "a"),
    ("regex", ""),
    ("regex", 5),
    ("regex", "\ud800"),
    ("regex", "a" * (MAX_STRUCTURE_BYTES + 1)),
    ("regex", "é" * (MAX_STRUCTURE_BYTES // 2 + 1)),
    ("ebnf", None),
    ("json_object", False),
    ("json_object", {}),
    ("json_schema", "{"),
    ("json_schema", "[]"),
    ("json_schema", True),
    ("json_schema", {"a": math.nan}),
    ("json_schema", {"a": {1, 2}}),
    ("json_schema", {"a": "\ud800"}),
    ("json_schema", nested(MAX_STRUCTURE_DEPTH)),
    ("json_schema", nested(5000)),
    ("json_schema", "[" * 100_000),
    ("json_schema", {"a": "x" * MAX_STRUCTURE_BYTES}),
    ("choice", []),
    ("choice", [""]),
    ("choice", "abc"),
    ("choice", ["a", 1]),
    ("choice", ["a"] * (MAX_CHOICES + 1)),
    ("choice", ["x" * MAX_STRUCTURE_BYTES, "y"]),
]


@pytest.mark.parametrize(("kind", "value"), BAD_STRUCTURES, ids=range(len(BAD_STRUCTURES)))
def test_bad_structures_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Structure(kind, value, "regex")
    assert caught.value.param == "regex"
    assert len(str(caught.value)) < 1000


def test_a_structure_is_one_structure() -> None:
    for wrong in ({}, {"regex": "a", "ebnf": "b"}, "regex", ["regex"], 5):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams.from_options({"structure": wrong})
        assert caught.value.param == "structure"
    assert Structure("json_schema", nested(MAX_STRUCTURE_DEPTH - 1)).value


def test_a_copy_under_another_name_differs_in_nothing_else() -> None:
    """Each field has a value of its own: one that the copy forgets would be another's default."""
    slo, params = Slo(tpot_ms=50.0, tenant="t", job="j"), SamplingParams(max_tokens=3)
    request = Request(
        id="a",
        prompt_ids=(1, 2),
        params=params,
        seed=7,
        end_ids=frozenset({9}),
        namespace="n",
        public_tokens=1,
        slo=slo,
    )
    assert renamed(request, "b") == dataclasses.replace(request, id="b")
    assert all(getattr(request, each.name) != each.default for each in dataclasses.fields(Request))
    scores = TokenLogprobs(-1.0)
    values = ("a", 1, 2, 3, "stop", scores, 4, 5, 6, Stages(queue_s=1.0), (scores,))
    for event in (TokenEvent(*values), TokenRun(*values[:5], None, 4, 0, 0, Stages(queue_s=1.0), earlier=(8, 8))):
        told = event.of_request("b", Stages(queue_s=2.0))
        assert told == dataclasses.replace(event, request_id="b", stages=Stages(queue_s=2.0))
        assert type(told) is type(event)
    assert len(values) == len(dataclasses.fields(TokenEvent))
