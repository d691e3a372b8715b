"""Collects the facts for `doctor` from the system, the installation, the port and the model. Changes nothing.

Only `remove_leftovers` removes files, when called.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import resource
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import tripool
from tripool.checkpoints.fetch import unfinished_in
from tripool.checkpoints.names import FETCHED, default_cache_dir, list_models, open_checkpoint
from tripool.config import GatewayConfig, Precision
from tripool.errors import TripoolError
from tripool.fabric.folder import memory_folder, remove_if_stale, run_folders
from tripool.observe.machine import Clock, Folder, Kernels, Leftover, Machine, Model, Package, Port, Shared, Software
from tripool.observe.system import file_system, listener, read_cpu, read_memory
from tripool.tenants.key_store import default_path

_EXTRAS = ("ray", "mooncake-transfer-engine")
_ANSWER_S = 3.0
_LOOKS = 50
"""Samples of the clocks, a millisecond apart."""
_STATE_BYTES = 100 * 10**6


def collect(model: str, gateway: GatewayConfig, precision: Precision = "int8") -> Machine:
    clock = _clock()
    software = _software()
    kernels = _kernels() if software.torch_error is None else Kernels(compiled=(), usable=())
    runs = memory_folder()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = shutil.disk_usage(runs)
    served = _model(model, precision if kernels.usable else "float32")
    return Machine(
        software=software,
        cpu=read_cpu(),
        kernels=kernels,
        memory=read_memory(),
        shared=Shared(
            path=str(runs),
            is_memory=file_system(runs) in ("tmpfs", "ramfs"),
            total_bytes=memory.total,
            free_bytes=memory.free,
        ),
        open_files=soft,
        open_files_most=hard,
        port=_port(gateway.host, gateway.port),
        loopback_error=_loopback_error(),
        clock=clock,
        folders=_folders(served),
        leftovers=tuple(Leftover(path=str(path), num_bytes=_size(path)) for path in leftovers()),
        num_runs=sum(not stale for _, stale in run_folders(runs)),
        model=served,
    )


def leftovers() -> list[Path]:
    """Files left by dead processes of this user: folders of runs, and unfinished fetches."""
    stale = [path for path, is_stale in run_folders(memory_folder()) if is_stale]
    return stale + [path for name in FETCHED for path in unfinished_in(default_cache_dir() / name)]


def remove_leftovers() -> list[Path]:
    """Remove leftovers; returns those that were removed."""
    found = leftovers()
    for path in found:
        if path.parent == memory_folder():
            remove_if_stale(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return [path for path in found if not path.exists()]


def _software() -> Software:
    try:
        wanted = importlib.metadata.requires("tripool") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    packages = tuple(_package(line) for line in wanted if ";" not in line)
    error, cuda = None, False
    try:
        import torch
    except (ImportError, OSError) as failed:
        error = str(failed).splitlines()[0]
    else:
        cuda = torch.version.cuda is not None
    return Software(
        python=sys.version_info[:3],
        tripool=tripool.__version__,
        packages=packages,
        torch_error=error,
        torch_cuda=cuda,
        extras={name: _version(name) for name in _EXTRAS},
    )


def _package(line: str) -> Package:
    matched = re.match(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*\(?([^)]*)", line)
    assert matched is not None
    return Package(name=matched[1], needs=matched[3].strip(), found=_version(matched[1]))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels() -> Kernels:
    from tripool.kernels.cpu8 import library

    compiled = tuple(sorted(path.stem.removeprefix("_") for path in library.FOLDER.glob("_*.so")))
    usable = tuple(library.variants())
    error = None
    if usable:
        try:
            library.library()
        except (OSError, AttributeError) as failed:
            error = str(failed)
    return Kernels(compiled=compiled, usable=usable, error=error)


def _model(name: str, precision: str) -> Model:
    known = {entry.name: entry for entry in list_models()}
    if name in known and not known[name].present:
        entry = known[name]
        weights = entry.parameters * (2 if precision == "int8" else 5)
        return Model(name=name, path=str(entry.path), present=False, weight_bytes=weights, precision=precision)
    try:
        with open_checkpoint(name) as checkpoint:
            from tripool.engine.memory import kv_blocks
            from tripool.models.load import read_arch

            arch = read_arch(checkpoint)
            assert checkpoint.text is not None  # raises if there is no tokenizer
            parameters = sum(math.prod(info.shape) for info in checkpoint.infos().values())
            path = str(checkpoint.path)
    except TripoolError as error:
        return Model(name=name, path="", present=False, error=error.message, hint=error.hint)
    embedding = arch.vocab * arch.hidden
    # 8 bits and a scale per 64 weights; the embedding stays float32.
    weights = parameters * 17 // 16 + 4 * embedding if precision == "int8" else 4 * (parameters + embedding)
    block_bytes = arch.block_bytes(mtp=arch.mtp_layers > 0)
    kv = kv_blocks(block_bytes, arch.context_tokens, None) * block_bytes
    return Model(name=name, path=path, present=True, weight_bytes=weights, kv_bytes=kv, precision=precision)


def _folders(model: Model) -> tuple[Folder, ...]:
    needs = _STATE_BYTES if model.present or model.error else 2 * FETCHED[model.name].num_bytes
    state = _folder("keys and usage", default_path().parent, _STATE_BYTES)
    return (_folder("models that are fetched", default_cache_dir(), needs), state)


def _folder(purpose: str, path: Path, needs_bytes: int) -> Folder:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    writable = os.access(there, os.W_OK | os.X_OK)
    free = shutil.disk_usage(there).free
    return Folder(purpose=purpose, path=str(path), writable=writable, free_bytes=free, needs_bytes=needs_bytes)


def _size(path: Path) -> int:
    """Size of the files that still exist: a starting server removes such folders concurrently."""
    num_bytes = 0
    with suppress(FileNotFoundError):
        for file in path.rglob("*"):
            if file.is_file():
                num_bytes += file.stat().st_blocks * 512
    return num_bytes


def _port(host: str, port: int) -> Port:
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    error = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as failed:
        error = failed.strerror or str(failed)
    if error is None:
        return Port(host=host, port=port, url=url)
    version = _ask(f"{url}/version")
    server = version[1].get("version") if version is not None and version[0] == 200 else None
    if not isinstance(server, str):
        return Port(host=host, port=port, url=url, error=error, holder=listener(port))
    status, body = _ask(f"{url}/health/ready") or (0, {})
    says = str(body.get("error", {}).get("message", f"status {status}")) if status != 200 else ""
    return Port(host=host, port=port, url=url, error=error, server=server, ready=status == 200, says=says)


def _ask(url: str) -> tuple[int, dict[str, Any]] | None:
    """Status and JSON body; None if the server does not answer in JSON."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            status, text = answer.status, answer.read(2**16)
    except urllib.error.HTTPError as refused:
        with refused:
            status, text = refused.code, refused.read(2**16)
    except (OSError, ValueError):
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    return (status, body) if isinstance(body, dict) else None


def _loopback_error() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_ANSWER_S)
            with socket.create_connection(server.getsockname(), timeout=_ANSWER_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(_ANSWER_S)
                    return None if accepted.recv(1) == b"x" else "a byte was lost"
    except OSError as error:
        return error.strerror or str(error)


def _clock() -> Clock:
    package = Path(tripool.__file__).parent
    installed_s = max(path.stat().st_mtime for path in package.rglob("*.py"))
    wall_s, began_s = time.time(), time.monotonic()
    backwards, last_s = False, began_s
    for _ in range(_LOOKS):
        time.sleep(0.001)
        now_s = time.monotonic()
        backwards |= now_s < last_s
        last_s = max(now_s, last_s)
    jump_s = (time.time() - wall_s) - (time.monotonic() - began_s)
    return Clock(wall_s=wall_s, installed_s=installed_s, backwards=backwards, jump_s=jump_s)
