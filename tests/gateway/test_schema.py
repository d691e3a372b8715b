"""Schemathesis reads the OpenAPI page and tries to break what it describes: no 5xx, no open request afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from gateway.serving import DEADLINE_S, WatchedEngine
from tripool.config import GatewayConfig
from tripool.engine.thread import EngineThread
from tripool.gateway import create_models_app
from tripool.gateway.models import Models, Served
from tripool.text import Tokenizer

ENGINE = WatchedEngine()
THREAD = EngineThread(ENGINE)
APP = create_models_app(Models([Served(ENGINE.name, THREAD, Tokenizer(ENGINE.text))]), GatewayConfig())
# Draining is what /drain is for: afterwards every request would be refused with a 503, as it should be.
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP).exclude(path="/drain")
QUICK = settings(
    max_examples=5, derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
LONG = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert ENGINE.wait_idle(), "requests stayed open in the engine"
    assert THREAD.alive


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    assert THREAD.close(DEADLINE_S)
    assert ENGINE.added, "no case was good enough to reach the engine"


@SCHEMA.parametrize()
@QUICK
def test_nothing_described_breaks_it(case):
    case.call_and_validate(checks=[not_a_server_error])


@pytest.mark.prove
@SCHEMA.parametrize()
@LONG
def test_nothing_described_breaks_it_at_length(case):
    case.call_and_validate(checks=[not_a_server_error])
