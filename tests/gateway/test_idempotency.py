"""Requests with an idempotency key, in one process: repeated at any time, they are one request."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from gateway.serving import FRESH, GatedEngine, ScriptedEngine, Served

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "ignore_eos": True}
COMPLETION: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
MESSAGES: dict[str, Any] = {"messages": CHAT["messages"], "max_tokens": 12}
RESPONSES: dict[str, Any] = {"input": "hello", "max_output_tokens": 12, "ignore_eos": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "green"]}}}
STREAMED = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat of two with log-probabilities": (
        "/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 0.9}
    ),
    "chat with tools": (
        "/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False}
    ),
    "chat in a form": ("/v1/chat/completions", CHAT | {"response_format": SCHEMA, "ignore_eos": False}),
    "chat with usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "completions of two prompts": ("/v1/completions", COMPLETION | {"prompt": [[5, 6], [7]], "n": 2, "logprobs": 1}),
    "a stop string": ("/v1/completions", COMPLETION | {"stop": ["e"], "max_tokens": 200}),
    "messages": ("/v1/messages", MESSAGES),
    "responses": ("/v1/responses", RESPONSES),
}  # fmt: skip


def headers(key: str, last: str = "") -> dict[str, str]:
    return {"Idempotency-Key": key} | ({"Last-Event-ID": last} if last else {})


def stream(served: Served, path: str, body: dict[str, Any], key: str, last: str = "") -> list[str]:
    """Whole events."""
    response = served.http.post(path, json=body | {"stream": True}, headers=headers(key, last))
    assert response.status_code == 200, response.text
    return [event for event in response.text.split("\n\n") if event]


def id_of(event: str) -> str:
    return event.rpartition("\nid: ")[2]


def without_times(event: str) -> str:
    """Only times differ between two readings."""
    data = event.partition("data: ")[2].partition("\nid: ")[0]
    if not data.startswith("{"):
        return event
    body = json.loads(data)
    for place in (body, body.get("response", {})):
        place.pop("tripool", None)
    return event.replace(data, json.dumps(body))


def by_choice(events: list[str]) -> dict[str, list[str]]:
    """Choices come in any order; each is a stream of its own, and so is the end. Of several, ids differ."""
    found: dict[str, list[str]] = {}
    for event in events:
        index = event.partition('"choices":[{"index":')[2].partition(",")[0]
        found.setdefault(index, []).append(without_times(event))
    if len(found.keys() - {""}) > 1:
        found = {index: [without_id(event) for event in some] for index, some in found.items()}
    return found


def without_id(event: str) -> str:
    head, _, data = event.partition("data: ")
    data = data.partition("\nid: ")[0]
    body = json.loads(data) if data.startswith("{") else {}
    body.pop("event_id", None)
    return f"{head}{body}"


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_goes_on_after_any_event(serve, name: str) -> None:
    path, body = STREAMED[name]
    with serve() as served:
        key = name.replace(" ", "-")
        whole = stream(served, path, body, key)
        ids = [id_of(event) for event in whole]
        assert len(set(ids)) == len(whole) > 2
        num_added = len(served.engine.added)
        assert by_choice(stream(served, path, body, key)) == by_choice(whole)
        for cut in {0, 1, len(whole) // 2, len(whole) - 2, len(whole) - 1}:
            rest = stream(served, path, body, key, ids[cut])
            assert by_choice(whole[: cut + 1] + rest) == by_choice(whole), cut
        assert len(served.engine.added) == num_added, "it was computed again"
        assert served.engine.wait_idle()


@pytest.mark.parametrize("name", STREAMED)
def test_a_whole_answer_comes_again_as_it_was(serve, name: str) -> None:
    path, body = STREAMED[name]
    body = {field: value for field, value in body.items() if field != "stream_options"}
    with serve() as served:
        first, again = (served.http.post(path, json=body, headers=headers("k")) for _ in range(2))
        assert first.status_code == again.status_code == 200, first.text
        one, two = first.json(), again.json()
        assert one.pop("tripool")["timing"] and two.pop("tripool")["timing"]
        assert one == two and one["id"] == two["id"]
        assert first.headers["x-request-id"] == again.headers["x-request-id"]
        assert len(served.engine.added) == len(body["prompt"]) if isinstance(body.get("prompt", [0])[0], list) else 1


def test_a_key_is_for_one_request(serve) -> None:
    with serve() as served:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            assert served.http.post(path, json=body, headers=headers(path)).status_code == 200
            other = served.http.post(path, json=body | {"max_tokens": 3}, headers=headers(path))
            assert other.status_code == 422 and other.json()["error"]["code"] == "key_reused"
            assert other.json()["error"]["param"] == "Idempotency-Key"
        elsewhere = served.http.post("/v1/chat/completions", json=CHAT, headers=headers("/v1/completions"))
        assert elsewhere.json()["error"]["code"] == "key_reused"


@pytest.mark.parametrize(("sent", "param"), [
    ({"Idempotency-Key": ""}, "Idempotency-Key"), ({"Idempotency-Key": "x" * 256}, "Idempotency-Key"),
    ({"Idempotency-Key": "k", "Last-Event-ID": "7"}, "Last-Event-ID"),
])  # fmt: skip
def test_headers_of_the_wrong_shape_are_refused(serve, check_refusal, sent: dict[str, str], param: str) -> None:
    with serve() as served:
        check_refusal(served.http.post("/v1/completions", json=COMPLETION | {"stream": True}, headers=sent), param)
        many = COMPLETION | {"stream": True, "n": 17}
        check_refusal(served.http.post("/v1/completions", json=many, headers=headers("n")), "n")


def test_an_id_of_another_answer_is_refused(serve) -> None:
    with serve() as served:
        one = stream(served, "/v1/completions", COMPLETION, "one")
        stream(served, "/v1/completions", COMPLETION | {"prompt": [9]}, "two")
        body = COMPLETION | {"prompt": [9], "stream": True}
        answer = served.http.post("/v1/completions", json=body, headers=headers("two", id_of(one[4])))
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "answer_changed"


def test_without_a_seed_the_key_is_the_seed(serve) -> None:
    """Also for a server that knows nothing of the key: the answer is the same."""
    texts = []
    for _ in range(2):
        with serve() as served:
            asked = [served.http.post("/v1/completions", json=COMPLETION, headers=headers(key)) for key in "ab"]
            texts.append([answer.json()["choices"][0]["text"] for answer in asked])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_whoever_hangs_up_finds_it_further_on(serve) -> None:
    """The answer is computed meanwhile, once; two may read it at the same time."""
    engine = GatedEngine(free_steps=6)
    body = COMPLETION | {"max_tokens": 30}
    with serve(engine=engine) as served:
        with httpx.Client(base_url=served.http.base_url, timeout=60, limits=FRESH) as http:
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers("k")) as cut:
                lines = cut.iter_lines()
                got = [next(line for line in lines if line.startswith("data: ")) for _ in range(3)]
                last = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
            rests: dict[int, list[str]] = {}
            readers = [
                threading.Thread(
                    target=lambda i=i: rests.update({i: stream(served, "/v1/completions", body, "k", last)})
                )
                for i in range(2)
            ]
            for reader in readers:
                reader.start()
            engine.in_flight.set()
            for reader in readers:
                reader.join(60)
        assert list(map(without_times, rests[0])) == list(map(without_times, rests[1]))
        whole = stream(served, "/v1/completions", body, "k")
        assert [event.partition("\n")[0] for event in whole[:3]] == got
        assert list(map(without_times, rests[0])) == list(map(without_times, whole[3:]))
        assert len(engine.added) == 1


def test_a_refused_request_is_not_kept(serve) -> None:
    with serve(context_tokens=16) as served:
        long = COMPLETION | {"prompt": [5] * 40}
        assert served.http.post("/v1/completions", json=long, headers=headers("k")).status_code == 400
        assert served.http.post("/v1/completions", json=long, headers=headers("k")).status_code == 400


def test_tokens_are_counted_once(serve) -> None:
    with serve() as served:
        for _ in range(3):
            served.http.post("/v1/completions", json=COMPLETION, headers=headers("k"))
        served.wait_empty()
        scraped = served.http.get("/metrics").text
        assert 'tripool_completion_tokens_total{model_name="fake"} 12.0' in scraped
        assert 'tripool_prompt_tokens_total{model_name="fake"} 3.0' in scraped
        assert 'tripool_requests_total{api="completion",model_name="fake",state="finished"} 3.0' in scraped


def test_scripted_calls_keep_their_ids(serve) -> None:
    script = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    with serve(engine=ScriptedEngine(script)) as served:
        body = CHAT | {"tools": TOOLS, "ignore_eos": False, "max_tokens": 100}
        calls = [
            served.http.post("/v1/chat/completions", json=body, headers=headers("k")).json()["choices"][0]["message"]
            for _ in range(2)
        ]
        assert calls[0]["tool_calls"] == calls[1]["tool_calls"] != []
