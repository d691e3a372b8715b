"""The parameters beyond OpenAI's core: each does what its name says, or is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.serving import WatchedEngine
from tripool.engine.fake import fake_text
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION

HELLO: Any = [{"role": "user", "content": "hello"}]


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon", "a pool"], [40, 41, 42]])
def test_echo(server, prompt):
    body = {"prompt": prompt, "seed": 1, "max_tokens": 4, "n": 2}
    plain = server.http.post("/v1/completions", json=body).json()
    echoed = server.http.post("/v1/completions", json=body | {"echo": True}).json()
    shown = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(prompt[0], int):
        shown = [server.http.post("/detokenize", json={"tokens": prompt}).json()["prompt"]]
    want = [shown[i // 2] + choice["text"] for i, choice in enumerate(plain["choices"])]
    assert [choice["text"] for choice in echoed["choices"]] == want
    streamed = [""] * len(want)
    for event in events(server.http.post("/v1/completions", json=body | {"echo": True, "stream": True})):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == want


def test_best_of_is_n_or_nothing(server, check_refusal):
    body = {"prompt": "a", "max_tokens": 1}
    assert len(server.http.post("/v1/completions", json=body | {"n": 2, "best_of": 2}).json()["choices"]) == 2
    check_refusal(server.http.post("/v1/completions", json=body | {"n": 2, "best_of": 3}), "best_of")
    check_refusal(server.http.post("/v1/completions", json=body | {"n": 2, "best_of": 1}), "best_of")


@pytest.mark.parametrize("chat", [False, True])
def test_return_token_ids(server, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"seed": 1, "return_token_ids": True} | ({"messages": HELLO} if chat else {"prompt": "a"})
    whole = server.http.post(path, json=body).json()
    (request,) = server.engine.added
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    prompt_ids = (whole if chat else whole["choices"][0])["prompt_token_ids"]
    assert prompt_ids == list(request.prompt_ids)
    chunks = events(server.http.post(path, json=body | {"stream": True}))
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    first = chunks[0] if chat else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt_ids


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
    chunks = events(server.http.post("/v1/chat/completions", json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4
    assert {1, 2, 3, 4} <= set(counts)


def test_truncate_prompt_tokens(server, check_refusal):
    server.openai.completions.create(
        model="fake", prompt=[40, 41, 42], max_tokens=1, extra_body={"truncate_prompt_tokens": 2}
    )
    assert server.engine.added[0].prompt_ids == (41, 42)
    check_refusal(
        server.http.post("/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"
    )


def test_the_salt_narrows_the_namespace(server, check_refusal):
    def cached(**salt: str) -> int:
        answer = server.openai.completions.create(model="fake", prompt="salted " * 40, max_tokens=1, extra_body=salt)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached(cache_salt="a") > 0
    assert len({request.namespace for request in server.engine.added}) == 3
    for salt in ("", "x" * 300, 5):
        check_refusal(server.http.post("/v1/completions", json={"prompt": "a", "cache_salt": salt}), "cache_salt")


@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_request_ids(server, check_refusal, name):
    body = {"messages": HELLO, "max_tokens": 1, name: "job-7"}
    response = server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "other"})
    assert response.headers["x-request-id"] == "job-7"
    assert response.json()["id"] == "chatcmpl-job-7"
    for bad in ("", "a b", "a\nb", "x" * 200, "é"):
        refused = server.http.post("/v1/chat/completions", json=body | {name: bad}, headers={"x-request-id": "other"})
        check_refusal(refused, "request_id")
        assert refused.headers["x-request-id"] == "other"


def test_two_open_requests_may_have_the_same_id(serve):
    with serve(context_tokens=10**9) as served:
        body = {"prompt": "a", "stream": True, "ignore_eos": True, "request_id": "same"}
        with (
            served.http.stream("POST", "/v1/completions", json=body) as first,
            served.http.stream("POST", "/v1/completions", json=body) as second,
        ):
            lines = [first.iter_lines(), second.iter_lines()]
            assert all(map(next, lines))
            assert len(served.engine.open_requests) == 2
        assert served.engine.wait_idle()


def test_strange_headers_are_no_error(server):
    headers = {"x-request-id": "a b;" * 100}
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert response.status_code == 200
    assert response.headers["x-request-id"] != headers["x-request-id"]


def test_template_options(serve, check_refusal):
    base = fake_text()
    assert base.chat_template is not None
    marks = "[{{ enable_thinking }}|{{ reasoning_effort }}]"
    engine = WatchedEngine(text=replace(base, chat_template=base.chat_template + marks))
    with serve(engine=engine) as served:

        def prompt(**options: Any) -> str:
            reported = served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1} | options)
            assert reported.status_code == 200, reported.text
            ids = engine.added[-1].prompt_ids
            return str(served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"])

        assert prompt().endswith("<|assistant|>[|]")
        assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("[False|]")
        assert prompt(reasoning_effort="low").endswith("[|low]")
        assert prompt(add_generation_prompt=False).endswith("<|end|>[|]")
        said = [*HELLO, {"role": "assistant", "content": "I say"}]
        assert prompt(messages=said, continue_final_message=True).endswith("<|assistant|>I say")
        served.anthropic.messages.create(
            model="fake", messages=HELLO, max_tokens=1, thinking={"type": "enabled", "budget_tokens": 1024}
        )
        ids = engine.added[-1].prompt_ids
        assert served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("[True|]")
        both = {"messages": said, "continue_final_message": True, "add_generation_prompt": True}
        check_refusal(served.http.post("/v1/chat/completions", json=both), None)
        ours = {"messages": HELLO, "chat_template_kwargs": {"messages": []}}
        check_refusal(served.http.post("/v1/chat/completions", json=ours), "chat_template_kwargs")


def test_no_stop_trim(server):
    body = {"prompt": "a", "seed": 1, "ignore_eos": True, "stop": "pool", "no_stop_trim": True}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"].endswith("pool")


REFUSED = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "suffix": "x",
    "use_beam_search": True,
    "thinking_token_budget": 5,
    "lora_path": "x",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(server, check_refusal, name):
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        check_refusal(server.http.post(path, json=body | {name: REFUSED[name]}), name)
    assert not server.engine.added


def test_what_is_ignored_is_accepted_with_any_value(server):
    for fields, path, body in (
        (CHAT, "/v1/chat/completions", {"messages": HELLO}),
        (COMPLETION, "/v1/completions", {"prompt": "a"}),
        (ANTHROPIC, "/v1/messages", {"messages": HELLO}),
    ):
        for value in (1, {"a": ["b"]}):
            ignored = dict.fromkeys(fields.ignored, value)
            response = server.http.post(path, json=body | {"max_tokens": 1} | ignored)
            assert response.status_code == 200, response.text
