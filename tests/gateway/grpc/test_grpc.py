"""gRPC over real sockets: the answers and errors of HTTP, and that no call leaves work behind."""

from __future__ import annotations

import json
import math
import queue
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")
pytest.importorskip("grpc_reflection")

from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # noqa: E402
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # noqa: E402
    ProtoReflectionDescriptorDatabase,
)

from gateway.grpc.calling import Called, calling, refused  # noqa: E402
from gateway.serving import DEADLINE_S, GatedEngine, ScriptedEngine, WatchedEngine  # noqa: E402
from tenants.serving import bearer, make_keys  # noqa: E402
from tripool.engine.fake import fake_text  # noqa: E402
from tripool.gateway.auth import Access  # noqa: E402
from tripool.gateway.connection_limits import ConnectionLimits  # noqa: E402
from tripool.gateway.grpc import GENERATE, REFLECT  # noqa: E402
from tripool.gateway.grpc.messages import GenerateRequest  # noqa: E402
from tripool.grammar.tools import CLOSING, OPENING  # noqa: E402
from tripool.tenants.key_store import KeyStore  # noqa: E402
from tripool.tenants.key_watcher import KeyWatcher  # noqa: E402
from tripool.tenants.usage_log import UsageLog, read_usage  # noqa: E402
from tripool.text import Tokenizer  # noqa: E402

Code = grpc.StatusCode
HELLO: Any = {"messages": [{"role": "user", "content": "Which pool?"}]}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = f'{OPENING}\n{{"name": "now", "arguments": {{}}}}\n{CLOSING}'


@pytest.fixture(scope="module")
def shared() -> Iterator[Called]:
    with calling(max_body_bytes=2**20) as called:
        yield called


@pytest.fixture
def server(shared: Called) -> Iterator[Called]:
    shared.engine.added.clear()
    yield shared
    assert shared.engine.wait_idle(), "requests stayed open in the engine"
    assert shared.http.get("/health").status_code == 200


# ---- answers -----------------------------------------------------------------------------------------------------


def test_answers_are_those_of_http(server: Called) -> None:
    sampling: Any = {"max_tokens": 6, "temperature": 0.7, "seed": 5, "n": 2}
    *replies, last = server.ask(chat=HELLO, sampling=sampling)
    whole = server.http.post("/v1/chat/completions", json={**HELLO, **sampling, "return_token_ids": True}).json()
    for choice in whole["choices"]:
        own = [reply for reply in replies if reply.index == choice["index"]]
        assert "".join(reply.text for reply in own) == choice["message"]["content"]
        assert [token for reply in own for token in reply.token_ids] == choice["token_ids"]
        assert [reply.finish_reason for reply in own] == [""] * 5 + ["length"]
    assert last.usage.prompt_tokens == whole["usage"]["prompt_tokens"] and last.usage.completion_tokens == 12
    assert last.timing.total_ms > 0 and last.request_id
    ours, theirs = server.engine.added
    assert ours.prompt_ids == theirs.prompt_ids and ours.params == theirs.params


def test_prompts_and_token_ids(server: Called) -> None:
    ids = Tokenizer(fake_text()).encode("Hi there")
    server.ask(prompt="Hi there", sampling={"max_tokens": 1}, options_json='{"add_special_tokens": false}')
    server.ask(token_ids={"ids": ids}, sampling={"max_tokens": 1, "stop": ["x"], "stop_token_ids": [3]})
    assert [list(request.prompt_ids) for request in server.engine.added] == [ids, ids]
    assert server.engine.added[1].params.stop == ("x",)


def test_reasoning_and_calls() -> None:
    with calling(ScriptedEngine(f"<think>\nhm é\n</think>\nLet me see.{CALL}\n{CALL}")) as called:
        *replies, last = called.ask(chat=HELLO, tools_json=json.dumps([NOW]), tool_choice_json='"auto"')
        history = [*HELLO["messages"], {"role": "assistant", "reasoning": "hm", "tool_calls": [
            {"id": "c", "name": "now", "arguments": "{}"}]}, {"role": "tool", "tool_call_id": "c", "content": "noon"},
        ]  # fmt: skip
        assert called.ask(chat={"messages": history}, tools_json=json.dumps([NOW]))[-1].usage.completion_tokens
    assert "".join(reply.text for reply in replies) == "Let me see."
    assert "".join(reply.reasoning for reply in replies) == "hm é"
    pieces = [piece for reply in replies for piece in reply.tool_calls]
    assert [piece.name for piece in pieces if piece.id] == ["now", "now"]
    for index in (0, 1):
        assert json.loads("".join(piece.arguments for piece in pieces if piece.index == index)) == {}
    assert replies[-1].finish_reason == "tool_calls" and last.usage.reasoning_tokens > 0


def test_structured_output(server: Called) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    replies = server.ask(prompt="a", response_format_json=json.dumps(wanted), sampling={"max_tokens": 200})
    assert json.loads("".join(reply.text for reply in replies)) == {"n": 7}


def test_ids_and_explain(server: Called) -> None:
    call = server.call(prompt="a", sampling={"max_tokens": 1}, metadata=[("x-request-id", "mine-1")])
    assert list(call)[-1].request_id == "mine-1" and ("x-request-id", "mine-1") in call.initial_metadata()
    explained = server.http.get("/v1/requests/mine-1/explain").json()
    assert (explained["api"], explained["state"]) == ("grpc", "finished")


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_fields", "status", "code", "param"),
    [
        ({}, Code.INVALID_ARGUMENT, "invalid_request", "input"),
        ({"prompt": "a", "model": "no"}, Code.NOT_FOUND, "model_not_found", None),
        ({"prompt": "a", "sampling": {"temperature": -1}}, Code.INVALID_ARGUMENT, "invalid_request", "temperature"),
        ({"prompt": "a", "sampling": {"top_p": math.nan}}, Code.INVALID_ARGUMENT, "invalid_request", None),
        ({"prompt": "a" * 9000}, Code.INVALID_ARGUMENT, "context_length_exceeded", "input"),
        ({"token_ids": {"ids": []}}, Code.INVALID_ARGUMENT, "invalid_request", "prompt"),
        ({"token_ids": {"ids": [2**32 - 1]}}, Code.INVALID_ARGUMENT, "invalid_request", "prompt"),
        ({"chat": {}}, Code.INVALID_ARGUMENT, "invalid_request", "messages"),
        ({"chat": HELLO, "tools_json": "[{"}, Code.INVALID_ARGUMENT, "invalid_request", "tools_json"),
        ({"prompt": "a", "options_json": "[]"}, Code.INVALID_ARGUMENT, "invalid_request", "options_json"),
        ({"prompt": "a", "options_json": '{"stream": 0}'}, Code.INVALID_ARGUMENT, "invalid_request", "options_json"),
        ({"prompt": "a", "options_json": '{"echo": true}'}, Code.INVALID_ARGUMENT, "invalid_request", "options_json"),
        ({"prompt": "a", "options_json": '{"größe": 1}'}, Code.INVALID_ARGUMENT, "invalid_request", "gr%C3%B6%C3%9Fe"),
    ],
)  # fmt: skip
def test_errors_have_a_status_a_code_and_a_hint(
    server: Called, request_fields: Any, status: Any, code: str, param: str | None
) -> None:
    found, message, trailing = refused(server.call(**request_fields))
    assert (found, trailing["x-tripool-code"], trailing.get("x-tripool-param")) == (status, code, param), message
    assert trailing.get("x-tripool-hint", "")[:20] in message and trailing["x-request-id"]
    assert not server.engine.added


def test_odd_bytes(server: Called) -> None:
    draw = random.Random(7)
    valid = GenerateRequest(chat=HELLO, sampling={"max_tokens": 1, "stop": ["é"]}).SerializeToString()
    odd = [b"\xff", b"\x1a\x02\xed\xa0", b"\x1a\x03\xed\xa0\x80", valid[:-1], valid + b"\xf2\x3f\x01a"]
    for _ in range(60):
        mutated = bytearray(valid)
        for _ in range(draw.randint(1, 4)):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        odd.append(bytes(mutated))
    refusals = 0
    for raw in odd:
        try:
            assert list(server.send(raw))[-1].usage.completion_tokens
        except grpc.RpcError as error:
            failed: Any = error
            assert failed.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), (raw, failed.code(), failed.details())
            refusals += 1
    assert refusals > 20
    for raw in odd[:5]:
        assert refused(server.send(raw))[2]["x-tripool-code"] == "invalid_request"


def test_large_messages(server: Called) -> None:
    status, _, trailing = refused(server.call(prompt="a" * 2**20))
    assert (status, trailing["x-tripool-code"]) == (Code.RESOURCE_EXHAUSTED, "request_too_large")
    assert refused(server.call(prompt="a" * 2**22))[0] == Code.RESOURCE_EXHAUSTED


def test_no_message_at_all_and_one_that_never_comes(server: Called) -> None:
    generate = server.channel.stream_stream(GENERATE)
    assert refused(generate(iter(()), timeout=DEADLINE_S))[0] == Code.INVALID_ARGUMENT

    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(DEADLINE_S)
        yield from ()

    assert refused(generate(never(), timeout=0.2))[0] == Code.DEADLINE_EXCEEDED
    over.set()


def test_what_is_no_grpc(server: Called) -> None:
    host, _, port = server.address.rpartition(":")
    for sent in (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01" + bytes(200), random.Random(1).randbytes(999)):
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as line:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            while line.recv(4096):
                pass
    assert server.ask(prompt="a", sampling={"max_tokens": 1})


def test_paths_of_calls_do_not_exist_over_http(server: Called) -> None:
    for path in (GENERATE, REFLECT):
        assert server.http.post(path, content=b"", headers={"content-type": "application/json"}).status_code == 404


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_middle_ends_the_call_with_its_status() -> None:
    engine = GatedEngine(free_steps=3)
    with calling(engine) as called:
        call = called.call(prompt="a", sampling={"ignore_eos": True})
        assert next(call).token_ids
        engine.fails.set()
        engine.in_flight.set()
        status, message, trailing = refused(call)
        assert status in (Code.INTERNAL, Code.UNAVAILABLE), message
        assert trailing["x-tripool-code"]


# ---- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "deadline", "close"])
def test_a_call_that_ends_early_frees_the_engine(way: str) -> None:
    engine = WatchedEngine(context_tokens=10**9)
    with calling(engine) as called, grpc.insecure_channel(called.address) as channel:
        other = Called(engine, called.http, called.address, channel)
        call = other.call(prompt="a", sampling={"ignore_eos": True}, timeout=1.0 if way == "deadline" else DEADLINE_S)
        assert next(call).token_ids
        if way == "cancel":
            call.cancel()
        elif way == "close":
            channel.close()
        else:
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() == Code.DEADLINE_EXCEEDED
        assert engine.wait_idle()
        assert called.ask(prompt="a", sampling={"max_tokens": 1})


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    engine = WatchedEngine(context_tokens=10**9)
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]  # what the client buffers unread
    with (
        calling(engine, limits=ConnectionLimits(take_s=0.2)) as called,
        grpc.insecure_channel(called.address, options=small) as channel,
    ):
        call = Called(engine, called.http, called.address, channel).call(prompt="a", sampling={"ignore_eos": True})
        assert next(call).token_ids
        assert engine.wait_idle(), "the engine went on for a client that reads nothing"
        status, _, trailing = refused(call)
        assert (status, trailing["x-tripool-code"]) == (Code.DEADLINE_EXCEEDED, "slow_reader")


def test_draining(server: Called) -> None:
    health = health_pb2_grpc.HealthStub(server.channel)
    asked = health_pb2.HealthCheckRequest(service="tripool.v1.Generation")
    assert health.Check(asked, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.SERVING
    server.http.post("/drain").raise_for_status()
    try:
        assert health.Check(asked, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status, _, trailing = refused(server.call(prompt="a"))
        assert (status, trailing["x-tripool-code"], trailing["retry-after"]) == (Code.UNAVAILABLE, "draining", "5")
    finally:
        server.http.delete("/drain").raise_for_status()
    with pytest.raises(grpc.RpcError) as raised:
        health.Check(health_pb2.HealthCheckRequest(service="no"), timeout=DEADLINE_S)
    assert raised.value.code() == Code.NOT_FOUND


def own(key: str) -> Any:
    return [("authorization", f"Bearer {key}")]


# ---- keys and reflection -----------------------------------------------------------------------------------------


def test_reflection_shows_the_proto(server: Called) -> None:
    database = ProtoReflectionDescriptorDatabase(server.channel)
    assert "tripool.v1.Generation" in database.get_services()
    found = database.FindFileContainingSymbol("tripool.v1.Generation")
    assert found.service[0].method[0].server_streaming and not found.service[0].method[0].client_streaming


def test_a_tenant_has_its_share_of_calls(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys.db", "ann", "bob")
    engine = GatedEngine()
    access = Access(KeyWatcher(tmp_path / "keys.db", may_be_open=False), UsageLog(tmp_path / "keys.db"))
    with closing(access), calling(engine, access=access) as called, ExitStack() as channels:
        calls: list[Any] = []
        ended: queue.Queue[Any] = queue.Queue()
        for number in range(150):
            if number % 50 == 0:  # of connections of their own
                own_pool = [("grpc.use_local_subchannel_pool", 1)]
                channel = channels.enter_context(grpc.insecure_channel(called.address, options=own_pool))
                other = Called(engine, called.http, called.address, channel)
            call = other.call(prompt="a", sampling={"max_tokens": 1}, metadata=own(keys["ann"]))
            call.add_done_callback(partial(ended.put, call))
            calls.append(call)
        status, _, trailing = refused(ended.get(timeout=DEADLINE_S))
        assert (status, trailing["x-tripool-code"]) == (Code.RESOURCE_EXHAUSTED, "tenant_connections")
        asked = called.call(prompt="a", sampling={"max_tokens": 1}, metadata=own(keys["bob"]))
        engine.in_flight.set()
        assert list(asked)
        for call in calls:
            call.cancel()


def test_every_call_has_its_line_in_the_log(server: Called, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tripool.gateway"):
        server.ask(prompt="a", sampling={"max_tokens": 2})
        refused(server.call())
    lines = [record.__dict__ for record in caplog.records if record.message == "request"]
    assert [(line["route"], line["status"], line["error"]) for line in lines] == [
        (GENERATE, 200, None),
        (GENERATE, 400, "invalid_request"),
    ]
    assert lines[0]["completion_tokens"] == 2


def test_keys_limits_usage_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    keys = make_keys(path, "admin", "ann") | make_keys(path, "bob", settings={"rpm": 1})
    usage_log = UsageLog(path)
    access = Access(KeyWatcher(path, may_be_open=False), usage_log)
    with closing(access), calling(access=access) as called:

        def call(key: str | None) -> Any:
            return called.call(prompt="a", sampling={"max_tokens": 2}, metadata=own(key) if key else ())

        for key in (None, "tp-no"):
            status, _, trailing = refused(call(key))
            assert (status, trailing["x-tripool-code"]) == (Code.UNAUTHENTICATED, "invalid_api_key")
        assert list(call(keys["ann"])) and list(call(keys["bob"]))
        status, _, trailing = refused(call(keys["bob"]))
        assert (status, trailing["x-tripool-code"]) == (Code.RESOURCE_EXHAUSTED, "rate_limited")
        assert int(trailing["retry-after"]) > 0
        health = health_pb2_grpc.HealthStub(called.channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(called.channel).ServerReflectionInfo
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        assert refused(reflect(iter([asked]), timeout=DEADLINE_S))[0] == Code.UNAUTHENTICATED
        assert next(
            reflect(iter([asked]), timeout=DEADLINE_S, metadata=own(keys["ann"]))
        ).list_services_response.service
        scraped = called.http.get("/metrics", headers=bearer(keys["admin"])).text
        assert 'code="invalid_api_key"' in scraped and 'code="rate_limited"' in scraped
        usage_log.flush()
        with KeyStore(path) as key_store:
            used = {row["tenant"]: row for row in read_usage(key_store, by="tenant")}
    assert {name: (row["requests"], row["completion_tokens"]) for name, row in used.items()} == {
        "ann": (1, 2),
        "bob": (1, 2),
    }
