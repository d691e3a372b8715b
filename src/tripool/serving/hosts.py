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

import tripool
from tripool.config import EngineConfig
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import Supervisor
from tripool.fabric.folder import RunFolder, gateway_address
from tripool.hosts.connection import answer, parse_address
from tripool.hosts.directory import OwnHost
from tripool.hosts.errors import HostError, JoinRefused
from tripool.hosts.join import Report, address_towards, check_reach, join, listen_for_hosts, other_addresses
from tripool.hosts.keys import HostKeys, check_token, new_token
from tripool.hosts.leader import SharedModel, write_models
from tripool.hosts.wire import MAX_LINKS, Joined, TransferName
from tripool.serving.weight_cache import WeightCacheConfig
from tripool.text.files import TextFiles

HOST_SERVER = "host-server"
_CACHE_MEMBERS = 1
"""Of a host that joins: it dies as a whole, mostly."""
_REACH_S = 10.0
_ANYWHERE = ("0.0.0.0", "::")
_SOMEWHERE = "192.0.2.1:9"
"""An address that nobody has: the way there begins where others are, too."""


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
        options: Sequence[str],
    ) -> Spec:
        """Write what the host's own processes need to know; the process to start."""
        # With the first address, too: a host knows best by which of them it has joined.
        first, anywhere = self.address, self.listener.getsockname()[0] in _ANYWHERE
        links = (first, *(other_addresses(first) if anywhere else ()))[:MAX_LINKS]
        OwnHost(
            _host_name(), self.keys.token, self.keys.trusted, members=members, links=links, transfer=self._transfer,
            second_copy=self._second_copy,
        ).write(folder.path)  # fmt: skip
        write_models(folder.path, tuple(models))
        return _spec(folder, self.listener, options)


def _spec(folder: RunFolder, listener: socket.socket, options: Sequence[str]) -> Spec:
    fd = listener.fileno()
    argv = (HOST_SERVER, "--folder", str(folder.path), "--listen-fd", str(fd), *options)
    return Spec(HOST_SERVER, argv, (fd, folder.lock))


def _checked(transfer: TransferName, trusted: bool) -> TransferName:
    if transfer == "mooncake":
        from tripool.hosts.mooncake import check_mooncake

        check_mooncake(trusted=trusted)
    return transfer


def _host_name() -> str:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """A host that joins."""

    join: str
    token: str
    model: str = ""
    """A name, or the path of a local copy; empty: the server's first."""
    role: str = "any"
    listen: str = ""
    """Where others reach this host; empty: on the way to the server, at any free port."""
    trusted: bool = False
    cache_gb: float = 0.0
    threads: int | None = None
    kv_gb: float | None = None


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
        opened: list[tuple[socket.socket, str]] = []

        def listen(joined: Joined) -> None:
            _check_options(joined)
            listener = stack.enter_context(listen_for_hosts(config.listen or f"{address_towards(config.join)}:0"))
            reached = joined.role == "prefill" or config.cache_gb or config.listen
            opened.append((listener, _reachable(config, keys, listener, report) if reached else ""))

        found = join(
            config.join,
            keys,
            model=Path(path).name.removesuffix(".gguf") if is_path else path,
            path=path if is_path else None,
            role=config.role,
            folder=_cache_folder() / "hosts",
            report=report,
            locate=_locate,
            prepare=listen,
        )
        name, joined, ((listener, address),) = _host_name(), found.joined, opened
        members = {joined.model: tuple(f"cache-{name}-{i}" for i in range(_CACHE_MEMBERS))} if config.cache_gb else {}
        links = other_addresses(address) if address and listener.getsockname()[0] in _ANYWHERE else ()
        folder = RunFolder()
        stack.callback(folder.remove)
        way = _checked(joined.transfer, keys.trusted)
        told = (joined.role,), links, way, joined.second_copy
        own = OwnHost(name, keys.token, keys.trusted, address, config.join, members, *told)
        own.write(folder.path)
        weights = WeightCacheConfig()
        served = ServedModel(joined.model, TextFiles(tokenizer_json=""), members.get(joined.model, ()))
        RunManifest((served,), str(weights.folder(folder.path)), weights.quota_bytes).write(folder.path)
        options, worker = tuple(child_options), f"{joined.role}-{name}"
        threads = config.threads or max(1, len(os.sched_getaffinity(0)))
        argv = ["worker", found.model_path, "--role", joined.role, "--join", gateway_address(folder.path)]
        argv += [*joined.options, "--threads", str(threads), "--name", worker]
        argv += ["--kv-gb", str(config.kv_gb)] if config.kv_gb is not None else []
        specs = [_spec(folder, listener, options), Spec(worker, (*argv, *options), (folder.lock,), served.cache)]

        def cache_spec(member: str, block_bytes: int) -> Spec:
            num_slots = max(1, int(config.cache_gb / len(served.cache) * 2**30 / block_bytes))
            sizes = ("--slot-bytes", str(block_bytes), "--num-slots", str(num_slots))
            return Spec(
                member, ("cache-member", "--folder", str(folder.path), "--name", member, *sizes, *options),
                (folder.lock,),
            )  # fmt: skip

        report("start", f"worker {worker}")
        supervisor = Supervisor(specs, folder.path, cache_spec=cache_spec)
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
