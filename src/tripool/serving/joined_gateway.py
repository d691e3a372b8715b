"""Assembles a gateway on another host than its server: HTTP at an address of its own, everything else is the server's.

It brings no weights and no workers. What it needs to know of the models comes when it joins; requests, tokens, API keys
and usage pass through the host servers of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tripool.config import GatewayConfig
from tripool.control.launch import Spec
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.control.supervisor import GATEWAY, Supervisor
from tripool.fabric.folder import RunFolder
from tripool.gateway.server import listen, url_of
from tripool.hosts.connection import parse_address
from tripool.hosts.directory import OwnHost
from tripool.hosts.join import Report, address_towards, join_gateway, listen_for_hosts
from tripool.hosts.keys import HostKeys, check_token
from tripool.observe.topology import read_machine
from tripool.serving.access import check_loopback
from tripool.serving.hosts import host_name, host_server_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGatewayConfig:
    join: str
    token: str
    trusted: bool = False
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


class JoinedGateway:
    """The processes of the host, as children of this one."""

    def __init__(self, supervisor: Supervisor, url: str, stack: ExitStack) -> None:
        self._supervisor, self.url, self._stack = supervisor, url, stack

    def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        try:
            self._supervisor.run(on_ready)
        finally:
            self._stack.close()

    def stop(self) -> None:
        self._supervisor.stopping = True


def build_joined_gateway(
    config: JoinedGatewayConfig, report: Report, *, child_options: Sequence[str] = ()
) -> JoinedGateway:
    """Join step by step, bind the port, write the run folder. `run` starts the processes."""
    keys, options = HostKeys(check_token(config.token), config.trusted), tuple(child_options)
    parse_address(config.join)
    with ExitStack() as stack:
        listener = stack.enter_context(listen(config.gateway.host, config.gateway.port))
        serving = join_gateway(config.join, keys, report)
        if serving.is_open:
            check_loopback(listener, "make a key at the server with `tripool keys add NAME`")
        hosts_listener = stack.enter_context(listen_for_hosts(f"{address_towards(config.join)}:0"))
        folder = RunFolder()
        stack.callback(folder.remove)
        OwnHost(host_name(), keys.token, keys.trusted, "", config.join, machine=read_machine()).write(folder.path)
        RunManifest(tuple(ServedModel(model.name, model.text) for model in serving.models)).write(folder.path)
        fd = listener.fileno()
        argv = ("gateway", "--folder", str(folder.path), "--http-fd", str(fd), "--name", GATEWAY, *options)
        specs = [host_server_spec(folder, hosts_listener, options), Spec(GATEWAY, argv, (fd, folder.lock))]
        report("start", f"gateway at {url_of(listener)}")
        return JoinedGateway(Supervisor(specs, folder.path), url_of(listener), stack.pop_all())
