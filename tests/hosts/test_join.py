"""Twelve ways to start a worker wrongly: each is named with its remedy, soon; and what a right start brings along."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tripool
from hosts.in_process import TOKEN, Running, host_server
from tripool.config import EngineConfig
from tripool.hosts import connection as connections
from tripool.hosts import join as module
from tripool.hosts.connection import answer, dial
from tripool.hosts.errors import HostError, JoinRefused
from tripool.hosts.join import address_towards, check_reach, join, listen_for_hosts
from tripool.hosts.keys import HostKeys
from tripool.hosts.leader import Leader, SharedModel, write_models
from tripool.hosts.models import files_of, identity_of
from tripool.hosts.wire import Join, Joined

KEYS = HostKeys(TOKEN)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 50_000)
    (folder / "notes.md").write_text("not a part of it")
    return folder


@pytest.fixture
def server(tmp_path: Path, model: Path) -> Iterator[Running]:
    with host_server(tmp_path / "a", models=[SharedModel("small", str(model), True, ("--no-mtp",))]) as running:
        yield running


def start(
    address: str, tmp_path: Path, *, keys: HostKeys = KEYS, model: str = "", path: str | None = None,
    local: Path | None = None,
) -> tuple[str, list[tuple[str, str]]]:  # fmt: skip
    """Where the worker's model is, and what was reported."""
    told: list[tuple[str, str]] = []
    found = join(
        address, keys, model=model, path=path, role="decode", folder=tmp_path / "fetched",
        report=lambda *step: told.append(step), locate=lambda name: local,
    )  # fmt: skip
    return found.model_path, told


def test_a_model_is_fetched_and_the_second_time_found(
    server: Running, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = start(server.address, tmp_path)
    assert [step for step, _ in told] == ["connect", "model", "fetch"]
    assert {file.name for file in Path(path).iterdir()} == {"config.json", "model.safetensors"}
    assert identity_of(files_of(Path(path))) == identity_of(files_of(model)), "by content, wherever it lies"
    monkeypatch.setattr(Leader, "read", lambda *_: pytest.fail("nothing is fetched again"))
    assert start(server.address, tmp_path)[0] == path


def test_a_model_that_is_here_is_not_fetched(server: Running, tmp_path: Path, model: Path) -> None:
    assert start(server.address, tmp_path, local=model) == ("small", [("connect", f"to {server.address}"),
                                                                      ("model", "small, as decode")])  # fmt: skip
    assert start(server.address, tmp_path, path=str(model))[0] == str(model)


def test_a_model_that_changes_while_it_is_fetched_is_refused(server: Running, tmp_path: Path, model: Path) -> None:
    start(server.address, tmp_path / "first")
    (model / "model.safetensors").write_bytes(bytes(256) * 50_000)
    with pytest.raises(JoinRefused, match=r"step 'fetch'.*not what the server announced"):
        start(server.address, tmp_path / "second")
    left = [file.name for file in (tmp_path / "second").rglob("*safetensors*")]
    assert left == [], "nothing half is left"


def test_a_model_that_is_one_file_is_called_as_on_the_server(tmp_path: Path) -> None:
    """A worker calls such a model by its file: under another name the server would not know it."""
    (tmp_path / "Small-Q4.gguf").write_bytes(b"GGUF" * 1000)
    model = SharedModel("small", str(tmp_path / "Small-Q4.gguf"), True, ())
    with host_server(tmp_path / "a", models=[model]) as running:
        path = Path(start(running.address, tmp_path)[0])
        assert (path.name, path.read_bytes()) == ("small.gguf", b"GGUF" * 1000)
        assert start(running.address, tmp_path)[0] == str(path)


class TestMisconfigured:
    def test_1_wrong_port(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with pytest.raises(HostError, match="step 'connect': nothing listens") as error:
            start(f"tcp://127.0.0.1:{port}", tmp_path)
        assert "--listen" in error.value.hint

    def test_2_the_port_of_the_http_server(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as http:
            threading.Thread(target=_answer_as_http, args=(http,), daemon=True).start()
            with pytest.raises(HostError, match=r"step 'greet'.*no host of Tripool") as error:
                start(f"tcp://127.0.0.1:{http.getsockname()[1]}", tmp_path)
        assert "not that of the HTTP server" in error.value.hint

    def test_3_wrong_token(self, server: Running, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="step 'authenticate'") as error:
            start(server.address, tmp_path, keys=HostKeys("another-token-of-some-length"))
        assert "copy the token" in error.value.hint

    def test_4_another_version(self, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        leader = Leader(server.folder)
        refused = leader.join(Join("0.0.1", "x", 0.0, "", "any"), "decode")
        assert (refused.step, "version 0.0.1" in refused.message) == ("version", True)  # type: ignore[union-attr]
        monkeypatch.setattr(module, "code_identity", lambda: "other code")
        with pytest.raises(HostError, match=r"step 'version'.*the same version with other code") as error:
            start(server.address, tmp_path)
        assert f"install the same build of tripool {tripool.__version__}" in error.value.hint

    def test_5_a_model_that_the_server_does_not_have(self, server: Running, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="step 'model': the server has no model 'large'") as error:
            start(server.address, tmp_path, model="large")
        assert "name one of small" in error.value.hint

    def test_6_a_local_copy_that_is_another_model(self, server: Running, tmp_path: Path) -> None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "config.json").write_text("{}")
        for path in (tmp_path / "small", tmp_path / "nowhere"):
            with pytest.raises(HostError, match="step 'model'") as error:
                start(server.address, tmp_path, path=str(path))
            assert "leave the path out" in error.value.hint

    def test_7_the_clock(self, server: Running, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = module.time.time
        monkeypatch.setattr(module.time, "time", lambda: real() + 3600)
        told: list[tuple[str, str]] = []
        module._compare_clocks(real(), real() + 3600, lambda *step: told.append(step))
        assert told[0][0] == "clock" and "3,600 s ahead" in told[0][1] and "time server" in told[0][1]
        assert start(server.address, tmp_path, local=model)[0] == "small", "told, and no reason to refuse"

    def test_8_an_address_that_no_packet_reaches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def dropped(*_: object) -> None:
            raise TimeoutError

        monkeypatch.setattr(connections.socket, "create_connection", dropped)
        with pytest.raises(HostError, match=r"step 'connect'.*does not answer within 3 s") as error:
            start("tcp://127.0.0.1:9", tmp_path)
        assert "firewall" in error.value.hint

    def test_9_a_name_that_nobody_has(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="step 'address'") as error:
            start("tcp://no-such-host.invalid:9100", tmp_path)
        assert "is the name right" in error.value.hint

    def test_10_a_firewall_in_one_direction(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Packets get there, and none comes back."""
        monkeypatch.setattr(connections, "GREET_S", 0.2)
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(HostError, match=r"step 'greet'.*says nothing") as error,
        ):
            start(f"tcp://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        assert "in one direction only" in error.value.hint

    def test_11_a_worker_that_the_server_cannot_reach(self, server: Running) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            own = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(HostError, match="step 'reach': the server cannot reach this host") as error:
            check_reach(server.address, KEYS, own, lambda *_: None)
        assert "firewall" in error.value.hint and "--listen" in error.value.hint and own[6:] in error.value.hint

    def test_12_encrypted_here_and_trusted_there(self, server: Running, tmp_path: Path) -> None:
        with pytest.raises(HostError, match=r"step 'greet'.*encrypted, those of this machine plain") as error:
            start(server.address, tmp_path, keys=HostKeys(TOKEN, trusted=True))
        assert "leave out --trusted-network" in error.value.hint

    def test_13_an_address_that_is_not_this_machines(self) -> None:
        with pytest.raises(HostError, match="step 'listen'") as error:
            listen_for_hosts("192.0.2.7:0")
        assert "an address of this machine" in error.value.hint

    def test_14_no_room_for_the_model(self, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tripool.hosts import models

        monkeypatch.setattr(models.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
        with pytest.raises(HostError, match="step 'fetch': no room for 12 MiB of 'small'") as error:
            start(server.address, tmp_path)
        assert "free some space" in error.value.hint


def test_the_server_reaches_a_host_that_answers(server: Running) -> None:
    told: list[tuple[str, str]] = []
    with listen_for_hosts("127.0.0.1:0") as listener:

        def once() -> None:
            end, _ = listener.accept()
            answer(end, KEYS).close()

        thread = threading.Thread(target=once, daemon=True)
        thread.start()
        check_reach(server.address, KEYS, f"tcp://127.0.0.1:{listener.getsockname()[1]}", lambda *s: told.append(s))
        thread.join(10)
    assert told[0][0] == "reach"


def test_a_server_that_still_reads_its_model_is_asked_again(
    server: Running, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = server.server._leader
    assert leader is not None
    leader._read_all.join(30)
    files, told = leader._files.copy(), []
    leader._files.clear()

    def report(step: str, what: str) -> None:
        told.append(step)
        if step == "wait":
            leader._files.update(files)

    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    found = join(
        server.address, KEYS, model="", path=None, role="decode", folder=tmp_path / "fetched", report=report,
        locate=lambda name: model,
    )  # fmt: skip
    assert (told, found.model_path) == (["connect", "wait", "model"], "small")


def test_a_folder_that_cannot_be_written_is_named(server: Running, tmp_path: Path) -> None:
    (tmp_path / "fetched").write_text("a file where a folder should be")
    with pytest.raises(HostError, match="step 'fetch': cannot write to") as error:
        start(server.address, tmp_path)
    assert "XDG_CACHE_HOME" in error.value.hint


@pytest.mark.parametrize(("options", "path"), [(("--role",), "fake"), (("--kv-gb", "/x"), "fake"), ((), "/etc/passwd")])
def test_a_server_that_asks_for_what_none_asks_for_is_refused(options: tuple[str, ...], path: str) -> None:
    """What it says becomes a command line here."""
    from tripool.serving.hosts import _check_options, engine_argv

    argv = engine_argv(EngineConfig(step_tokens=64, exact=True))
    good = Joined("fake", "", (), "decode", argv, 0.0, "fake:blocks=64")
    _check_options(good)
    with pytest.raises(JoinRefused, match="what no server asks for"):
        _check_options(Joined("fake", "", (), "decode", options, 0.0, path))


def test_one_joins_at_the_server_and_not_at_a_host_that_joined(server: Running, tmp_path: Path) -> None:
    server.server._leader = None
    with pytest.raises(JoinRefused, match="has joined a server itself"):
        start(server.address, tmp_path)


def test_files_that_no_model_has_are_not_given(server: Running, model: Path) -> None:
    from tripool.hosts.wire import ANSWERS, No, ReadFile

    assert server.server._leader is not None
    server.server._leader._read_all.join(30)
    (model / "secret.json").write_text("later than the server's start")
    connection = dial(server.address, KEYS)
    connection.send(ReadFile("small", "config.json", 0, 8))
    connection.receive(ANSWERS)
    connection.read_into(memoryview(bytearray(8)))
    for name in ("secret.json", "notes.md", "..", "model.safetensors.index.json"):
        connection.send(ReadFile("small", name, 0, 8))
        assert isinstance(connection.receive(ANSWERS), No), name
    connection.close()


def test_the_way_to_another_machine_begins_at_ones_own_address() -> None:
    assert address_towards("tcp://127.0.0.1:9") == "127.0.0.1"


def test_a_model_without_files_needs_none(tmp_path: Path) -> None:
    write_models(tmp_path, (SharedModel("fake", "fake:blocks=64", False, ()),))
    with host_server(tmp_path / "a", models=[SharedModel("fake", "fake:blocks=64", False, ())]) as running:
        assert start(running.address, tmp_path)[0] == "fake:blocks=64"


def _answer_as_http(listener: socket.socket) -> None:
    end, _ = listener.accept()
    with end:
        end.recv(48)
        end.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n" + b"x" * 10)
