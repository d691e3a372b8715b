"""What servers of one process and of several write to their logs, asked everything by clients that hide words in it.

No such word may be in the log, nor any key; every request has one line; every line can be read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tripool.cli.main import main

DEADLINE_S = 120.0
BIRD = "kanarienvogel"
COMPLETIONS = "/v1/completions"
SPLIT = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
ONE = """
import sys
from tripool.cli.main import main
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.tokens import TokenService

def fail(self, body):
    raise ValueError(body)

class Fragile(PagedFake):
    def add(self, request):
        super().add(request)
        self.said = request if request.params.max_tokens == 666 else None
    def step(self):
        if self.said is not None:
            raise RuntimeError(f"kanarienvogel {self.said}")
        return super().step()

TokenService.detokenize = fail
main(sys.argv[1:], lambda model, config: Fragile(fake_text(), context_tokens=10**9))
"""


class Server:
    """`sent`: the status that each request must have in the log, by its route."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self.url, self.keys = url, keys
        self.sent: Counter[tuple[str, int]] = Counter()
        self.answers: list[str] = []
        self.http = httpx.Client(base_url=url, timeout=DEADLINE_S, limits=httpx.Limits(max_keepalive_connections=0))

    def ask(self, path: str, body: Any = None, *, who: str | None = "alice", route: str = "", **options: Any) -> int:
        headers = {"authorization": f"Bearer {self.keys.get(who, who)}"} if who else {}
        headers |= options.pop("headers", {})
        method = options.pop("method", "GET" if body is None else "POST")
        answer = self.http.request(method, path, json=body, headers=headers, **options)
        self.sent[route or path, answer.status_code] += 1
        self.answers.append(answer.text)
        return answer.status_code

    def raw(self, data: str, *, answered: bool = True) -> bytes:
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as client:
            client.sendall(data.encode("latin-1"))
            return client.recv(65536) if answered else b""


@contextmanager
def serving(code: str, *argv: str, keys: dict[str, str], log: Path) -> Iterator[Server]:
    """Until its end, when the whole log is written."""
    with (
        log.open("w") as stderr,
        subprocess.Popen([sys.executable, "-c", code, *argv], stdout=-1, stderr=stderr, text=True) as running,
    ):
        watchdog = threading.Timer(DEADLINE_S, running.kill)
        watchdog.start()
        try:
            banner = ""
            while "Ctrl-C" not in banner:
                line = running.stdout.readline()
                assert line, log.read_text()
                banner += line
            server = Server(re.search(r"at (\S+)/v1", banner)[1], keys)
            with server.http:
                yield server
            running.send_signal(signal.SIGTERM)
            assert running.wait(DEADLINE_S) == 0
        finally:
            watchdog.cancel()
            running.kill()


@pytest.fixture
def keys(tripool: Callable[..., Any], tmp_path: Path) -> tuple[dict[str, str], str]:
    """Of tenants, by name, and the file they are in."""
    path = str(tmp_path / "keys.db")
    made = {}
    for name, *options in (["alice"], ["slow", "--rpm", "1"], ["boss", "--admin"]):
        made[name] = json.loads(tripool("keys", "add", name, *options, "--keys", path, "--json").out)["key"]
    return made, path


def ask_everything(server: Server) -> None:
    """Words hidden wherever a client can write."""
    ask, tools = server.ask, [{"type": "function", "function": {"name": "look", "description": BIRD, "parameters": {}}}]
    chat = [{"role": "system", "content": f"{BIRD} system"}, {"role": "user", "content": f"tell {BIRD} a tale"}]
    some = {"max_tokens": 3, "user": BIRD, "cache_salt": BIRD, "stop": [BIRD]}
    assert ask(COMPLETIONS, {"prompt": BIRD, **some}, headers={"x-request-id": "mine", "x-bird": BIRD}) == 200
    for key in server.keys.values():
        for named in (key, f"a{key}", f"sk{key}", f"Bearer={key[3:]}", key[3:]):
            assert ask("/tokenize", {"prompt": BIRD}, headers={"x-request-id": named}) == 200
            assert ask(COMPLETIONS, {"prompt": BIRD, "request_id": named, **some}) == 200
    assert ask(COMPLETIONS, {}, who=None, headers={"x-request-id": f"Bearer={server.keys['alice'][3:]}"}) == 401
    assert ask("/v1/chat/completions", {"messages": chat, "tools": tools, **some}) == 200
    assert ask("/v1/chat/completions", {"messages": chat, "stream": True, "max_tokens": 3}) == 200
    assert ask("/v1/messages", {"messages": chat[1:], "system": BIRD, "max_tokens": 3}) == 200
    assert ask("/tokenize", {"prompt": BIRD}) == 200
    schema = {"type": "json_schema", "json_schema": {"name": BIRD, "schema": {"type": BIRD}, "strict": True}}
    assert ask(COMPLETIONS, {"prompt": "x", "response_format": schema, "max_tokens": 3}) == 400
    assert ask(COMPLETIONS, {"prompt": BIRD, BIRD: BIRD}) == 400
    assert ask(COMPLETIONS, {"prompt": BIRD, "temperature": BIRD}) == 400
    assert ask(COMPLETIONS, {"prompt": BIRD, "request_id": f"{BIRD} {BIRD}"}) == 400
    assert ask("/v1/chat/completions", {"messages": [{"role": BIRD, "content": BIRD}]}) == 400
    ask("/v1/chat/completions", {"model": BIRD, "messages": chat, "max_tokens": 3})
    assert ask(COMPLETIONS, {"prompt": BIRD}, who=None) == 401
    assert ask(COMPLETIONS, {"prompt": BIRD}, who=f"tp-{BIRD}{BIRD}") == 401
    assert ask("/metrics") == 403
    assert ask(f"/v1/models/{BIRD}", route="/v1/models/*") == 404
    assert ask(f"/v1/models?api_key={BIRD}&key={server.keys['alice']}", route="/v1/models") == 200
    assert ask(f"/v1/{BIRD}%0d%0aforged/%E2%80%A8{BIRD}?{BIRD}", who="boss", route="/v1/*/*") == 404
    assert ask(COMPLETIONS, {"prompt": BIRD, "max_tokens": 2}, who="slow") == 200
    assert ask(COMPLETIONS, {"prompt": BIRD, "max_tokens": 2}, who="slow") == 429
    assert ask("/health", who=None) == 200
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: MTIzNDU2Nzg5MDEyMzQ1Ng==\r\n"
    upgrade += "sec-websocket-version: 13\r\n"
    key = f"x-api-key: {server.keys['boss']}\r\nx-request-id: {BIRD} forged\r\n"
    assert b" 404 " in server.raw(f"GET /{BIRD}?{BIRD} HTTP/1.1\r\nhost: {BIRD}\r\n{key}{upgrade}\r\n")
    server.sent["/*", 404] += 1
    server.raw(f"{BIRD} {BIRD} {BIRD}\r\n\r\n")  # no HTTP at all: the server's own line
    head = f"host: x\r\ncontent-type: application/json\r\nx-api-key: {server.keys['alice']}\r\n"
    cut = json.dumps({"prompt": BIRD, "max_tokens": 5})
    server.raw(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}content-length: 999\r\n\r\n{cut}", answered=False)
    server.sent[COMPLETIONS, 400] += 1


def knock(server: Server, number: int) -> None:
    """Without a key, which anybody can."""
    with ThreadPoolExecutor(4) as several:
        assert {*several.map(lambda _: server.http.get("/v1/models").status_code, range(number))} == {401}


def hang_up(server: Server) -> None:
    """In the middle of an answer."""
    body = {"prompt": BIRD, "stream": True, "ignore_eos": True, "max_tokens": 3000}
    headers = {"authorization": f"Bearer {server.keys['alice']}"}
    with server.http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
        next(answer.iter_lines())
    server.sent[COMPLETIONS, 200] += 1


def ask_until_said(server: Server, log: Path, words: str) -> None:
    """The key store is read on demand, and not each time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while f"the key store {words}" not in log.read_text():
        assert server.ask("/v1/models") == 200 and time.monotonic() < deadline_s


def check(server: Server, log: str, lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lines by message."""
    low = log.lower()
    for secret in (BIRD, BIRD[:6], BIRD[6:], "forged", *server.keys.values(), *(k[3:12] for k in server.keys.values())):
        assert secret.lower() not in low, next(line for line in log.splitlines() if secret.lower() in line.lower())
    for answer in server.answers:
        for text in re.findall(r'"(?:text|content)": ?"([^"]+)"', answer):
            assert " " not in text.strip() or text.strip() not in log  # (a word alone may be one of ours: "prefill")
    by_message: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_message.setdefault(line["message"], []).append(line)
    requests = [line for line in by_message["request"] if int(line["status"]) != 401]
    known = Counter({sent: number for sent, number in server.sent.items() if sent[1] != 401})
    assert Counter((line["route"], int(line["status"])) for line in requests) == known
    strangers = [line for line in by_message["request"] if int(line["status"]) == 401]
    assert {line["error"] for line in strangers} == {"invalid_api_key"}
    assert 3 <= len(strangers) < 50, "of what anyone can cause only a few are logged"
    mine = next(line for line in requests if line["request_id"] == "mine")
    assert (mine["tenant"], int(mine["prompt_tokens"]), mine["ended"]) == ("alice", len(BIRD), "finished")
    errors = {line["error"] for line in requests if int(line["status"]) in (401, 403, 429)}
    assert errors == {"admin_key_needed", "rate_limited"}
    assert [line["error"] for line in by_message["connection ended"]] == ["not_http"]
    return by_message


def read_text(line: str) -> dict[str, Any]:
    found = re.fullmatch(r'\S+Z (?:DEBUG|INFO|WARNING|ERROR) (\S+)\[\d+\] (".*"|[^"=]+?)((?: [a-z_]+=\S.*)?)', line)
    assert found, line
    fields = re.findall(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|\[.*?\]|\S+)', found[3])
    return {"process": found[1], "message": found[2], **fields_of(fields)}


def fields_of(found: list[tuple[str, str]]) -> dict[str, Any]:
    return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


@pytest.mark.parametrize("style", ["text", pytest.param("json", marks=pytest.mark.prove)])
def test_a_server_of_one_process(keys: tuple[dict[str, str], str], tmp_path: Path, style: str) -> None:
    log, (made, path) = tmp_path / "log", keys
    options = ("--keys", path, "--log-level", "debug", "--log-format", style)
    with serving(ONE, "serve", "fake", "--port", "0", *options, keys=made, log=log) as server:
        ask_everything(server)
        hang_up(server)
        knock(server, 200)
        assert server.ask("/detokenize", {"tokens": [1, 2], "user": BIRD}) in (400, 500)
        os.link(path, f"{path}.away")
        Path(f"{path}.bad").write_bytes(b"not a key store" * 1000)
        os.replace(f"{path}.bad", path)
        ask_until_said(server, log, "cannot be read")
        os.replace(f"{path}.away", path)
        ask_until_said(server, log, "is readable again")
        assert server.ask("/drain", who="boss", method="POST") == 200
        assert server.ask("/drain", who="boss", method="DELETE") == 200
        assert server.ask(COMPLETIONS, {"prompt": BIRD, "max_tokens": 666}) >= 500  # the engine fails on it
    lines = [json.loads(line) if style == "json" else read_text(line) for line in log.read_text().splitlines()]
    reported = check(server, log.read_text(), lines)
    assert {line["process"] for line in lines} == {"server"}
    assert [line["message"] for line in lines][:2] == ["start", "ready"] and lines[-1]["message"] == "stopped"
    assert reported["ready"][0]["keys"] == "needed"
    assert {"draining", "no longer draining", "stopping"} <= reported.keys()
    failed = next(line for line in reported["request"] if line["route"] == "/detokenize")
    assert failed["exception"] == "ValueError" and " fail" in str(failed["traceback"])
    assert "RuntimeError" in log.read_text()


def test_a_server_of_several_processes(keys: tuple[dict[str, str], str], tmp_path: Path) -> None:
    log, (made, path) = tmp_path / "log", keys
    options = ("--keys", path, "--log-level", "debug", "--log-format", "json", "--cache-gb", "0.001")
    with serving(SPLIT, "serve", "fake:step_ms=2", "--port", "0", *options, keys=made, log=log) as server:
        ask_everything(server)
        boss = {"authorization": f"Bearer {made['boss']}"}
        workers = server.http.get("/v1/pools", headers=boss).json()["workers"]
        server.sent["/v1/pools", 200] += 1
        (pid,) = [worker["pid"] for worker in workers if worker["role"] == "decode"]
        body = {"prompt": BIRD, "stream": True, "ignore_eos": True, "max_tokens": 500}
        headers = {"authorization": f"Bearer {made['alice']}"}
        with server.http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            parts = answer.iter_lines()
            # The first token is the prefill worker's; once there are some, the decode worker has it.
            for _ in range(20):
                next(parts)
            os.kill(pid, signal.SIGKILL)
            assert [part for part in parts if part][-1] == "data: [DONE]"
        server.sent[COMPLETIONS, 200] += 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    reported = check(server, log.read_text(), lines)
    names = {"supervisor", "gateway", "coordinator", "coordinator-1", "prefill-0", "decode-0", "cache-0", "cache-1"}
    assert {line["process"] for line in lines} == names
    assert {line["child"] for line in reported["process started"]} == names - {"supervisor"}
    (ended,) = reported["process ended"]
    assert (ended["child"], ended["child_pid"], ended["signal"]) == ("decode-0", pid, "SIGKILL")
    (lost,) = [line for line in reported["worker lost"] if line["epoch"] == ended["epoch"]]
    assert (lost["worker"], lost["placed_again"], lost["level"]) == ("decode-0", 1, "warning")
    assert [line["worker"] for line in reported["worker joined"]].count("decode-0") == 2
    assert (lines[-1]["process"], lines[-1]["message"]) == ("supervisor", "stopped")


def test_an_error_that_ends_it_is_a_line_like_all_others(capfd: pytest.CaptureFixture[str], models: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as exited:
        main(["serve", "fake", "--port", str(taken.getsockname()[1]), "--log-format", "json"], models.load)
    assert exited.value.code == 2
    started, stopped, ended = map(json.loads, capfd.readouterr().err.splitlines())
    assert (started["message"], stopped["message"]) == ("start", "stopped")
    assert (ended["message"], ended["error"], ended["level"]) == ("ended by an error", "cannot_listen", "error")
