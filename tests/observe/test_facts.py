"""The collector on this very machine, and on one with traces of dead runs."""

import http.server
import json
import os
import socket
import threading

import pytest
from typer.testing import CliRunner

from tripool.cli.main import create_cli
from tripool.config import GatewayConfig
from tripool.fabric.folder import RunFolder
from tripool.observe import check_machine, facts


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs and fetched models are looked for in folders of the test's own."""
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    runs.mkdir()
    monkeypatch.setattr(facts, "memory_folder", lambda: runs)
    monkeypatch.setattr(facts, "default_cache_dir", lambda: cache)
    return runs, cache


def die(folder: RunFolder) -> None:
    """As if every process of the run had been killed: the lock goes, the files stay."""
    os.close(folder.lock)


def test_this_machine_is_judged_without_a_failure(free_port):
    machine = facts.collect("tiny", GatewayConfig(port=free_port))
    assert machine.model.present and machine.model.error is None
    assert not machine.clock.backwards
    assert {p.name for p in machine.software.packages} >= {"torch", "msgspec", "uvicorn"}
    failed = [finding for finding in check_machine(machine) if finding.verdict == "fail"]
    assert not failed


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_what_a_model_will_take_is_what_it_takes(precision):
    from tripool.config import EngineConfig
    from tripool.engine.load import load_engine

    told = facts._model("tiny", precision)
    engine = load_engine("tiny", EngineConfig(precision=precision, threads=1))
    assert told.kv_bytes == engine.kv_bytes
    assert told.weight_bytes == pytest.approx(engine.weight_bytes, rel=0.15)


def test_a_model_that_is_not_there_says_so():
    told = facts._model("nowhere", "int8")
    assert "nowhere" in (told.error or "") and told.hint


def test_dead_runs_and_fetches_are_found_and_removed_and_live_ones_are_not(elsewhere):
    runs, cache = elsewhere
    dead, live = RunFolder(runs), RunFolder(runs)
    (dead.path / "arena").write_bytes(bytes(5000))
    die(dead)
    cut_off = cache / "smollm2" / "unfinished-x"
    cut_off.mkdir(parents=True)
    (cache / "smollm2" / "lock").touch()
    (runs / "tripool-of-somebody").mkdir()
    try:
        assert set(facts.leftovers()) == {dead.path, cut_off}
        assert set(facts.remove_leftovers()) == {dead.path, cut_off}
        assert live.path.is_dir() and (runs / "tripool-of-somebody").is_dir()
        assert facts.leftovers() == []
    finally:
        live.remove()


def test_fix_removes_and_json_is_for_programs(elsewhere, free_port):
    dead = RunFolder(elsewhere[0])
    die(dead)
    ask = ["doctor", "--port", str(free_port), "--json"]
    before = CliRunner().invoke(create_cli(), ask)
    assert before.exit_code == 0
    found = {row["name"]: row for row in json.loads(before.stdout)}
    assert found["leftovers"]["verdict"] == "warn" and str(dead.path) in found["leftovers"]["says"]
    after = CliRunner().invoke(create_cli(), [*ask, "--fix"])
    assert {row["name"]: row["verdict"] for row in json.loads(after.stdout)}["leftovers"] == "ok"
    assert not dead.path.exists()


def test_a_machine_that_cannot_serve_ends_with_1_and_says_why(free_port):
    done = CliRunner().invoke(create_cli(), ["doctor", "nowhere", "--port", str(free_port)])
    assert done.exit_code == 1
    assert "fail" in done.stdout and "nowhere" in done.stdout


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answers = {"/version": (200, {"version": "9"}), "/health/ready": (503, {"error": {"message": "draining"}})}
        status, body = answers.get(self.path, (404, {}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


def test_a_server_on_the_port_is_asked_how_it_is():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = facts._port("127.0.0.1", server.server_address[1])
        server.shutdown()
    assert (port.server, port.ready, port.says) == ("9", False, "draining")


def test_a_stranger_on_the_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        port = facts._port("127.0.0.1", server.getsockname()[1])
    assert port.server is None and f"(pid {os.getpid()})" in (port.holder or "")
