"""Log-probabilities of prompts over HTTP, by `echo` and by `prompt_logprobs`. Those of the fake engine are made up."""

from __future__ import annotations

import json

import pytest

from tripool.router.answer_limits import MAX_PROMPT_SCORES

IDS = [40, 50, 60, 70]


def ask(server, **body):
    return server.http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 2, "ignore_eos": True, **body})


def test_echo_with_logprobs(server):
    answer = ask(server, echo=True, logprobs=2, n=2, return_token_ids=True).json()
    for choice in answer["choices"]:
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(IDS) + 2}
        assert scores["token_logprobs"][:4] == [None, *(-i / 64 for i in IDS[1:])]
        assert scores["top_logprobs"][0] is None
        assert all(
            max(top.values()) >= score
            for top, score in zip(scores["top_logprobs"][1:], scores["token_logprobs"][1:], strict=True)
        )
        assert "".join(scores["tokens"]) == choice["text"]
        starts = [sum(map(len, scores["tokens"][:i])) for i in range(len(IDS) + 2)]
        assert scores["text_offset"] == starts


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_echo(server, stream):
    """How harnesses score a text: they want no token after it."""
    body = {"echo": True, "max_tokens": 0, "stream": stream}
    answer = ask(server, **body, **({} if stream else {"logprobs": 0, "return_token_ids": True}))
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        said, finish = "".join(one["choices"][0]["text"] for one in chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = answer.json()["choices"]
        said, finish = choice["text"], choice["finish_reason"]
        assert {len(column) for column in choice["logprobs"].values()} == {len(IDS)} and choice["token_ids"] == []
    text = server.http.post("/detokenize", json={"tokens": IDS}).json()["prompt"]
    assert (said, finish) == (text, "length")
    assert ask(server, max_tokens=0).status_code == 400


def test_without_echo_only_the_answer_is_scored(server):
    scores = ask(server, logprobs=2).json()["choices"][0]["logprobs"]
    assert len(scores["tokens"]) == 2 and scores["text_offset"][0] == 0
    assert ask(server, echo=True).json()["choices"][0]["logprobs"] is None
    assert server.engine.added[-1].params.prompt_logprobs is None


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs(server, top):
    choice = ask(server, prompt_logprobs=top).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 3
    for token_id, scores in zip(IDS[1:], others, strict=True):
        assert scores[str(token_id)]["logprob"] == -token_id / 64
        assert len(scores) == max(1, top)
        assert scores[str(token_id)]["rank"] == (1 if top else None)
    assert choice["logprobs"] is None
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "prompt_logprobs": top}
    answer = server.http.post("/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_refusals(server, check_refusal):
    check_refusal(ask(server, prompt_logprobs=1, stream=True), "prompt_logprobs")
    check_refusal(ask(server, echo=True, logprobs=1, stream=True), "echo")
    check_refusal(ask(server, prompt_logprobs=21), "prompt_logprobs")
    check_refusal(ask(server, prompt_logprobs=-1), "prompt_logprobs")


def test_scores_of_one_prompt_are_bounded(serve, check_refusal):
    with serve(context_tokens=2**20) as served:
        long = {"prompt": [40] * (MAX_PROMPT_SCORES // 21 + 1), "prompt_logprobs": 20, "max_tokens": 1}
        check_refusal(served.http.post("/v1/completions", json=long), "prompt_logprobs")


def test_tokenizer_info(server):
    told = server.http.get("/tokenizer_info").json()
    assert told["eos_token"] == "<|end|>" and "message.role" in told["chat_template"]
    assert told["model_max_length"] == 2048
    assert server.http.get("/tokenizer_info?model=nonsense").status_code == 404
