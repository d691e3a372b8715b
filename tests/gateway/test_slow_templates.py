"""A chat template that does much, of a short body: the event loop does not wait for it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from gateway.serving import WatchedEngine
from tripool.engine.fake import fake_text
from tripool.text.template import Template

SLOW = "{% for i in range(30000) %}{% endfor %}{{ messages[0].content }}"
LONG = "{{ 'hello ' * 5000 }}{{ messages[0].content }}"


@pytest.mark.parametrize(("source", "place"), [(SLOW, "reading"), (LONG, "reading"), (None, "loop")])
def test_short_bodies_are_rendered_without_blocking_others(serve, monkeypatch, source, place):
    done_in: list[str] = []
    render = Template.render

    def watched(self: Template, *args: Any, **kwargs: Any) -> str:
        said = render(self, *args, **kwargs)
        done_in.append("reading" if threading.current_thread().name.startswith("tripool-reading") else "loop")
        return said

    monkeypatch.setattr(Template, "render", watched)
    text = fake_text() if source is None else replace(fake_text(), chat_template=source)
    with serve(engine=WatchedEngine(text=text, context_tokens=10**6)) as served:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    assert done_in == [place]
