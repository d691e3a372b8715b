"""A real server on a real socket over the fake engine; whatever a test does, nothing may stay open in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from gateway.serving import Serve, Served, running_server


@pytest.fixture
def serve() -> Serve:
    return running_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with running_server() as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    shared_server.engine.added.clear()
    yield shared_server
    assert shared_server.engine.wait_idle(), "requests stayed open in the engine"
    shared_server.wait_empty()
    assert shared_server.server.models.alive


@pytest.fixture
def check_refusal() -> Callable[..., None]:
    """OpenAI's shape of an error, and the parameter it is about."""

    def check(response: httpx.Response, param: str | None, status: int = 400) -> None:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert error["param"] == param

    return check
