"""A model's files as one host has them and another needs them: their identity, by content, and how they get there."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tripool
from tripool.hosts.connection import Connection
from tripool.hosts.errors import JoinRefused
from tripool.hosts.wire import ANSWERS, MAX_PART_BYTES, Data, ModelFile, No, ReadFile

_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".gguf")
_PART = 2**20
_CODE = ("models", "kernels", "engine", "sequence.py", "core.py")


def files_of(path: Path) -> tuple[ModelFile, ...]:
    """Of a checkpoint's folder, or of its one file."""
    found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES) if path.is_dir() else [path]
    return tuple(ModelFile(file.name, file.stat().st_size, _digest(file)) for file in found if file.is_file())


def identity_of(files: Sequence[ModelFile]) -> str:
    """The same for the same contents under the same names, wherever they lie."""
    said = hashlib.blake2b(digest_size=16, person=b"tripool-model")
    for file in sorted(files, key=lambda one: one.name):
        said.update(len(file.name.encode()).to_bytes(4, "little") + file.name.encode() + file.digest)
    return said.hexdigest()


def code_identity() -> str:
    """Of the code that decides the bits of an answer."""
    said, root = hashlib.blake2b(digest_size=16, person=b"tripool-code"), Path(tripool.__file__).parent
    for name in _CODE:
        path = root / name
        for file in sorted(path.rglob("*.[pch]*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c", ".h"):
                said.update(file.read_bytes())
    return said.hexdigest()


def fetch_model(connection: Connection, model: str, files: Sequence[ModelFile], folder: Path) -> Path:
    """Bring a model's files to a folder named by their identity, part by part; what is there already stays.

    Returns what a worker is given: the folder, or its one GGUF file, after which the model is then called.
    """
    target = folder / identity_of(files) / (Path(model).name.strip(".") or "model")
    alone = len(files) == 1 and files[0].name.endswith(".gguf")
    there = {file: target / (f"{target.name}.gguf" if alone else file.name) for file in files}
    with _writing(target):
        target.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target).free
    missing = [file for file, path in there.items() if not _is_there(path, file)]
    needed = sum(file.num_bytes for file in missing)
    if free < needed:
        hint = f"free some space, or name a local copy: `tripool worker PATH --join ...`; it would go to {target}"
        raise JoinRefused(f"no room for {needed / 2**20:,.0f} MiB of '{model}'", hint=hint, step="fetch")
    for file in missing:
        _fetch_file(connection, model, file, there[file])
    return there[files[0]] if alone else target


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What fails here is this machine's disk, and not the connection."""
    try:
        yield
    except OSError as error:
        hint = "is there room, and may this user write there? XDG_CACHE_HOME names another folder"
        raise JoinRefused(f"cannot write to {folder}: {error.strerror or error}", hint=hint, step="fetch") from error


def _fetch_file(connection: Connection, model: str, file: ModelFile, target: Path) -> None:
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _writing(target.parent):
            out = open(unfinished, "wb")  # noqa: SIM115
        with out:
            buffer, said = memoryview(bytearray(MAX_PART_BYTES)), hashlib.blake2b(digest_size=32)
            for offset in range(0, file.num_bytes, MAX_PART_BYTES):
                part = buffer[: min(MAX_PART_BYTES, file.num_bytes - offset)]
                connection.send(ReadFile(model, file.name, offset, len(part)))
                answer = connection.receive(ANSWERS)
                if isinstance(answer, No) or answer != Data(len(part)):
                    hint = answer.hint if isinstance(answer, No) else "start the server again"
                    raise JoinRefused(f"the server cannot give '{file.name}'", hint=hint, step="fetch")
                connection.read_into(part)
                said.update(part)
                with _writing(target.parent):
                    out.write(part)
                    out.flush()
        if said.digest() != file.digest:
            hint = "it was changed while it was sent: start the server again, and then this worker"
            raise JoinRefused(f"'{file.name}' is not what the server announced", hint=hint, step="fetch")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def read_part(path: Path, name: str, offset: int, num_bytes: int) -> bytes | None:
    """A part of one of a checkpoint's files; None: there is no such part."""
    file = path / name if path.is_dir() else path
    if file.name != name or file.suffix not in _SUFFIXES:
        return None
    try:
        with open(file, "rb") as source:
            data = os.pread(source.fileno(), num_bytes, offset)
    except OSError:
        return None
    return data if len(data) == num_bytes else None


def _is_there(path: Path, file: ModelFile) -> bool:
    try:
        return path.stat().st_size == file.num_bytes and _digest(path) == file.digest
    except OSError:
        return False


def _digest(path: Path) -> bytes:
    said, buffer = hashlib.blake2b(digest_size=32), memoryview(bytearray(_PART))
    with open(path, "rb", buffering=0) as source:
        while count := source.readinto(buffer):
            said.update(buffer[:count])
    return said.digest()
