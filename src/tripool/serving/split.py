"""Assembles a server of several processes: gateway, coordinator, workers and cache members under a supervisor.

with build_split(["tiny"], pools=SplitConfig(decode=PoolSize(2))) as server:
    server.run()
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tripool.batch import BatchStore
from tripool.config import EngineConfig, GatewayConfig, PoolSize
from tripool.control.allocation import Want, allocate, cpus_of
from tripool.control.instance import Instance
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import COORDINATOR, GATEWAY, STANDBY, Supervisor
from tripool.control.topology import Site, Topology
from tripool.errors import InvalidRequest
from tripool.fabric.folder import RunFolder, coordinator_address, mark_open
from tripool.gateway.grpc.port import reserved
from tripool.gateway.models import check_names
from tripool.gateway.server import listen
from tripool.hosts.leader import SharedModel, SpreadInstance
from tripool.observe.topology import read_machine
from tripool.serving.access import AccessConfig
from tripool.serving.disk import Disk, disk_argv, disk_of, fingerprint, member_spec, reach_store, store_argv
from tripool.serving.hosts import ListenConfig, SharedHost, engine_argv, kv_argv, rank_argv
from tripool.serving.ranks import create_prompts, prompt_layout, rank_layout
from tripool.serving.server import BuiltServer
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.text.files import TextFiles

_CACHE_MEMBERS = 2
"""Of each model. The loss of one loses only a part of the blocks."""
_ONE_WORKER = PoolSize()


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
    mooncake_store: str = ""
    """HOST:PORT of a Mooncake Store's master; empty: none."""
    hosts: int = 1
    """Over so many hosts, this one included, the ranks of each instance are spread."""

    def want(self, name: str, role: str, size: PoolSize, cores: int = 1) -> Want:
        return Want(name, role, size.all_ranks, cores, self.hosts)

    gateways: int = 1
    """Processes that serve HTTP on one port."""
    standby: bool = True
    """Whether a second coordinator follows the first one."""

    @property
    def num_workers(self) -> int:
        """Of each model, on this host."""
        return sum(s.instances * len(self.want("", "", s).shares()[0]) for s in (self.prefill, self.decode))


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
    _check_hosts(pools, hosts)
    followed = _followed(models)
    with ExitStack() as stack:
        shared = SharedHost(hosts, stack) if hosts is not None else None
        listener = stack.enter_context(listen(gateway.host, gateway.port))
        grpc_address = stack.enter_context(reserved(gateway.host, gateway.grpc_port))
        is_open = access.starts_open(listener)
        plans = _plan(followed, engine, pools)
        folder = RunFolder()
        stack.callback(folder.remove)
        threads = engine.threads or _threads_per_worker(len(plans) * pools.num_workers)
        topology = Topology((Site(shared.name if shared is not None else "local", read_machine()),))
        wants = [pools.want(*one, threads) for plan in plans for one in _instances(plan, pools)]
        placement = allocate(wants, topology)
        quota_bytes = weights.quota_bytes
        manifest = RunManifest(
            tuple(plan.served for plan in plans),
            model_cache=str(weights.folder(folder.path)) if quota_bytes else "",
            model_cache_bytes=quota_bytes,
            places=placement.places,
        )
        manifest.write(folder.path)
        if is_open:
            mark_open(folder.path)
        options = tuple(child_options)
        coordinator = ("coordinator", "--folder", str(folder.path), *options)
        names = (COORDINATOR, f"{COORDINATOR}-1")[: 1 + pools.standby]
        specs = [Spec(name, (*coordinator, "--name", name), (folder.lock,)) for name in names]
        batches = BatchStore(Path(gateway.batch_dir)) if gateway.batch_dir else None
        if batches is not None:
            stack.callback(batches.close)
        shown = (*_gateway_options(gateway, pools.gateways, grpc_address), *options)
        specs += _gateway_specs(listener, access.path, folder, pools.gateways, batches, shown)
        argv = (*engine_argv(engine), "--threads", str(threads), *options)
        cpus = {(place.want, place.rank): cpus_of(place, topology) for place in placement.places}
        specs += [spec for plan in plans for spec in _worker_specs(plan, engine, pools, folder, argv, cpus)]
        if shared is not None:
            members = {plan.served.name: plan.served.cache for plan in plans}
            local = {want.name: tuple(want.shares()[0]) for want in wants if len(want.shares()) > 1}
            shared_models = [plan.shared(engine, pools, threads) for plan in plans]
            specs.append(shared.share(folder, shared_models, members, local, options))
        disks = {member: plan.disk for plan in plans for member in plan.served.cache}
        stores = _stores(plans, pools.mooncake_store, engine)

        def cache_spec(name: str, block_bytes: int) -> Spec:
            member_gb = pools.cache_gb / len(disks)
            disk = disk_argv(disks[name], len(disks))
            return member_spec(name, block_bytes, member_gb, folder, (*disk, *stores[name], *options))

        instances = [instance for plan in plans for instance in _of_ranks(plan, engine, pools, folder)]
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

    def shared(self, config: EngineConfig, pools: SplitConfig, threads: int) -> SharedModel:
        path = self.path if self.checkpoint is None else str(self.checkpoint.absolute())
        spread = tuple(
            SpreadInstance(want, size.ranks, asdict(rank_layout(self.path, config, size.all_ranks)))
            for name, role, size in _instances(self, pools)
            if len((want := pools.want(name, role, size, threads)).shares()) > 1
        )
        return SharedModel(self.served.name, path, self.checkpoint is not None, engine_argv(config), spread)


def _check_hosts(pools: SplitConfig, hosts: ListenConfig | None) -> None:
    several = [size for size in (pools.prefill, pools.decode) if size.instances and size.all_ranks >= pools.hosts > 1]
    if pools.hosts > 1 and (hosts is None or not several):
        hint = "ranks of an instance on several hosts: --listen ADDRESS:PORT --decode 1x2 --hosts 2"
        raise InvalidRequest(f"nothing to spread over {pools.hosts} hosts", hint=hint, param="hosts")


def _followed(models: Sequence[str]) -> list[tuple[str, str]]:
    """Each with its version: a worker that starts later opens the one that the gateway serves. And the name whose
    published version it is, if that is what was given."""
    from tripool.checkpoints import registered  # here: torch takes seconds to import

    found = [(model, registered(model)) for model in models]
    return [
        (model, "") if one is None else (one.pinned, "" if one.number is not None else model) for model, one in found
    ]


def _plan(models: Sequence[tuple[str, str]], config: EngineConfig, pools: SplitConfig) -> list[_ModelPlan]:
    """An unknown model, or two of one name, is an error before any process is started."""
    plans = []
    for number, (model, follows) in enumerate(models):
        first = number * _CACHE_MEMBERS
        members = tuple(f"cache-{i}" for i in range(first, first + _CACHE_MEMBERS)) if pools.cache_gb else ()
        disk = None
        if pools.disk_gb and members:
            disk = disk_of(pools.disk_gb, pools.disk_dir, fingerprint(model, config))
        name, text, checkpoint = _text_of(model)
        plans.append(_ModelPlan(number, model, ServedModel(name, text, members, follows), disk, checkpoint))
    check_names([plan.served.name for plan in plans])
    return plans


def _stores(plans: Sequence[_ModelPlan], master: str, config: EngineConfig) -> dict[str, tuple[str, ...]]:
    """What each member needs to know of the store."""
    own_address = reach_store(master) if master else ""
    found: dict[str, tuple[str, ...]] = {}
    for plan in plans:
        argv = store_argv(master, own_address, fingerprint(plan.path, config, by_content=True)) if master else ()
        found |= dict.fromkeys(plan.served.cache, argv)
    return found


def _text_of(model: str) -> tuple[str, TextFiles, Path | None]:
    """A model's name, what its tokenizer needs, and where its files are."""
    if model.partition(":")[0] == "fake":
        from tripool.engine.fake import fake_text

        return "fake", fake_text(), None
    from tripool.checkpoints import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return checkpoint.name, checkpoint.text, checkpoint.path


def _gateway_specs(
    listener: socket.socket, keys: Path, folder: RunFolder, count: int, batches: BatchStore | None,
    options: tuple[str, ...],
) -> Iterator[Spec]:  # fmt: skip
    """All accept connections from one listening socket, which is the supervisor's: what has not been accepted when a
    gateway dies waits for the others, or for the next one."""
    fd = listener.fileno()
    locks = (batches.locked,) if batches is not None else ()
    argv = ("gateway", "--folder", str(folder.path), "--http-fd", str(fd), "--keys", str(keys.absolute()))
    options = (*options, *(word for lock in locks for word in ("--batch-lock", str(lock))))
    for number in range(count):
        name = f"{GATEWAY}-{number}" if number else GATEWAY
        yield Spec(name, (*argv, "--name", name, *options), (fd, folder.lock, *locks))


def _gateway_options(gateway: GatewayConfig, count: int, grpc_address: str | None) -> Iterator[str]:
    if gateway.response_store_bytes is not None:
        yield from ("--response-store-bytes", str(gateway.response_store_bytes // count))
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
    config: EngineConfig,
    pools: SplitConfig,
    folder: RunFolder,
    options: tuple[str, ...],
    cpus: Mapping[tuple[str, int], tuple[int, ...]],
) -> Iterator[Spec]:
    """`cpus`: of each rank that is bound to some, by instance and number."""
    join = ("--join", coordinator_address(folder.path))
    for instance, role, size in _instances(plan, pools):
        argv = ("worker", plan.path, "--role", role, *join, *options)
        if size.all_ranks == 1:
            bound = cpus[instance, 0]
            kv = kv_argv(config.kv_gb, has_kv=True)
            yield Spec(instance, (*argv, *kv, "--name", instance), (folder.lock,), plan.served.cache, cpus=bound)
            continue
        for rank in pools.want(instance, role, size).shares()[0]:
            name, has_kv = f"{instance}-r{rank}", rank < size.ranks
            part = (*rank_argv(name, instance, rank), *kv_argv(config.kv_gb, has_kv=has_kv))
            cache = plan.served.cache if has_kv else ()
            yield Spec(name, (*argv, *part), (folder.lock,), cache, instance, rank, cpus[instance, rank])


def _of_ranks(plan: _ModelPlan, config: EngineConfig, pools: SplitConfig, folder: RunFolder) -> Iterator[Instance]:
    """The instances of several ranks, with the memory that these share."""
    for name, role, size in _instances(plan, pools):
        if size.all_ranks == 1:
            continue
        if role == "prefill" and pools.hosts == 1:
            create_prompts(folder.path, name, prompt_layout(plan.path, config, size.all_ranks))
        layout, attention_only = rank_layout(plan.path, config, size.all_ranks), range(size.ranks)
        yield Instance(
            name,
            folder.path,
            layout,
            attention_only=attention_only if size.expert_ranks else (),
            hosts=len(pools.want(name, role, size).shares()),
        )


def _instances(plan: _ModelPlan, pools: SplitConfig) -> Iterator[tuple[str, str, PoolSize]]:
    """Name, role and size. Numbered over all models: a name is unique in its run."""
    for role, size in (("prefill", pools.prefill), ("decode", pools.decode)):
        for i in range(plan.number * size.instances, (plan.number + 1) * size.instances):
            yield f"{role}-{i}", role, size
