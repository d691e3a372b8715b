"""The model registry: a folder of models by name, each with immutable versions and a pointer to the published one.

    REGISTRY/NAME/NAME@2/       the checkpoint of version 2, or NAME@2/NAME@2.gguf
    REGISTRY/NAME/NAME@2.json   its record: content hash, lineage and figures; written last
    REGISTRY/NAME/published.json    {"version": 2, "before": [1]}, replaced atomically

A version without a record is not there. Versions are never changed; publishing and rolling back move the pointer.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.checkpoints.content import content_hash, sync, write_durably
from tripool.checkpoints.json_files import read_object
from tripool.errors import TripoolError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_POINTER, _UNFINISHED = "published.json", ".unfinished-"
_LOCK_S, _POLL_S = 30.0, 0.05


class RegistryError(TripoolError, status=400, code="bad_registry"):
    """The registry does not have what is asked for, or cannot be written."""


class VersionUnknown(RegistryError, status=404, code="version_unknown"):
    """The registry has no such version of a model."""


@dataclass(frozen=True, slots=True)
class Version:
    name: str
    number: int
    path: Path
    """What `open_checkpoint` opens: a folder, or a GGUF file."""
    content: str
    created_s: float
    lineage: Mapping[str, Any]
    """Where it comes from: parent, data, config, code, stages and figures."""

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"


def default_registry() -> Path:
    home = os.environ.get("XDG_DATA_HOME", "")
    data = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share"
    return data / "tripool" / "models"


class Registry:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_registry()).absolute()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        with suppress(OSError):
            return sorted(one.name for one in self.folder.iterdir() if _NAME.fullmatch(one.name) and self._has(one))
        return []

    def has(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name)) and self._has(self.folder / name)

    def _has(self, folder: Path) -> bool:
        return any(folder.glob(f"{folder.name}@*.json"))

    def versions(self, name: str) -> list[Version]:
        """The oldest first."""
        folder = self.folder / name
        numbers = sorted(int(one.stem.rpartition("@")[2]) for one in folder.glob(f"{name}@*.json"))
        return [self.version(name, number) for number in numbers]

    def version(self, name: str, number: int) -> Version:
        folder = self.folder / name
        record, path = folder / f"{name}@{number}.json", folder / f"{name}@{number}"
        if not _NAME.fullmatch(name) or not record.is_file():
            hint = "`tripool models history NAME` shows those that there are"
            raise VersionUnknown(f"there is no {name}@{number} in {self.folder}", hint=hint)
        said = read_object(record)
        single = path / f"{path.name}.gguf"
        path = single if single.is_file() else path
        return Version(name, number, path, said["content"], said["created_s"], said["lineage"])

    def published(self, name: str) -> int | None:
        number: int | None = self._pointer(name)["version"]
        return number

    def _pointer(self, name: str) -> dict[str, Any]:
        file = self.folder / name / _POINTER
        return dict(read_object(file)) if file.exists() else {"version": None, "before": []}

    # ---- writing ----------------------------------------------------------------------------------------------------

    def add(
        self, name: str, source: Path, lineage: Mapping[str, Any], *, key: str, expected: str | None = None
    ) -> Version:
        """Copy a checkpoint into the registry. One that was added with the same `key` is returned as it is.

        `expected`: the content hash that the copy must have.
        """
        folder = self._writable(name)
        known = next((one for one in self.versions(name) if one.lineage.get("key") == key), None)
        if known is not None:
            return known
        copied = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{os.getpid()}-", dir=folder))
        _copy(source, copied)
        content = content_hash(copied if source.is_dir() else copied / source.name)
        if expected not in (None, content):
            shutil.rmtree(copied)
            problem = f"{source} is not what was evaluated: it was changed meanwhile"
            raise RegistryError(problem, hint="nothing was registered; run the pipeline again")
        with self._locked(folder):
            self._clean(folder, copied)
            taken = [int(one.name.rpartition("@")[2]) for one in folder.glob(f"{name}@*") if one.suffix != ".json"]
            number = max(taken, default=0) + 1
            path = folder / f"{name}@{number}"
            if source.is_file():
                (copied / source.name).rename(copied / f"{path.name}.gguf")
            copied.rename(path)
            sync(folder)
            record = {"content": content, "created_s": time.time(), "lineage": {**lineage, "key": key}}
            write_durably(folder / f"{path.name}.json", record)
        return self.version(name, number)

    def publish(self, name: str, number: int) -> None:
        """Point at a version. What was published before is remembered, for `roll_back`."""
        self.version(name, number)
        with self._locked(self.folder / name):
            pointer = self._pointer(name)
            if pointer["version"] != number:
                before = pointer["before"] + ([] if pointer["version"] is None else [pointer["version"]])
                write_durably(self.folder / name / _POINTER, {"version": number, "before": before})

    def roll_back(self, name: str) -> int:
        """Point at what was published before."""
        with self._locked(self._known(name)):
            pointer = self._pointer(name)
            if not pointer["before"]:
                hint = f"publish another one: tripool models publish {name}@VERSION"
                raise RegistryError(f"nothing was published before {name}@{pointer['version']}", hint=hint)
            *before, number = pointer["before"]
            write_durably(self.folder / name / _POINTER, {"version": number, "before": before})
            return int(number)

    def _known(self, name: str) -> Path:
        if not self.has(name):
            known = ", ".join(self.names()) or "none"
            raise VersionUnknown(f"the registry has no model '{name}'", hint=f"{self.folder} has: {known}")
        return self.folder / name

    def _writable(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            hint = "up to 64 letters, digits, dots, dashes and underscores"
            raise RegistryError(f"'{name[:80]}' is no name for a model", hint=hint)
        folder = self.folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryError(f"cannot write {folder}: {error.strerror}", hint="choose another registry") from error
        return folder

    def _clean(self, folder: Path, own: Path) -> None:
        """Remove copies and versions without a record, of killed processes."""
        for one in folder.glob(f"{_UNFINISHED}*"):
            pid = one.name.removeprefix(_UNFINISHED).partition("-")[0]
            if one != own and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(one, ignore_errors=True)
        for one in folder.glob(f"{folder.name}@*"):
            if one.is_dir() and not one.with_name(f"{one.name}.json").exists():
                shutil.rmtree(one)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """For moments: numbers and pointers. The system drops the lock when its holder dies."""
        deadline_s = time.monotonic() + _LOCK_S
        with (folder / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline_s:
                        raise RegistryError(f"{folder} is locked", hint="end the process that holds it") from error
                    time.sleep(_POLL_S)
            yield


def _copy(source: Path, target: Path) -> None:
    """Durable and read-only."""
    try:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target / source.name)
        target.chmod(0o755)
        for file in [one for one in target.rglob("*") if one.is_file()]:
            file.chmod(0o444)
            sync(file)
        sync(target)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RegistryError(f"cannot copy to {target}: {error.strerror}", hint="is there room?") from error


# ---- names: `story`, `story@2`, or the same with the path of a registry before it -----------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    registry: Registry
    name: str
    number: int | None
    """None: the published version."""
    prefix: str = ""

    def version(self) -> Version:
        number = self.number if self.number is not None else self.registry.published(self.name)
        if number is None:
            hint = f"publish one, or name it: {self.name}@{self.registry.versions(self.name)[-1].number}"
            raise RegistryError(f"no version of '{self.name}' is published", hint=hint)
        return self.registry.version(self.name, number)

    @property
    def pinned(self) -> str:
        """With its version: what opens it later opens the same one."""
        return f"{self.prefix}{self.version().label}"


def find(model: str) -> Registered | None:
    """None: not in a registry. A version that a known model does not have raises VersionUnknown later."""
    head, slash, last = model.rpartition("/")
    name, at, number = last.partition("@")
    if at and not (number.isdecimal() and len(number) < 10):
        return None
    registry = Registry(Path(head).expanduser() if slash else None)
    if not registry.has(name):
        return None
    return Registered(registry, name, int(number) if at else None, head + slash)
