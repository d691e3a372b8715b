"""A gRPC client made from tripool.proto by grpcio-tools, as docs/http.md says."""

import json
import os
import sys
import tempfile
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_tools import protoc
from steps import AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, PERSON, WEATHER, raises, step

SOURCE = Path(os.environ["TRIPOOL_SOURCE"]) / "gateway" / "grpc"
MADE = tempfile.mkdtemp(prefix="client-")
assert not protoc.main(["", f"-I{SOURCE}", f"--python_out={MADE}", f"--grpc_python_out={MADE}", "tripool.proto"])
sys.path.insert(0, MADE)

import tripool_pb2 as pb  # noqa: E402
import tripool_pb2_grpc  # noqa: E402

channel = grpc.insecure_channel(os.environ["TRIPOOL_GRPC"])
generate = tripool_pb2_grpc.GenerationStub(channel).Generate
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": TOOL}}])
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMAT = json.dumps({"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}})


def ask(*messages: pb.Message, model: str = MODEL, **more: str) -> list[pb.GenerateReply]:
    return list(generate(pb.GenerateRequest(model=model, chat=pb.Chat(messages=messages), **more), timeout=60))


def user(text: str) -> pb.Message:
    return pb.Message(role="user", content=text)


def text_of(replies: list[pb.GenerateReply]) -> str:
    return "".join(reply.text for reply in replies)


@step("quick start")
def _() -> None:
    asked = health_pb2.HealthCheckRequest()
    assert health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    assert text_of(ask(user(ASK_HELLO))) == HELLO


@step("streaming")
def _() -> None:
    replies = ask(user(ASK_HELLO))
    assert sum(bool(reply.text) for reply in replies) > 1 and replies[-1].usage.completion_tokens


@step("tools")
def _() -> None:
    replies = ask(user(ASK_WEATHER), tools_json=TOOLS)
    pieces = [piece for reply in replies for piece in reply.tool_calls]
    arguments = "".join(piece.arguments for piece in pieces)
    assert pieces[0].name == "get_weather" and json.loads(arguments) == {"city": "Bern"}
    call = pb.ToolCall(id=pieces[0].id, name=pieces[0].name, arguments=arguments)
    said = pb.Message(role="assistant", tool_calls=[call])
    result = pb.Message(role="tool", tool_call_id=call.id, content="18 degrees")
    assert text_of(ask(user(ASK_WEATHER), said, result, tools_json=TOOLS)) == WEATHER


@step("structured output")
def _() -> None:
    assert json.loads(text_of(ask(user(ASK_PERSON), response_format_json=FORMAT))) == PERSON


@step("error")
def _() -> None:
    raises(grpc.RpcError, lambda: ask(user("x"), model="no"), "NOT_FOUND", "no model")


@step("second turn")
def _() -> None:
    said = pb.Message(role="assistant", content=HELLO)
    assert text_of(ask(user(ASK_HELLO), said, user(ASK_AGAIN))) == AGAIN
