"""Assembles a server of several processes: a gateway, prefill and decode workers and cache members under a supervisor.

with build_split(["tiny"], pools=SplitConfig(decode=PoolSize(2))) as server:
    server.run()
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.control.instance import Instance
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import GATEWAY, STANDBY, Supervisor
from tripool.errors import InvalidRequest
from tripool.fabric.folder import RunFolder, gateway_address
from tripool.gateway.grpc.port import reserved
from tripool.gateway.models import check_names
from tripool.gateway.server import listen
from tripool.hosts.leader import SharedModel
from tripool.serving.access import AccessConfig, mark_open
from tripool.serving.disk import Disk, disk_argv, disk_of
from tripool.serving.hosts import ListenConfig, SharedHost, engine_argv
from tripool.serving.ranks import create_prompts, prompt_layout, rank_layout
from tripool.serving.server import BuiltServer
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.text.files import TextFiles

_CACHE_MEMBERS = 2
"""Of each model. The loss of one loses only a part of the blocks."""
_ONE_WORKER = PoolSize()
_NO_KV_GB = 0.001
"""Of a rank without sequences: the least that an engine takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """The sizes of the pools."""

    prefill: PoolSize = _ONE_WORKER
    """Of each model."""
    decode: PoolSize = _ONE_WORKER
    cache_gb: float = 0.25
    """Of all models together."""
    disk_gb: float | None = None
    disk_dir: Path | None = None

    @property
    def num_workers(self) -> int:
        """Of each model."""
        return sum(size.instances * size.all_ranks for size in (self.prefill, self.decode))


class SplitServer(BuiltServer):
    """A server whose processes are children of this one. It is ready before its cache members are."""

    def __init__(
        self,
        manifest: RunManifest,
        listener: socket.socket,
        supervisor: Supervisor,
        grpc_address: str | None = None,
        join_line: str = "",
    ) -> None:
        super().__init__(listener, grpc_address)
        self.manifest = manifest
        self.join_line = join_line
        """To run on another machine; empty: others cannot join."""
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
    hosts: ListenConfig | None = None,
    child_options: Sequence[str] = (),
) -> SplitServer:
    """Bind the port, check access and models, write the run folder. `run` starts the processes.

    Each of `models` has its own workers and cache members; the first is the default.
    `hosts`: other machines may join at this address.
    `child_options` are added to the command line of every process, such as those of its log.
    """
    engine, gateway, pools = engine or EngineConfig(), gateway or GatewayConfig(), pools or SplitConfig()
    access, weights = access or AccessConfig(), weights or WeightCacheConfig()
    if hosts is None and not (pools.prefill.instances and pools.decode.instances):
        hint = "a pool of none needs workers of other machines: --listen"
        raise InvalidRequest("a server needs a prefill and a decode worker", hint=hint, param="pools")
    with ExitStack() as stack:
        listener = stack.enter_context(listen(gateway.host, gateway.port))
        grpc_address = stack.enter_context(reserved(gateway.host, gateway.grpc_port))
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
        specs = [_gateway_spec(listener, access.path, folder, (*_gateway_options(gateway, grpc_address), *options))]
        specs += [spec for plan in plans for spec in _worker_specs(plan, len(plans), engine, pools, folder, options)]
        shared = SharedHost(hosts, stack) if hosts is not None else None
        if shared is not None:
            members = {plan.served.name: plan.served.cache for plan in plans}
            specs.append(shared.share(folder, [plan.shared(engine) for plan in plans], members, options))
        disks = {member: plan.disk for plan in plans for member in plan.served.cache}

        def cache_spec(name: str, block_bytes: int) -> Spec:
            member_gb = pools.cache_gb / len(disks)
            disk = disk_argv(disks[name], len(disks))
            return _cache_spec(name, block_bytes, member_gb, folder, (*disk, *options))

        instances = [
            Instance(
                name,
                folder.path,
                rank_layout(plan.path, engine, size.all_ranks),
                attention_only=range(size.ranks) if size.expert_ranks else (),
            )
            for plan in plans
            for name, _, size in _instances(plan, pools)
            if size.all_ranks > 1
        ]
        for plan in plans:
            for name, role, size in _instances(plan, pools):
                if role == "prefill" and size.all_ranks > 1:
                    create_prompts(folder.path, name, prompt_layout(plan.path, engine, size.all_ranks))
        standby = Spec(STANDBY, (STANDBY,), (folder.lock,)) if instances else None
        supervisor = Supervisor(specs, folder.path, cache_spec=cache_spec, instances=instances, standby=standby)
        join_line = shared.join_line if shared is not None else ""
        server = SplitServer(manifest, listener, supervisor, grpc_address, join_line)
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
    checkpoint: Path | None
    """None: a model without files."""

    def shared(self, config: EngineConfig) -> SharedModel:
        path = self.path if self.checkpoint is None else str(self.checkpoint.absolute())
        return SharedModel(self.served.name, path, self.checkpoint is not None, engine_argv(config))


def _plan(models: Sequence[str], config: EngineConfig, pools: SplitConfig) -> list[_ModelPlan]:
    """An unknown model, or two of one name, is an error before any process is started."""
    plans = []
    for number, model in enumerate(models):
        first = number * _CACHE_MEMBERS
        members = tuple(f"cache-{i}" for i in range(first, first + _CACHE_MEMBERS)) if pools.cache_gb else ()
        disk = disk_of(pools.disk_gb, pools.disk_dir, model, config) if pools.disk_gb and members else None
        name, text, checkpoint = _text_of(model)
        plans.append(_ModelPlan(number, model, ServedModel(name, text, members), disk, checkpoint))
    check_names([plan.served.name for plan in plans])
    return plans


def _text_of(model: str) -> tuple[str, TextFiles, Path | None]:
    """A model's name, what its tokenizer needs, and where its files are."""
    if model.partition(":")[0] == "fake":
        from tripool.engine.fake import fake_text

        return "fake", fake_text(), None
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return checkpoint.name, checkpoint.text, checkpoint.path


def _gateway_spec(listener: socket.socket, keys: Path, folder: RunFolder, options: tuple[str, ...]) -> Spec:
    fd = listener.fileno()
    argv = ("gateway", "--folder", str(folder.path), "--http-fd", str(fd), "--keys", str(keys.absolute()))
    return Spec(GATEWAY, (*argv, *options), (fd, folder.lock))


def _gateway_options(gateway: GatewayConfig, grpc_address: str | None) -> Iterator[str]:
    yield from ("--response-store-bytes", str(gateway.response_store_bytes))
    yield from ("--batch-dir", gateway.batch_dir)
    for origin in gateway.cors_origins:
        yield from ("--cors-origin", origin)
    if grpc_address is not None:
        yield from ("--grpc-address", grpc_address)


def _threads_per_worker(num_workers: int) -> int:
    """All of them may compute at once."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))


def _worker_specs(
    plan: _ModelPlan,
    num_models: int,
    config: EngineConfig,
    pools: SplitConfig,
    folder: RunFolder,
    options: tuple[str, ...],
) -> Iterator[Spec]:
    threads = config.threads or _threads_per_worker(num_models * pools.num_workers)
    sizes = [*engine_argv(config), "--threads", str(threads)]
    kv = ["--kv-gb", str(config.kv_gb)] if config.kv_gb is not None else []
    join = ("--join", gateway_address(folder.path))
    for instance, role, size in _instances(plan, pools):
        argv = ("worker", plan.path, "--role", role, *join, *sizes, *options)
        if size.all_ranks == 1:
            yield Spec(instance, (*argv, *kv, "--name", instance), (folder.lock,), plan.served.cache)
            continue
        for rank in range(size.all_ranks):
            name, rest, cache = f"{instance}-r{rank}", kv, plan.served.cache
            if rank >= size.ranks:
                rest, cache = ["--experts-only", "--kv-gb", str(_NO_KV_GB)], ()
            part = ("--name", name, "--instance", instance, "--rank", str(rank), *rest)
            yield Spec(name, (*argv, *part), (folder.lock,), cache, instance, rank)


def _instances(plan: _ModelPlan, pools: SplitConfig) -> Iterator[tuple[str, str, PoolSize]]:
    """Name, role and size. Numbered over all models: a name is unique in its run."""
    for role, size in (("prefill", pools.prefill), ("decode", pools.decode)):
        for i in range(plan.number * size.instances, (plan.number + 1) * size.instances):
            yield f"{role}-{i}", role, size


def _cache_spec(name: str, block_bytes: int, gb: float, folder: RunFolder, options: tuple[str, ...]) -> Spec:
    num_slots = max(1, int(gb * 2**30 / block_bytes))
    sizes = ("--slot-bytes", str(block_bytes), "--num-slots", str(num_slots))
    argv = ("cache-member", "--folder", str(folder.path), "--name", name, *sizes, *options)
    return Spec(name, argv, (folder.lock,))
