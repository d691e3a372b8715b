"""Runs against a real gateway on the fake engine: what is sent arrives, and what is measured adds up."""

from __future__ import annotations

import asyncio
import json

import pytest

from tripool.bench import poisson_arrivals, random_shots, summarise, trace_shots
from tripool.bench.endpoint import BodyMaker, UnfitServer, find_model, make_prompts
from tripool.bench.prompts import ORDINARY_IDS, Piece, TextPrompts, TokenPrompts
from tripool.bench.run import Measured, Run
from tripool.bench.trace import TraceRequest
from tripool.bench.wire import Address, CannotConnect, HttpClient
from tripool.bench.workload import Shot, at_times

from .conftest import DEADLINE_S, Gateway, speaking, whole_answer

DONE = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


async def measured(url: str, shots: list[Shot], api="completions", concurrency=None, timeout_s=DEADLINE_S) -> Measured:
    address = Address.parse(url)
    client = HttpClient(address)
    try:
        model = await find_model(client, address, None)
        prompts = await make_prompts(client, api, model, 0)
        run = Run(client, BodyMaker(api, model, prompts, 0, True), timeout_s=timeout_s)
        async with asyncio.timeout(DEADLINE_S):
            return await run.go(shots, concurrency=concurrency)
    finally:
        client.close()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_closed_loop(gateway: Gateway, api):
    shots = random_shots(24, input_tokens=40, output_tokens=12)
    found = asyncio.run(measured(gateway.url, shots, api, concurrency=5))
    assert sorted(sample.index for sample in found.samples) == list(range(24))
    for sample in found.samples:
        assert sample.ok, (sample.error, sample.detail)
        assert sample.completion_tokens == len(sample.events_s) == 12  # one event per token
        assert sample.cached_tokens == 0
        assert sample.sent_s <= sample.events_s[0] <= sample.events_s[-1] <= sample.end_s <= found.duration_s
    moments = sorted([(s.sent_s, 1) for s in found.samples] + [(s.end_s, -1) for s in found.samples])
    assert max(sum(step for _, step in moments[: k + 1]) for k in range(len(moments))) == 5
    assert not gateway.engine.open_requests


def test_completions_have_exact_lengths(gateway: Gateway):
    shots = random_shots(3, input_tokens=333, output_tokens=2)
    found = asyncio.run(measured(gateway.url, shots, concurrency=1))
    assert [sample.prompt_tokens for sample in found.samples] == [333] * 3


def test_open_loop_keeps_times(gateway: Gateway):
    shots = random_shots(20, input_tokens=8, output_tokens=4)
    due_s = poisson_arrivals(20, rate=100, seed=5)
    found = asyncio.run(measured(gateway.url, at_times(shots, due_s)))
    assert all(sample.ok for sample in found.samples)
    assert all(sample.sent_s >= due_s[sample.index] - 0.002 for sample in found.samples)  # uvloop rounds to 1 ms
    assert found.duration_s >= due_s[-1]


def test_a_trace_hits_the_cache_where_its_ids_repeat(gateway: Gateway):
    """The fake caches blocks of 64 tokens; one block of the trace is two of them. Each prompt has an end of its own."""
    ids = [(1, 2, 3), (1, 2, 4), (1, 5), (1, 2, 3, 6), (9,)]
    requests = [TraceRequest(0.0, 512 * len(own) + 100, 4, own) for own in ids]
    shots = trace_shots(requests, scale_tokens=0.25)
    found = asyncio.run(measured(gateway.url, shots, concurrency=1))
    cached = [sample.cached_tokens for sample in sorted(found.samples, key=lambda sample: sample.index)]
    assert cached == [0, 256, 128, 384, 0]
    again = asyncio.run(measured(gateway.url, shots, concurrency=1))
    assert [sample.cached_tokens for sample in again.samples] == [384, 384, 256, 512, 128]


def test_errors_are_counted_by_kind(gateway: Gateway):
    shots = random_shots(4, input_tokens=5000, output_tokens=4)  # the context is 4,096
    found = asyncio.run(measured(gateway.url, shots, concurrency=2))
    summary = summarise(found.samples, found.duration_s)
    assert (summary.completed, summary.errors) == (0, {"http 400 context_length_exceeded": 4})


def test_one_bad_answer_does_not_end_the_run():
    async def main() -> Measured:
        async def says(body, writer, count):
            if count == 1:
                writer.write(whole_answer(b'{"data": [{"id": "m"}]}'))
            elif count == 2:  # /tokenize
                writer.write(whole_answer(b"{}", "404 Not Found"))
            elif count == 4:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: {")
                await writer.drain()
                writer.close()
            elif count == 5:
                writer.write(whole_answer(b'{"error": {"message": "full"}}', "429 Too Many Requests"))
            elif count == 6:
                await asyncio.Event().wait()
            else:
                writer.write(whole_answer(DONE))

        async with speaking(says) as url:
            return await measured(url, random_shots(5, input_tokens=4, output_tokens=1), concurrency=1, timeout_s=4.0)

    found = asyncio.run(main())
    assert [sample.error for sample in found.samples] == [None, "cut off", "http 429", "timeout", None]


def test_stopping_early_keeps_what_was_measured():
    async def main() -> Measured:
        async def says(body, writer, count):
            if count > 3:
                await asyncio.Event().wait()
            writer.write(whole_answer(DONE))

        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            ended = asyncio.Semaphore(0)
            bodies = BodyMaker("completions", "m", TokenPrompts(ORDINARY_IDS, 0), 0, True)
            run = Run(client, bodies, timeout_s=DEADLINE_S, on_end=lambda sample: ended.release())
            shots = random_shots(50, input_tokens=4, output_tokens=1)
            going = asyncio.ensure_future(run.go(shots, concurrency=2))
            async with asyncio.timeout(DEADLINE_S):
                for _ in range(3):
                    await ended.acquire()
                run.stop()
                found = await going
            client.close()
            return found

    found = asyncio.run(main())
    assert (len(found.samples), found.cancelled) == (3, 2)


def test_bodies():
    shot = Shot(0, None, (Piece("a", 3),), 7)
    sent = json.loads(BodyMaker("completions", "m", TokenPrompts([5], 0), 9, True).body(shot))
    assert (sent["prompt"], sent["max_tokens"], sent["seed"], sent["ignore_eos"]) == ([5, 5, 5], 7, 9, True)
    chat = json.loads(BodyMaker("chat", "m", TextPrompts(["w"], 0), 9, False).body(shot))
    assert chat["messages"] == [{"role": "user", "content": " w w w"}]
    assert chat["stream"] and chat["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in chat and "prompt" not in chat


def test_words_are_chosen_by_the_servers_tokenizer():
    """A server that counts one token per letter, and eleven around a chat."""

    async def main():
        async def says(body, writer, count):
            asked = json.loads(body)
            said = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
            tokens = [ord(letter) for letter in said.replace(" ", "")] + [0] * (11 if "messages" in asked else 0)
            writer.write(whole_answer(json.dumps({"tokens": tokens, "count": len(tokens)}).encode()))

        async with speaking(says) as url:
            client = HttpClient(Address.parse(url))
            text = await make_prompts(client, "chat", "m", 0)
            ids = await make_prompts(client, "completions", "m", 0)
            client.close()
        return text.text((Piece("a", 111),)), ids.ids((Piece("a", 50),))

    text, ids = asyncio.run(main())
    assert len(text.replace(" ", "")) == 99  # 111 less the 11 around it, in words of three
    assert all(ord("a") <= token_id <= ord("z") for token_id in ids)


def test_a_server_without_models():
    async def main(status: str, told: bytes):
        async def says(body, writer, count):
            writer.write(whole_answer(told, status))

        async with speaking(says) as url:
            address = Address.parse(url)
            client = HttpClient(address)
            assert await find_model(client, address, "mine") == "mine"
            try:
                return await find_model(client, address, None)
            finally:
                client.close()

    assert asyncio.run(main("200 OK", b'{"data": [{"id": "m"}]}')) == "m"
    for status, body in (("404 Not Found", b"{}"), ("200 OK", b'{"data": []}'), ("200 OK", b"hello")):
        with pytest.raises(UnfitServer) as refused:
            asyncio.run(main(status, body))
        assert refused.value.hint == "name one with --model"


def test_nobody_there_asks_the_right_question():
    async def main():
        address = Address("127.0.0.1", 1, False, "")
        await find_model(HttpClient(address), address, None)

    with pytest.raises(CannotConnect) as refused:
        asyncio.run(main())
    assert refused.value.hint == "is `tripool serve` running?"
