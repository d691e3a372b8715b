"""A server of several machines: what its own host shares (`share`), and a host that joins it (`build_host`)."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tripool
from tripool.config import EngineConfig
from tripool.control.allocation import Want, allocate, cpus_of
from tripool.control.joined_instance import JoinedInstance
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import HOST_SERVER, STANDBY, Supervisor
from tripool.control.topology import Site, Topology
from tripool.experts.layout import Layout
from tripool.fabric.folder import RunFolder, coordinator_address
from tripool.hosts.connection import answer, parse_address
from tripool.hosts.directory import OwnHost
from tripool.hosts.errors import HostError, JoinRefused
from tripool.hosts.join import (
    Report,
    address_towards,
    check_reach,
    join,
    listen_for_hosts,
    other_addresses,
    take_ranks,
)
from tripool.hosts.keys import HostKeys, check_token, new_token
from tripool.hosts.leader import SharedModel, write_models
from tripool.hosts.wire import MAX_LINKS, Joined, Ranks, TransferName
from tripool.observe.topology import read_machine
from tripool.serving.joined_cache import JoinedCache, MemberConfig
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.text.files import TextFiles

_NO_KV_GB = 0.001
"""Of a rank without sequences: the least that an engine takes."""
_REACH_S = 10.0
_ANYWHERE = ("0.0.0.0", "::")
_SOMEWHERE = "192.0.2.1:9"
"""An address that no host has: the way there begins where others are, too."""


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the server's own host listens for others."""

    address: str
    token: str = ""
    """Empty: a new one at every start."""
    trusted: bool = False
    transfer: TransferName = "tcp"
    second_copy: bool = False


class SharedHost:
    """The server's own host, as build_split needs it."""

    def __init__(self, config: ListenConfig, stack: ExitStack) -> None:
        self.name = host_name()
        self.keys = HostKeys(check_token(config.token) if config.token else new_token(), config.trusted)
        self._transfer, self._second_copy = _checked(config.transfer, config.trusted), config.second_copy
        self.listener = stack.enter_context(listen_for_hosts(config.address))
        host, _ = parse_address(config.address)
        with suppress(HostError):
            host = address_towards(_SOMEWHERE) if host in _ANYWHERE else host
        self.address = f"tcp://{host if host not in _ANYWHERE else socket.gethostname()}:{self.port}"

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    @property
    def join_line(self) -> str:
        trusted = " --trusted-network" if self.keys.trusted else ""
        return f"tripool worker --join {self.address} --token {self.keys.token} --role any{trusted}"

    def share(
        self,
        folder: RunFolder,
        models: Sequence[SharedModel],
        members: dict[str, tuple[str, ...]],
        ranks: dict[str, tuple[int, ...]],
        options: Sequence[str],
    ) -> Spec:
        """Write what the host's own processes need to know; the process to start."""
        # With the first address, too: a host knows best by which of them it has joined.
        first, anywhere = self.address, self.listener.getsockname()[0] in _ANYWHERE
        links = (first, *(other_addresses(first) if anywhere else ()))[:MAX_LINKS]
        OwnHost(
            self.name, self.keys.token, self.keys.trusted, members=members, links=links, transfer=self._transfer,
            second_copy=self._second_copy, machine=read_machine(), ranks=ranks,
        ).write(folder.path)  # fmt: skip
        write_models(folder.path, tuple(models))
        return host_server_spec(folder, self.listener, options)


def host_server_spec(folder: RunFolder, listener: socket.socket, options: Sequence[str]) -> Spec:
    fd = listener.fileno()
    argv = (HOST_SERVER, "--folder", str(folder.path), "--listen-fd", str(fd), *options)
    return Spec(HOST_SERVER, argv, (fd, folder.lock))


def _checked(transfer: TransferName, trusted: bool) -> TransferName:
    if transfer == "mooncake":
        from tripool.hosts.mooncake import check_mooncake

        check_mooncake(trusted=trusted)
    return transfer


def host_name() -> str:
    """Unlike every other: names of workers and cache members come from it, and their epochs begin anew with it."""
    return secrets.token_hex(4)


def engine_argv(config: EngineConfig) -> tuple[str, ...]:
    """What must be the same on every host: it decides what is computed."""
    argv = ["--max-running", str(config.max_running), "--precision", config.precision]
    argv += ["--mtp" if config.mtp else "--no-mtp", "--device", config.device]
    argv += ["--step-tokens", str(config.step_tokens)] if config.step_tokens is not None else []
    return (*argv, *(["--exact"] if config.exact else []))


_ENGINE_OPTION = re.compile(r"--(max-running|precision|mtp|no-mtp|device|step-tokens|exact)|[a-z0-9]{1,32}")


def _check_options(joined: Joined) -> None:
    """What the server says becomes a command line of this machine: it is what `engine_argv` gives, and nothing else."""
    known = all(_ENGINE_OPTION.fullmatch(option) for option in joined.options)
    if not known or not (joined.files or joined.path.partition(":")[0] == "fake"):
        hint = "is it a server of this version of Tripool?"
        raise JoinRefused("the server asks for what no server asks for", hint=hint, step="model")


def rank_argv(name: str, instance: str, rank: int) -> tuple[str, ...]:
    return "--name", name, "--instance", instance, "--rank", str(rank)


def kv_argv(kv_gb: float | None, *, has_kv: bool) -> tuple[str, ...]:
    """`has_kv`: else it is a rank with experts only."""
    if not has_kv:
        return "--experts-only", "--kv-gb", str(_NO_KV_GB)
    return () if kv_gb is None else ("--kv-gb", str(kv_gb))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """A host that joins."""

    join: str
    token: str
    cache: MemberConfig
    model: str = ""
    """A name, or the path of a local copy; empty: the server's first."""
    role: str = "any"
    listen: str = ""
    """Where others reach this host; empty: on the way to the server, at any free port."""
    trusted: bool = False
    threads: int | None = None
    kv_gb: float | None = None
    reserve: str = ""
    """The only tenant that its worker serves."""


class JoinedHost:
    """The processes of a host that has joined, as children of this one."""

    def __init__(self, supervisor: Supervisor, worker: str, stack: ExitStack) -> None:
        self._supervisor, self.worker, self._stack = supervisor, worker, stack

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        try:
            self._supervisor.run(on_ready)
        finally:
            self._stack.close()

    def stop(self) -> None:
        self._supervisor.stopping = True


def build_host(config: HostConfig, report: Report, *, child_options: Sequence[str] = ()) -> JoinedHost:
    """Join step by step, find or fetch the model, write the run folder. `run` starts the processes."""
    keys, path = HostKeys(check_token(config.token), config.trusted), config.model
    is_path = os.sep in path or path.endswith(".gguf")
    parse_address(config.join)
    with ExitStack() as stack:
        opened: list[tuple[socket.socket, str, JoinedCache]] = []
        name = host_name()

        def prepare(joined: Joined) -> None:
            _check_options(joined)
            cache = JoinedCache(config.cache, joined, name, stack)
            listener = stack.enter_context(listen_for_hosts(config.listen or f"{address_towards(config.join)}:0"))
            reached = joined.role == "prefill" or cache.names or config.listen or joined.takes_ranks
            opened.append((listener, _reachable(config, keys, listener, report) if reached else "", cache))

        found = join(
            config.join,
            keys,
            model=Path(path).name.removesuffix(".gguf") if is_path else path,
            path=path if is_path else None,
            role=config.role,
            folder=_cache_folder() / "hosts",
            report=report,
            locate=_locate,
            prepare=prepare,
        )
        joined, ((listener, address, cache),) = found.joined, opened
        members = {joined.model: cache.names} if cache.names else {}
        links = other_addresses(address) if address and listener.getsockname()[0] in _ANYWHERE else ()
        folder = RunFolder()
        stack.callback(folder.remove)
        way = _checked(joined.transfer, keys.trusted)
        machine, options = read_machine(), tuple(child_options)
        rest = (joined.role,), links, way, joined.second_copy, machine
        own = OwnHost(name, keys.token, keys.trusted, address, config.join, members, *rest)
        given = take_ranks(config.join, keys, joined.model, own.host, report) if joined.takes_ranks else Ranks()
        if given.ranks:
            own = msgspec.structs.replace(own, ranks={given.instance: given.ranks})
        own.write(folder.path)
        weights = WeightCacheConfig()
        served = ServedModel(joined.model, TextFiles(tokenizer_json=""), members.get(joined.model, ()))
        worker = f"{joined.role}-{name}"
        ranks = given.ranks or (0,)
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // len(ranks))
        topology = Topology((Site(name, machine),))
        places = allocate([Want(worker, joined.role, len(ranks), threads)], topology).places
        cache_folder = str(weights.folder(folder.path))
        RunManifest((served,), cache_folder, weights.quota_bytes, places).write(folder.path)
        argv = ["worker", found.model_path, "--role", joined.role, "--join", coordinator_address(folder.path)]
        argv += [*joined.options, "--threads", str(threads), *options]
        argv += ["--reserve", config.reserve] if config.reserve else []
        specs = [host_server_spec(folder, listener, options)]
        for rank, place in zip(ranks, places, strict=True):
            part = rank_argv(f"{worker}-r{rank}", given.instance, rank) if given.ranks else ("--name", worker)
            has_kv = not given.ranks or rank < given.attention_ranks
            kv = kv_argv(config.kv_gb, has_kv=has_kv)
            used = served.cache if has_kv else ()
            child = (*argv, *part, *kv)
            specs.append(
                Spec(part[1], child, (folder.lock,), used, given.instance, rank, cpus_of(place, topology))
            )  # fmt: skip

        def cache_spec(member: str, block_bytes: int) -> Spec:
            return cache.spec(member, block_bytes, folder, options)

        what = (
            f"ranks {', '.join(map(str, given.ranks))} of {given.instance} ({given.reason})" if given.ranks else worker
        )
        report("start", f"worker {what}")
        instances, standby = [], None
        if given.ranks:
            instances = [JoinedInstance(given.instance, folder.path, Layout(**given.shape))]
            standby = Spec(STANDBY, (STANDBY,), (folder.lock,))
        supervisor = Supervisor(specs, folder.path, cache_spec=cache_spec, instances=instances, standby=standby)
        return JoinedHost(supervisor, worker, stack.pop_all())


def _reachable(config: HostConfig, keys: HostKeys, listener: socket.socket, report: Report) -> str:
    """This host's address, once the server has connected to it."""
    host, port = listener.getsockname()[:2]
    if host in _ANYWHERE:
        host = address_towards(config.join)
    address = f"tcp://[{host}]:{port}" if ":" in host and host[0] != "[" else f"tcp://{host}:{port}"
    answering = threading.Thread(target=_answer_one, args=(listener, keys), daemon=True)
    answering.start()
    check_reach(config.join, keys, address, report)
    answering.join(_REACH_S)
    listener.settimeout(None)
    return address


def _answer_one(listener: socket.socket, keys: HostKeys) -> None:
    """The process that will serve others does not run yet."""
    listener.settimeout(_REACH_S)
    with suppress(OSError, HostError):
        end, _ = listener.accept()
        try:
            answer(end, keys).close()
        finally:
            end.close()


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "tripool"


def _locate(model: str) -> Path | None:
    """Without the checkpoint readers where it can be: they take seconds to import."""
    name = Path(model).name
    bundled = Path(tripool.__file__).parent / "checkpoints" / "bundled" / name
    if bundled.is_dir():
        return bundled
    if not (_cache_folder() / name).is_dir():
        return None  # nothing was fetched under that name
    from tripool.checkpoints.names import FETCHED, locate

    return locate(model) if model in FETCHED else None
