"""The port of gRPC, what happens without its packages, and that the compiled descriptor is that of the proto."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tripool
from tripool.gateway.server import CannotListen

FOLDER = Path(tripool.__file__).parent / "gateway" / "grpc"
BLOCKED = """
import sys

class NoGrpc:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grpc", "grpc_health", "grpc_reflection", "google"):
            raise ImportError("blocked here")

sys.meta_path.insert(0, NoGrpc())
"""


def test_everything_else_works_without_grpc() -> None:
    code = """
from tripool.config import GatewayConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.server import listen
from tripool.serving.colocated import engine_server
import httpx
with listen("127.0.0.1", 0) as at, engine_server(PagedFake(fake_text()), at) as server, server.running():
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
"""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", [(), ("--split",)])
def test_the_option_without_its_packages_says_what_to_install(
    way: tuple[str, ...],
) -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name.startswith('grpc') else find(name, *more)\n"
        "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "serve", "fake", "--port", "0", "--grpc-port", "0", *way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "grpcio" in done.stderr and "pip install 'tripool[grpc]'" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def installed() -> None:
    for name in ("grpc", "grpc_health", "grpc_reflection"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("installed")
def test_a_taken_port_is_an_error_before_loading() -> None:
    from gateway.grpc.calling import calling
    from tripool.gateway.grpc.port import reserved

    with calling() as called:
        host, _, port = called.address.rpartition(":")
        with pytest.raises(CannotListen, match="--grpc-port"), reserved(host, int(port)):
            pass
    with reserved(host, None) as nothing:
        assert nothing is None


@pytest.mark.usefixtures("installed")
def test_other_machines_need_keys(tmp_path: Path) -> None:
    """It has the address of HTTP, and so its rule."""
    from tripool.config import GatewayConfig
    from tripool.serving import AccessConfig, build_split
    from tripool.serving.access import OpenToAll

    config, access = GatewayConfig(host="0.0.0.0", port=0, grpc_port=0), AccessConfig(tmp_path / "keys.db")
    with pytest.raises(OpenToAll, match="other machines"):
        build_split(["fake"], gateway=config, access=access)


def test_the_descriptor_is_that_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    out = tmp_path / "made.binpb"
    command = ["-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", "tripool.proto"]
    subprocess.run([sys.executable, *command], check=True, timeout=120, env=os.environ)
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    ours, made = ((FileDescriptorSet.FromString(path.read_bytes())) for path in (FOLDER / "tripool.binpb", out))
    assert ours == made
