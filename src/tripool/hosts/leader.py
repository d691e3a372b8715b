"""What the server's own host decides and gives: who may join, and the files of its models."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import tripool
from tripool.control.allocation import Place, Want, allocate
from tripool.control.run_manifest import read_manifest
from tripool.control.topology import Site, Topology
from tripool.fabric.folder import is_marked_open
from tripool.hosts.directory import read_own
from tripool.hosts.models import code_identity, files_of, identity_of, read_part
from tripool.hosts.wire import (
    Host,
    Join,
    Joined,
    JoinGateway,
    ModelFile,
    No,
    Ranks,
    ReadFile,
    ServedText,
    Serving,
    TakeRanks,
    TransferName,
)
from tripool.messages import Role

_FILE = "join.json"
WAIT = "wait"
"""The step at which a worker is asked to come again."""
_READING_S = 1.0
"""How long an answer may wait for the files to be read."""


class SpreadInstance(msgspec.Struct, frozen=True):
    """An instance whose ranks are on several hosts."""

    want: Want
    attention_ranks: int
    """The first ones have sequences; those after them have experts only."""
    shape: dict[str, int]
    """The fields of the exchange's layout."""


class SharedModel(msgspec.Struct, frozen=True):
    """A model as other hosts get it."""

    name: str
    path: str
    """Of its checkpoint on this host."""
    has_files: bool
    options: tuple[str, ...]
    """Of the engine: the same on every host."""
    spread: tuple[SpreadInstance, ...] = ()


def write_models(folder: Path, models: tuple[SharedModel, ...]) -> None:
    (folder / _FILE).write_bytes(msgspec.json.encode(models))


class Leader:
    def __init__(self, folder: Path) -> None:
        models = msgspec.json.decode((folder / _FILE).read_bytes(), type=tuple[SharedModel, ...])
        self._folder, self._models = folder, {model.name: model for model in models}
        self._files: dict[str, tuple[ModelFile, ...]] = {}
        self._code, own = code_identity(), read_own(folder)
        self._transfer: TransferName = "tcp" if own is None else own.transfer
        self._second_copy = own is not None and own.second_copy
        self._read_all = threading.Thread(target=self._read_models, daemon=True)
        self._read_all.start()

    def _other_build(self, version: str, code: str) -> No | None:
        if version == tripool.__version__ and code == self._code:
            return None
        theirs = "the same version with other code" if version == tripool.__version__ else f"version {version}"
        hint = f"install the same build of tripool {tripool.__version__} there: answers depend on it"
        return No("version", f"the worker has {theirs}, the server {tripool.__version__}", hint)

    def serving(self, request: JoinGateway) -> bytes | No:
        """What a gateway of another host needs to know."""
        models = tuple(ServedText(model.name, model.text) for model in read_manifest(self._folder).models)
        told = msgspec.msgpack.encode(Serving(models, is_marked_open(self._folder)))
        return self._other_build(request.version, request.code) or told

    def join(self, request: Join, scarcer: Role) -> Joined | No:
        other = self._other_build(request.version, request.code)
        if other is not None:
            return other
        model = self._models.get(request.model or next(iter(self._models)))
        if model is None:
            hint = f"name one of {', '.join(self._models)}, or none: then it is the first"
            return No("model", f"the server has no model '{request.model[:80]}'", hint)
        self._read_all.join(_READING_S)
        files = self._files.get(model.name)
        if files is None:
            return No(
                WAIT, f"the server still reads the files of '{model.name}'", "wait: it takes the time of one reading"
            )
        role: Role = "prefill" if request.role == "prefill" else "decode" if request.role == "decode" else scarcer
        path, spread = "" if files else model.path, any(one.want.role == role for one in model.spread)
        rest = files, role, model.options, time.time(), path, self._transfer, self._second_copy, spread
        return Joined(model.name, identity_of(files), *rest)

    def missing(self, own: Host, others: Sequence[Host]) -> Role | None:
        """The role of an instance whose ranks do not all have a host."""
        for want in (spread.want for model in self._models.values() for spread in model.spread):
            if sum(len(host.ranks.get(want.name, ())) for host in (own, *others)) < want.ranks:
                return "prefill" if want.role == "prefill" else "decode"
        return None

    def take_ranks(self, request: TakeRanks, own: Host, others: Sequence[Host]) -> Ranks:
        """What this host shall have of an instance: where links are fastest, of those that have ranks or want some."""
        model, new = self._models.get(request.model), request.host
        for spread in () if model is None else model.spread:
            if spread.want.role not in new.roles:
                continue
            name = spread.want.name
            holders = [own, *(host for host in others if host.ranks.get(name) and host.name != new.name)]
            held = [Place(name, rank, host.name) for host in holders for rank in host.ranks.get(name, ())]
            sites = tuple(Site(host.name, host.machine) for host in (*holders, new))
            given = allocate([spread.want], Topology(sites), held).at(new.name)
            if given:
                ranks = tuple(sorted(place.rank for place in given))
                return Ranks(name, ranks, spread.attention_ranks, spread.shape, given[0].reason)
        return Ranks()

    def read(self, request: ReadFile) -> bytes | None:
        model = self._models.get(request.model)
        if model is None or request.name not in {file.name for file in self._files.get(model.name, ())}:
            return None
        return read_part(Path(model.path), request.name, request.offset, request.num_bytes)

    def _read_models(self) -> None:
        """Once: a checkpoint does not change while it is served. Large ones take a while."""
        for model in self._models.values():
            self._files[model.name] = files_of(Path(model.path)) if model.has_files else ()
