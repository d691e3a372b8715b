"""A split server: writes down what its processes share, says which there are, and watches over them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec

from tripool.cli.access import mark_open
from tripool.cli.disk import Disk, disk_argv
from tripool.cli.logs import LogOptions
from tripool.cli.weight_cache import quota_bytes, weight_cache_folder
from tripool.config import EngineConfig
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest
from tripool.control.supervisor import GATEWAY, Supervisor
from tripool.fabric.folder import RunFolder, gateway_address

_CACHE_MEMBERS = 2
"""So that one's death loses only its half."""


def make_manifest(model: str, cache: Sequence[str]) -> RunManifest:
    """The error for a model that is not there comes before any process is started."""
    if model.partition(":")[0] == "fake":
        from tripool.engine.fake import fake_text

        return RunManifest("fake", fake_text(), tuple(cache))
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return RunManifest(checkpoint.name, checkpoint.text, tuple(cache))


def threads_per_worker(num_workers: int) -> int:
    """All of them may compute at once."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def worker_specs(
    model: str, config: EngineConfig, *, num_prefill: int, num_decode: int, folder: RunFolder
) -> list[Spec]:
    threads = config.threads or threads_per_worker(num_prefill + num_decode)
    options = ["--max-running", str(config.max_running), "--precision", config.precision, "--threads", str(threads)]
    options += ["--mtp" if config.mtp else "--no-mtp", "--device", config.device]
    options += ["--kv-gb", str(config.kv_gb)] if config.kv_gb is not None else []
    names = [("prefill", i) for i in range(num_prefill)] + [("decode", i) for i in range(num_decode)]
    return [
        Spec(
            f"{role}-{i}",
            (
                "worker",
                model,
                "--role",
                role,
                "--join",
                gateway_address(folder.path),
                "--name",
                f"{role}-{i}",
                *options,
            ),
            (folder.lock,),
        )
        for role, i in names
    ]


def cache_spec(name: str, block_bytes: int, gb: float, folder: RunFolder, disk: Disk | None = None) -> Spec:
    num_slots = max(1, int(gb * 2**30 / block_bytes))
    sizes = ("--slot-bytes", str(block_bytes), "--num-slots", str(num_slots))
    behind = disk_argv(disk, _CACHE_MEMBERS) if disk is not None else ()
    return Spec(name, ("cache-member", "--folder", str(folder.path), "--name", name, *sizes, *behind), (folder.lock,))


def serve_split(
    model: str,
    config: EngineConfig,
    listener: socket.socket,
    *,
    keys: Path,
    is_open: bool,
    num_prefill: int,
    num_decode: int,
    cache_gb: float,
    model_cache_gb: float | None,
    keep_models: bool,
    disk: Disk | None = None,
    logs: LogOptions,
    on_ready: Callable[[RunManifest], object],
) -> None:
    members = [f"cache-{i}" for i in range(_CACHE_MEMBERS)] if cache_gb else []
    manifest = make_manifest(model, members)
    folder = RunFolder()
    quota = quota_bytes(model_cache_gb)
    weight_cache = str(weight_cache_folder(folder.path, keep=keep_models)) if quota else ""
    manifest = msgspec.structs.replace(manifest, model_cache=weight_cache, model_cache_bytes=quota)
    try:
        manifest.write(folder.path)
        if is_open:
            mark_open(folder.path)
        fd = listener.fileno()
        argv = ("gateway", "--folder", str(folder.path), "--http-fd", str(fd), "--keys", str(keys.absolute()))
        gateway = Spec(GATEWAY, argv, (fd, folder.lock))
        workers = worker_specs(model, config, num_prefill=num_prefill, num_decode=num_decode, folder=folder)
        member_gb = cache_gb / _CACHE_MEMBERS

        def logging(spec: Spec) -> Spec:
            return replace(spec, argv=(*spec.argv, *logs.argv()))

        supervisor = Supervisor(
            [logging(spec) for spec in (gateway, *workers)],
            folder.path,
            cache=members,
            cache_spec=lambda name, block_bytes: logging(cache_spec(name, block_bytes, member_gb, folder, disk)),
            on_ready=lambda: on_ready(manifest),
        )
        with _stopped_by(supervisor, (signal.SIGINT, signal.SIGTERM)) as got:
            supervisor.run()
    finally:
        folder.remove()
    if signal.SIGINT in got:
        raise KeyboardInterrupt


@contextmanager
def _stopped_by(supervisor: Supervisor, signals: Sequence[signal.Signals]) -> Iterator[list[int]]:
    got: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        got.append(number)
        supervisor.stopping = True

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
