"""Files and batches over HTTP with the real OpenAI client, over a fake engine."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from gateway.serving import GatedEngine, WatchedEngine, running_server
from tenants.serving import bearer, guarded_server, make_keys

DEADLINE_S = 60.0
CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "Hello", endpoint: str = CHAT, **body: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "seed": 1} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body})


def ended(client: OpenAI, batch_id: str) -> Batch:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        assert time.monotonic() < deadline_s, f"still {batch.status}"


def run(client: OpenAI, text: str, endpoint: Any = CHAT) -> Batch:
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    assert batch.status == "validating"
    return ended(client, batch.id)


def entries(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_each_line_is_answered_once_and_as_if_it_were_sent_alone(tmp_path: Path) -> None:
    with running_server(batch_dir=str(tmp_path)) as server:
        texts = {f"line-{number}": f"Question {number}" for number in range(40)}
        batch = run(server.openai, "\n".join(line(name, text) for name, text in texts.items()) + "\n\n")
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts is not None and batch.request_counts.completed == batch.request_counts.total == 40
        found = entries(server.openai, batch.output_file_id)
        assert [one["custom_id"] for one in found] == list(texts)
        alone = server.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Question 7"}], max_tokens=5, seed=1
        )
        answered = found[7]["response"]
        assert answered["status_code"] == 200 and answered["body"]["choices"][0]["message"]["content"] == (
            alone.choices[0].message.content
        )
        assert found[7]["error"] is None and answered["body"]["usage"]["completion_tokens"] == 5


def test_a_line_that_cannot_be_answered_is_in_the_error_file(tmp_path: Path) -> None:
    with running_server(batch_dir=str(tmp_path)) as server:
        text = "\n".join([line("good"), line("bad", temperature=-1), line("flow", stream=True), line("late")])
        batch = run(server.openai, text)
        assert batch.status == "completed" and batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
        assert [one["custom_id"] for one in entries(server.openai, batch.output_file_id)] == ["good", "late"]
        bad, flow = entries(server.openai, batch.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert flow["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("", "empty_file", None),
        ("{", "invalid_json_line", 1),
        (line("a") + "\n[]", "invalid_json_line", 2),
        (line("a") + "\n" + line("a"), "duplicate_custom_id", 2),
        (line("a", endpoint="/v1/completions"), "mismatched_url", 1),
        (line("").replace("POST", "GET"), "invalid_custom_id", 1),
        (line("a").replace("POST", "GET"), "invalid_method", 1),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": []}', "invalid_body", 1),
    ],
)
def test_a_file_with_a_bad_line_is_refused_with_its_number(
    tmp_path: Path, text: str, code: str, number: int | None
) -> None:
    with running_server(batch_dir=str(tmp_path)) as server:
        batch = run(server.openai, text)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
        assert not server.engine.added


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_endpoint_has_batches(tmp_path: Path, endpoint: str) -> None:
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    }
    asked = {"custom_id": "a", "method": "POST", "url": endpoint, "body": bodies[endpoint]}
    with running_server(batch_dir=str(tmp_path)) as server:
        batch = run(server.openai, json.dumps(asked), endpoint)
        (entry,) = entries(server.openai, batch.output_file_id)
        assert entry["response"]["body"]["usage"]


def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    with running_server(batch_dir=str(tmp_path)) as server:
        client = server.openai
        made = [client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in (1, 2, 3)]
        assert [file.id for file in client.files.list()] == [file.id for file in reversed(made)]
        assert [file.bytes for file in client.files.list(order="asc")] == [1, 2, 3]
        assert client.files.retrieve(made[1].id).filename == "2.jsonl"
        assert client.files.content(made[1].id).read() == b"xx"
        assert client.files.delete(made[1].id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made[1].id)
        assert {path.name for path in (tmp_path / "files").iterdir()} == {made[0].id, made[2].id}


def test_what_is_no_upload_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with running_server(batch_dir=str(tmp_path)) as server:
        http = server.http
        assert http.post("/v1/files", content=b"x").status_code == 400
        assert http.post("/v1/files", data={"purpose": "batch"}).status_code == 400
        assert http.post("/v1/files", files={"file": b"x"}, data={"purpose": "vision"}).status_code == 400
        cut = {"content-type": "multipart/form-data; boundary=b"}
        body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc'
        assert http.post("/v1/files", content=body, headers=cut).status_code == 400
        assert list((tmp_path / "files").iterdir()) == []


def test_without_a_folder_there_are_no_batches() -> None:
    with running_server() as server:
        refused = server.http.get("/v1/batches")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "batches_off"


def test_a_second_server_may_not_use_the_same_folder(tmp_path: Path) -> None:
    from tripool.batch.types import StoreFailed

    with (
        running_server(batch_dir=str(tmp_path)),
        pytest.raises(StoreFailed, match="another server"),
        running_server(batch_dir=str(tmp_path)),
    ):
        pass


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    engine = GatedEngine()
    with running_server(engine=engine, batch_dir=str(tmp_path)) as server:
        client = server.openai
        file = client.files.create(file=("in", line("a", max_tokens=3).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert engine.wait_busy()
        with pytest.raises(openai.ConflictError):
            client.files.delete(file.id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        engine.in_flight.set()
        batch = ended(client, batch.id)
        assert batch.status == "cancelled" and engine.wait_idle()
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
        client.files.delete(file.id)


def test_an_online_request_goes_first(tmp_path: Path) -> None:
    """While a batch fills every slot, a request is answered before any line that has not run."""
    engine = WatchedEngine(max_running=4)
    with running_server(engine=engine, batch_dir=str(tmp_path)) as server:
        client = server.openai
        text = "\n".join(line(str(number), max_tokens=400) for number in range(50))
        file = client.files.create(file=("in", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert engine.wait_busy()
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=20)
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None and counts.completed < 50
        done = ended(client, batch.id)
        assert done.request_counts is not None and done.request_counts.completed == 50


def test_tenants_see_only_their_own(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys.db", "alice", "bob", "admin")
    with guarded_server(tmp_path / "keys.db", batch_dir=str(tmp_path / "batches")) as server:
        alice, bob = (
            OpenAI(base_url=f"{server.url}/v1", api_key=keys[name], max_retries=0) for name in ("alice", "bob")
        )
        with alice, bob:
            batch = run(alice, line("a", "a secret"))
            ids = [batch.input_file_id, str(batch.output_file_id)]
            for one in ids:
                for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        call(one)
                with pytest.raises(openai.NotFoundError):
                    bob.batches.create(input_file_id=one, endpoint=CHAT, completion_window="24h")
            for look in (bob.batches.retrieve, bob.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    look(batch.id)
            assert list(bob.files.list()) == list(bob.batches.list()) == []
            assert len(list(alice.batches.list())) == 1
        assert httpx.get(f"{server.url}/v1/files").status_code == 401
        assert server.http.get("/v1/files", headers=bearer(keys["admin"])).json()["data"] == []


def test_what_is_open_goes_on_after_a_restart(tmp_path: Path) -> None:
    engine = GatedEngine(free_steps=30)
    with running_server(engine=engine, batch_dir=str(tmp_path)) as server:
        client = server.openai
        text = "\n".join(line(str(number), max_tokens=2) for number in range(300))
        file = client.files.create(file=("in", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while not (client.batches.retrieve(batch.id).request_counts or batch).completed > 0:  # type: ignore[union-attr]
            pass
        threading.Timer(0.0, engine.in_flight.set).start()
    with running_server(batch_dir=str(tmp_path)) as server:
        done = ended(server.openai, batch.id)
        assert done.status == "completed"
        found = entries(server.openai, done.output_file_id)
        assert [one["custom_id"] for one in found] == [str(number) for number in range(300)]
