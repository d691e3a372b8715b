"""What is no message between gateways and coordinator raises DecodeError and nothing else; others arrive whole."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from tripool.core import Request, SamplingParams, TokenEvent
from tripool.errors import NoWorkers, Overloaded, RateLimited, TripoolError
from tripool.fabric.gateway_wire import (
    Events,
    Failed,
    Follow,
    GatewayHello,
    Leads,
    Log,
    Query,
    Resume,
    Submit,
    read_from_gateway,
    read_to_gateway,
    read_to_standby,
)
from tripool.messages import PROTOCOL, WireError, WorkerId, encode
from tripool.router.held import Held, HeldChoice
from tripool.router.replica import Level, Record, Trouble
from tripool.tenants import Limits, Tenant

TENANT = Tenant(name="t", namespace="t\x1fu", limits=Limits(requests_per_minute=3, weight=2.0))
REQUEST = Request(id="r", prompt_ids=(1, 2), params=SamplingParams(n=2, logit_bias={3: 1.5}), seed=7)
FROM_GATEWAY = (
    GatewayHello(PROTOCOL, WorkerId("gateway", 3)),
    Submit("m", (REQUEST,), TENANT),
    Resume("m", REQUEST, TENANT, Held((HeldChoice((1, 2), num_draft_tokens=1), HeldChoice((), "stop")), 1)),
    Query(1, "enter", TENANT),
    Follow(PROTOCOL, WorkerId("coordinator", 2)),
)
TO_GATEWAY = (Events((TokenEvent("r", 0, 0, 5, "stop"),)), Failed("r", WireError("overloaded", "full", "later", 2.0)))
TO_STANDBY = (Leads(12, 4), Log(Record((Level("t", "tokens", 60.0, -1.5, 3.0),), (), (Trouble("r", 2, 1),))))


@pytest.mark.parametrize("message", [*FROM_GATEWAY, *TO_GATEWAY, *TO_STANDBY], ids=lambda m: type(m).__name__)
def test_a_message_arrives_whole(message: msgspec.Struct) -> None:
    data = encode(message)
    if message in FROM_GATEWAY:
        assert read_from_gateway(b"", data) == message
    else:
        assert (read_to_gateway if message in TO_GATEWAY else read_to_standby)(data) == message


def test_what_is_no_message_is_an_error_of_one_kind() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        data = bytearray(encode(rng.choice(FROM_GATEWAY)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(msgspec.DecodeError):
            read_from_gateway(b"", bytes(data[: rng.randint(1, len(data))]))


@pytest.mark.parametrize("error", [RateLimited("too many", retry_after_s=7.5), Overloaded("full"), NoWorkers("x")])
def test_an_error_keeps_its_kind_and_when_to_come_again(error: TripoolError) -> None:
    again = WireError.of(error).error()
    assert (type(again), str(again), again.retry_after_s) == (type(error), str(error), error.retry_after_s)
