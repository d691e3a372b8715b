"""gRPC of a split server, also of the gateway that follows a killed one: both listen at the same address."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import Any

import pytest

from .serving import DEADLINE_S, split_server

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_health")
pytest.importorskip("grpc_reflection")


@pytest.mark.prove
def test_calls_are_answered_before_and_after_the_gateway_is_killed() -> None:
    from tripool.gateway.grpc import GENERATE
    from tripool.gateway.grpc.messages import GenerateReply, GenerateRequest
    from tripool.gateway.grpc.port import reserved

    with reserved("127.0.0.1", 0) as free:
        assert free is not None
    options = ("--grpc-port", free.rpartition(":")[2])
    with split_server("fake:step_ms=5", options=options) as server, closing(grpc.insecure_channel(free)) as channel:
        generate = channel.unary_stream(GENERATE, GenerateRequest.SerializeToString, GenerateReply.FromString)

        def ask(num_tokens: int) -> Any:
            request = GenerateRequest(prompt="a", sampling={"max_tokens": num_tokens, "ignore_eos": True})
            return generate(request, timeout=DEADLINE_S, wait_for_ready=True)

        assert list(ask(4))[-1].usage.completion_tokens == 4
        call = ask(1000)
        assert next(call).token_ids
        os.kill(server.child("gateway"), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert list(ask(4))[-1].usage.completion_tokens == 4
        server.wait_idle(2)
