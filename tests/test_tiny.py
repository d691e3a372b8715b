"""The surfaces over the bundled model: the walk from text to text with nothing replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.errors import CheckpointMissing, ContextOverflow, InvalidRequest
from tripool.gateway.server import listen
from tripool.serving.colocated import engine_server

DEADLINE_S = 60.0
CHATS = [[{"role": "user", "content": content}] for content in ("Tell me a story.", "What is a pool?")]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=16, n=2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine("tiny", EngineConfig(kv_gb=0.05, threads=1))


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    yield LLM(engine)
    assert not engine.busy


def test_alone_or_together(llm):
    together = llm.chat(CHATS, [GREEDY, SEEDED])
    alone = [llm.chat(chat, params)[0] for chat, params in zip(CHATS, [GREEDY, SEEDED], strict=True)]
    assert [[c.token_ids for c in g.choices] for g in together] == [[c.token_ids for c in g.choices] for g in alone]
    assert all(choice.text.strip() for generation in together for choice in generation.choices)


def test_stream_and_stop(llm):
    (plain,) = llm.chat(CHATS[0], GREEDY)
    stream = llm.stream_chat(CHATS[0], GREEDY)
    assert "".join(stream) == plain.text
    stop = plain.text[-6:]
    (cut,) = llm.chat(CHATS[0], SamplingParams(temperature=0, max_tokens=64, stop=(stop,)))
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_drafts_are_counted_and_can_be_switched_off(llm):
    (drafted,) = llm.chat(CHATS[0], GREEDY)
    with LLM("tiny", kv_gb=0.05, threads=1, mtp=False) as plain:
        (undrafted,) = plain.chat(CHATS[0], GREEDY)
    assert 0 < drafted.usage.accepted_draft_tokens <= drafted.usage.draft_tokens < drafted.usage.completion_tokens
    assert (undrafted.usage.accepted_draft_tokens, undrafted.usage.draft_tokens) == (0, 0)


def test_leaving_early_frees_everything(llm, engine):
    stream = llm.stream_chat(CHATS[0], SamplingParams(seed=1, ignore_eos=True))
    next(stream)
    assert engine.busy
    stream.close()
    assert not engine.busy


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([1] * 100_000, SamplingParams(), ContextOverflow),
        ([-1], SamplingParams(), InvalidRequest),
        ([10**9], SamplingParams(), InvalidRequest),
        ([1], SamplingParams(logit_bias={10**9: 1.0}), InvalidRequest),
        ([], SamplingParams(), InvalidRequest),
    ],
)
def test_refusals(llm, prompt, params, error):
    with pytest.raises(error):
        llm.generate([prompt], params)


def test_no_such_model():
    with pytest.raises(CheckpointMissing, match="no model 'nonsense'"):
        LLM("nonsense")


def test_over_http(engine):
    want = [choice.text for choice in LLM(engine).chat(CHATS[0], SEEDED)[0].choices]
    with (
        listen("127.0.0.1", 0) as listener,
        engine_server(engine, listener) as server,
        server.running(),
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        options = {"temperature": 0.8, "seed": 11, "max_tokens": 16, "n": 2, "logprobs": True, "top_logprobs": 3}
        answer = client.chat.completions.create(model="tiny", messages=CHATS[0], **options)
        assert [choice.message.content for choice in answer.choices] == want
        for entry in answer.choices[0].logprobs.content:
            assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
        texts = ["", ""]
        with client.chat.completions.create(model="tiny", messages=CHATS[0], stream=True, **options) as stream:
            for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == want
