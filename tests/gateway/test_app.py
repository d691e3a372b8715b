"""Routes that give no answer, and refusals of routes."""

from __future__ import annotations

import openai
import pytest

from tripool import __version__
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION


def test_models(server):
    (model,) = server.openai.models.list().data
    assert model.id == "fake"
    assert server.openai.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.openai.models.retrieve("other")


def test_health_and_version(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": __version__}


def test_openapi_lists_every_parameter(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/messages": ANTHROPIC}
    for path, fields in bodies.items():
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["properties"].keys() >= {*fields.known, *fields.ignored}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_unknown_routes_have_the_same_shape(server, check_refusal, method, path, status):
    check_refusal(server.http.request(method, path), None, status)
