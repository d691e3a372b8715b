"""Structured output of the bundled model: valid, says an independent validator, and finished."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from grammar.schemas import depth, random_schema
from tripool import LLM, Generation, SamplingParams, Structure
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.errors import InvalidRequest
from tripool.grammar.tools import tool_structure

ASK: Any = [{"role": "user", "content": "Describe a small town."}]
ASK_JSON: Any = [{"role": "user", "content": "Ana is 30 years old. Answer in JSON with name, age."}]
MAX_TOKENS = 1500
"""Of a context of 2048. The longest answer that any of the schemas below calls for has about half as many."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine("tiny", EngineConfig(kv_gb=0.2, threads=1))


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    yield LLM(engine)
    assert not engine.busy


def params(structure: Structure, seed: int, temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        structure=structure, seed=seed, temperature=temperature, **{"max_tokens": MAX_TOKENS, **options}
    )


def check_schemas(llm: LLM, count: int, temperatures: tuple[float, ...]) -> None:
    """Seeds from 0 on, and the temperatures in turn."""
    schemas = [random_schema(Random(seed)) for seed in range(count)]
    assert min(map(depth, schemas)) >= 3
    wanted = [
        params(Structure("json_schema", schema), seed, temperatures[seed % len(temperatures)])
        for seed, schema in enumerate(schemas)
    ]
    answers = llm.chat([ASK] * count, wanted)
    truncated = [seed for seed, answer in enumerate(answers) if answer.finish_reason != "stop"]
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"\n{count} schemas at temperatures {temperatures}: {len(truncated)} truncated, {tokens} tokens")
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish_reason == "stop":
            Draft202012Validator(schema).validate(json.loads(answer.text))
    assert not truncated


def test_random_schemas(llm):
    check_schemas(llm, 40, (1.0, 0.0))


@pytest.mark.prove
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_random_schemas(llm, temperature):
    check_schemas(llm, 200, (temperature,))


def ask(
    llm: LLM, structure: Structure, temperature: float, count: int = 2, said: Any = ASK, **options: Any
) -> list[Generation]:
    answers = llm.chat([said] * count, [params(structure, seed, temperature, **options) for seed in range(count)])
    assert {answer.finish_reason for answer in answers} == {"stop"}
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_structures(llm, temperature):
    pattern = r"(\d{4}-\d{2}: [A-Z][a-zé]{2,9}\n){2}(yes|no)"
    for answer in ask(llm, Structure("regex", pattern), temperature):
        assert re.fullmatch(pattern, answer.text), answer.text
    choices = ["a village", "a hamlet", "a city 🏙", 'not "a town"']
    for answer in ask(llm, Structure("choice", choices), temperature):
        assert answer.text in choices
    sums = 'root ::= term ([-+*] term){0,5}\nterm ::= [1-9] | "(" [1-9] [-+*] [1-9] ")"'
    for answer in ask(llm, Structure("ebnf", sums), temperature):
        assert isinstance(eval(answer.text, {"__builtins__": {}}), int)  # digits and operators only, says the grammar
    for answer in ask(llm, Structure("json_object"), temperature, said=ASK_JSON):  # nothing else would ever end it
        assert isinstance(json.loads(answer.text), dict)
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}
    calls = tool_structure([{"name": "count", "parameters": parameters}], required=True, parallel=False)
    for answer in ask(llm, calls, temperature):
        body = answer.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        assert json.loads(body)["name"] == "count"


def test_the_same_with_and_without_drafts_and_neighbours(llm, engine):
    """Drafts are masked like samples: they change the speed, never the text. Nor does company."""
    schemas = [Structure("json_schema", random_schema(Random(seed))) for seed in range(4)]
    wanted = [params(schema, seed, 0.7, max_tokens=60) for seed, schema in enumerate(schemas)]
    together = llm.chat([ASK] * 4, wanted)
    with LLM("tiny", kv_gb=0.05, threads=1, mtp=False) as plain:
        without = [plain.chat(ASK, one)[0] for one in wanted]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in without]
    assert sum(answer.usage.accepted_draft_tokens for answer in together) > 0


def test_the_grammar_wins(llm):
    """Over everything that would push the answer elsewhere, or end it too early or too late."""
    structure = Structure("choice", ["no", "never"])
    yes = llm.tokenizer.encode("yes", special=False)
    options: list[dict[str, Any]] = [
        {"logit_bias": dict.fromkeys(yes, 100.0)},
        {"min_tokens": 30},
        {"ignore_eos": True},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0},
        {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
        {"stop_token_ids": llm.tokenizer.encode("n", special=False)},
        {"logprobs": 3},
    ]
    for option in options:
        for answer in ask(llm, structure, 1.0, **option):
            assert answer.text in ("no", "never"), option


def test_truncation_is_reported_and_bad_grammars_leave_nothing_behind(llm, engine):
    (cut,) = llm.chat(ASK, params(Structure("regex", "[a-z ]{200}"), 1, 1.0, max_tokens=5))
    assert (cut.finish_reason, cut.usage.completion_tokens) == ("length", 5)
    held = engine.scheduler.pool.num_held
    for bad in (Structure("regex", "("), Structure("json_schema", {"not": {}}), Structure("ebnf", "start: missing")):
        with pytest.raises(InvalidRequest):
            llm.chat([ASK, ASK], [SamplingParams(max_tokens=1), SamplingParams(structure=bad)])
        assert not engine.busy
    assert engine.scheduler.pool.num_held == held == 0
