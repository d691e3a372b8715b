"""Assembles a server of several processes: a gateway, prefill and decode workers and cache members under a supervisor.

with build_split(["tiny"], pools=SplitConfig(num_decode=2)) as server:
    server.run()
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tripool.config import EngineConfig, GatewayConfig
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import GATEWAY, Supervisor
from tripool.fabric.folder import RunFolder, gateway_address
from tripool.gateway.models import check_names
from tripool.gateway.server import listen
from tripool.serving.access import AccessConfig, mark_open
from tripool.serving.disk import Disk, disk_argv, disk_of
from tripool.serving.server import BuiltServer
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.text.files import TextFiles

_CACHE_MEMBERS = 2
"""Of each model. The loss of one loses only a part of the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """The sizes of the pools."""

    num_prefill: int = 1
    """Workers of each model."""
    num_decode: int = 1
    cache_gb: float = 0.25
    """Of all models together."""
    disk_gb: float | None = None
    disk_dir: Path | None = None


class SplitServer(BuiltServer):
    """A server whose processes are children of this one. It is ready before its cache members are."""

    def __init__(self, manifest: RunManifest, listener: socket.socket, supervisor: Supervisor) -> None:
        super().__init__(listener)
        self.manifest = manifest
        self._supervisor = supervisor

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        self._supervisor.run(on_ready)

    def stop(self) -> None:
        self._supervisor.stopping = True


def build_split(
    models: Sequence[str] = ("tiny",),
    engine: EngineConfig | None = None,
    gateway: GatewayConfig | None = None,
    *,
    pools: SplitConfig | None = None,
    access: AccessConfig | None = None,
    weights: WeightCacheConfig | None = None,
    child_options: Sequence[str] = (),
) -> SplitServer:
    """Bind the port, check access and models, write the run folder. `run` starts the processes.

    Each of `models` has its own workers and cache members; the first is the default.
    `child_options` are added to the command line of every process, such as those of its log.
    """
    engine, gateway, pools = engine or EngineConfig(), gateway or GatewayConfig(), pools or SplitConfig()
    access, weights = access or AccessConfig(), weights or WeightCacheConfig()
    with ExitStack() as stack:
        listener = stack.enter_context(listen(gateway.host, gateway.port))
        is_open = access.starts_open(listener)
        plans = _plan(models, engine, pools)
        folder = RunFolder()
        stack.callback(folder.remove)
        quota_bytes = weights.quota_bytes
        manifest = RunManifest(
            tuple(plan.served for plan in plans),
            model_cache=str(weights.folder(folder.path)) if quota_bytes else "",
            model_cache_bytes=quota_bytes,
        )
        manifest.write(folder.path)
        if is_open:
            mark_open(folder.path)
        options = tuple(child_options)
        specs = [_gateway_spec(listener, access.path, folder, options)]
        specs += [spec for plan in plans for spec in _worker_specs(plan, len(plans), engine, pools, folder, options)]
        disks = {member: plan.disk for plan in plans for member in plan.served.cache}

        def cache_spec(name: str, block_bytes: int) -> Spec:
            member_gb = pools.cache_gb / len(disks)
            disk = disk_argv(disks[name], len(disks))
            return _cache_spec(name, block_bytes, member_gb, folder, (*disk, *options))

        server = SplitServer(manifest, listener, Supervisor(specs, folder.path, cache_spec=cache_spec))
        server.closing = stack.pop_all()
    return server


@dataclass(frozen=True, slots=True)
class _ModelPlan:
    """One model's part of a run."""

    number: int
    path: str
    """What its workers are given."""
    served: ServedModel
    disk: Disk | None


def _plan(models: Sequence[str], config: EngineConfig, pools: SplitConfig) -> list[_ModelPlan]:
    """An unknown model, or two of one name, is an error before any process is started."""
    plans = []
    for number, model in enumerate(models):
        first = number * _CACHE_MEMBERS
        members = tuple(f"cache-{i}" for i in range(first, first + _CACHE_MEMBERS)) if pools.cache_gb else ()
        disk = disk_of(pools.disk_gb, pools.disk_dir, model, config) if pools.disk_gb and members else None
        plans.append(_ModelPlan(number, model, ServedModel(*_text_of(model), members), disk))
    check_names([plan.served.name for plan in plans])
    return plans


def _text_of(model: str) -> tuple[str, TextFiles]:
    """A model's name, and what its tokenizer needs."""
    if model.partition(":")[0] == "fake":
        from tripool.engine.fake import fake_text

        return "fake", fake_text()
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return checkpoint.name, checkpoint.text


def _gateway_spec(listener: socket.socket, keys: Path, folder: RunFolder, options: tuple[str, ...]) -> Spec:
    fd = listener.fileno()
    argv = ("gateway", "--folder", str(folder.path), "--http-fd", str(fd), "--keys", str(keys.absolute()))
    return Spec(GATEWAY, (*argv, *options), (fd, folder.lock))


def _threads_per_worker(num_workers: int) -> int:
    """All of them may compute at once."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def _worker_specs(
    plan: _ModelPlan,
    num_models: int,
    config: EngineConfig,
    pools: SplitConfig,
    folder: RunFolder,
    options: tuple[str, ...],
) -> Iterator[Spec]:
    threads = config.threads or _threads_per_worker(num_models * (pools.num_prefill + pools.num_decode))
    sizes = ["--max-running", str(config.max_running), "--precision", config.precision, "--threads", str(threads)]
    sizes += ["--mtp" if config.mtp else "--no-mtp", "--device", config.device]
    sizes += ["--kv-gb", str(config.kv_gb)] if config.kv_gb is not None else []
    sizes += ["--step-tokens", str(config.step_tokens)] if config.step_tokens is not None else []
    sizes += ["--exact"] if config.exact else []
    join = ("--join", gateway_address(folder.path))
    for role, count in (("prefill", pools.num_prefill), ("decode", pools.num_decode)):
        # Numbered over all models: a worker's name is unique in its run.
        for i in range(plan.number * count, (plan.number + 1) * count):
            argv = ("worker", plan.path, "--role", role, *join, "--name", f"{role}-{i}", *sizes, *options)
            yield Spec(f"{role}-{i}", argv, (folder.lock,), plan.served.cache)


def _cache_spec(name: str, block_bytes: int, gb: float, folder: RunFolder, options: tuple[str, ...]) -> Spec:
    num_slots = max(1, int(gb * 2**30 / block_bytes))
    sizes = ("--slot-bytes", str(block_bytes), "--num-slots", str(num_slots))
    argv = ("cache-member", "--folder", str(folder.path), "--name", name, *sizes, *options)
    return Spec(name, argv, (folder.lock,))
