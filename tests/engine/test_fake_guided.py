"""The stand-in keeps to structures as the engine does, so that the surfaces can be tested over it."""

from __future__ import annotations

import json

import pytest

from tripool import LLM, SamplingParams, Structure
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def test_answers_have_their_structure_and_an_end():
    with LLM(PagedFake(fake_text())) as llm:
        params = [SamplingParams(seed=seed, n=2, structure=Structure("json_schema", SCHEMA)) for seed in range(10)]
        answers = llm.generate(["a"] * 10, params)
        again = llm.generate(["a"] * 10, params)
    texts = [choice.text for answer in answers for choice in answer.choices]
    assert len(set(texts)) > 10
    for text in texts:
        assert json.loads(text).keys() >= {"a", "b"}
    assert {choice.finish_reason for answer in answers for choice in answer.choices} == {"stop"}
    assert [answer.choices for answer in answers] == [answer.choices for answer in again]


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 40}])
def test_a_complete_answer_ends_whatever_else_is_asked(options):
    with LLM(PagedFake(fake_text())) as llm:
        (answer,) = llm.generate("a", SamplingParams(structure=Structure("choice", ["yes", "no"]), **options))
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"


def test_bad_grammars_are_refused_before_any_work():
    engine = PagedFake(fake_text())
    with LLM(engine) as llm, pytest.raises(InvalidRequest, match="regex"):
        llm.generate("a", SamplingParams(structure=Structure("regex", "[")))
    assert not engine.open_requests
