"""Whole answers are shaped while their tokens come and sent in parts; their bytes are those of one plain encoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.serving import Serve
from tripool.answer import Answer
from tripool.core import Request, SamplingParams
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.job import Api, Job
from tripool.gateway.logprobs import chat_logprobs, completion_logprobs
from tripool.gateway.output_parser import OutputParser
from tripool.gateway.respond import OpenAIFormatter, encode
from tripool.gateway.stream import _gathered
from tripool.text import Tokenizer

TEXT = fake_text()
FACTS = {"request_id": "r", "timing": {"total": 1.5}}


class Spelling(Tokenizer):
    """Counts what it is asked to spell."""

    def __init__(self) -> None:
        super().__init__(TEXT)
        self.num_spelled = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_spelled += 1
        return super().token_bytes(token_id)


def job(api: Api, *, num_prompts: int = 1, echo: bool = False, ids: bool = False, **params: Any) -> Job:
    given = SamplingParams(**{"ignore_eos": True, "max_tokens": 70} | params)
    requests = tuple(
        Request(id=f"r{i}", prompt_ids=(9, 10 + i), params=given, seed=3, end_ids=TEXT.end_ids)
        for i in range(num_prompts)
    )
    echoes = tuple(f'pro"mpt {i} ' for i in range(num_prompts)) if echo else ()
    return Job(
        id="id", request_id="r", key="k", api=api, requests=requests, stream=False, echoes=echoes, return_token_ids=ids
    )


def answered(made: Job, tokenizer: Tokenizer) -> tuple[OpenAIFormatter, list[Answer], list[Answer]]:
    """The shapes with what they keep, and answers that keep everything."""
    lean, full = ([Answer(request, tokenizer) for request in made.requests] for _ in range(2))
    shapes = OpenAIFormatter(made, tokenizer, lean, model="m", created_s=1)
    engine, n = PagedFake(TEXT), made.requests[0].params.n
    for request in made.requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            position = int(event.request_id[1:])
            lean[position].keeps_logprobs = False
            full[position].take(event)
            delta = lean[position].take(event)
            assert delta is not None
            shapes.take(position * n + delta.choice, delta)
    return shapes, lean, full


def plain(made: Job, tokenizer: Tokenizer, answers: Sequence[Answer], usage: Any) -> bytes:
    """All of it in one encoding, from answers that kept everything."""
    chat, n = made.api == "chat", made.requests[0].params.n

    def choices() -> Iterator[dict[str, Any]]:
        for position, answer in enumerate(answers):
            for choice in answer.generation().choices:
                ids: dict[str, Any] = {"token_ids": choice.token_ids} if made.return_token_ids else {}
                if chat:
                    parser = OutputParser(calls=False, thinks=None)
                    parser.push(choice.text, last=True)
                    message = {"role": "assistant", "content": parser.parsed.content, "refusal": None}
                    body: dict[str, Any] = {"message": message}
                else:
                    body = {"text": (made.echoes[position] if made.echoes else "") + choice.text}
                    ids |= {"prompt_token_ids": answer.request.prompt_ids} if ids else {}
                logprobs = None
                if choice.logprobs is not None:
                    pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
                    logprobs = chat_logprobs(tokenizer, pairs) if chat else completion_logprobs(tokenizer, pairs, 0)
                index = position * n + choice.index
                yield {"index": index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}

    head = {"id": "id", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": "m"}
    body = head | {"choices": list(choices()), "usage": usage, "tripool": FACTS}
    prompt_ids = {"prompt_token_ids": answers[0].request.prompt_ids} if chat and made.return_token_ids else {}
    return encode(body | prompt_ids)


@pytest.mark.parametrize(
    "made",
    [
        job("chat"),
        job("chat", n=3, logprobs=20, ids=True),
        job("chat", logprobs=0, max_tokens=1),
        job("chat", n=2, logprobs=5, max_tokens=64),
        job("completion", num_prompts=3, n=2, echo=True, ids=True),
        job("completion", num_prompts=2, n=3, logprobs=20),
        job("completion", logprobs=0, max_tokens=65),
    ],
    ids=lambda made: f"{made.api}-{made.requests[0].params.logprobs}-{made.requests[0].params.max_tokens}",
)
def test_the_bytes_are_those_of_one_encoding(made: Job) -> None:
    tokenizer = Tokenizer(TEXT)
    shapes, lean, full = answered(made, tokenizer)
    pieces = list(shapes.whole(lean, FACTS))
    assert b"".join(pieces) == plain(made, tokenizer, full, json.loads(b"".join(pieces))["usage"])


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_scores_are_shaped_as_they_come_and_leave_in_small_pieces(api: Api) -> None:
    """At the end nothing is left to spell, however many there are, and no piece is more than a few tokens' worth."""
    tokenizer = Spelling()
    shapes, lean, _ = answered(job(api, n=4, logprobs=20, max_tokens=500), tokenizer)
    num_spelled = tokenizer.num_spelled
    pieces = list(shapes.whole(lean, FACTS))
    assert tokenizer.num_spelled == num_spelled
    assert num_spelled <= tokenizer.vocab_size, "nothing is spelled twice"
    assert sum(map(len, pieces)) > 2**19 > 4 * max(map(len, pieces))
    assert not any(answer.generation().logprobs for answer in lean), "kept twice"


def test_other_tasks_run_while_a_body_is_joined() -> None:
    async def go() -> tuple[list[bytes], int]:
        num_turns, done = 0, False

        async def others() -> None:
            nonlocal num_turns
            while not done:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        parts = await _gathered(b"x" * 10_000 for _ in range(200))
        done = True
        await other
        return parts, num_turns

    parts, num_turns = asyncio.run(go())
    assert b"".join(parts) == b"x" * 2_000_000 and max(map(len, parts)) < 80_000
    assert num_turns >= len(parts) - 1 > 20


def test_a_long_answer_arrives_whole(serve: Serve) -> None:
    with serve() as served:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "n": 16, "ignore_eos": True}
        response = served.http.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 20})
        assert int(response.headers["content-length"]) == len(response.content) > 2**20
        choices = response.json()["choices"]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [60] * 16
        assert served.http.get("/v1/models").status_code == 200, "on the same server"


# ---- how much may be asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 128, "max_tokens": 2000, "logprobs": 20}, "max_tokens"),
        ({"n": 128, "max_tokens": None, "min_tokens": 2000, "logprobs": 20}, "max_tokens"),
        ({"prompt": ["a" * 70_000] * 8, "n": 128, "echo": True, "truncate_prompt_tokens": None}, "echo"),
    ],
)
def test_more_than_any_answer_may_hold_is_refused(serve: Serve, check_refusal: Any, more: Any, param: str) -> None:
    with serve(context_tokens=100_000) as served:
        check_refusal(served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3} | more), param)
        assert served.engine.added == []


def test_an_answer_without_a_length_ends_before_it_holds_too_much(serve: Serve) -> None:
    with serve(context_tokens=10**9) as served:
        body = {"prompt": "a", "n": 100, "logprobs": 20, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
        (request,) = served.engine.added
        assert request.params.max_tokens == 2**22 // 2100
