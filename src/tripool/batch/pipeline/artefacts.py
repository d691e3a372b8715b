"""Artefacts of a pipeline on disk: each made by a stage, found again by the hash of all that decides it.

    FOLDER/STAGE-KEY/           an artefact: `artefact.json`, and what the stage made
    FOLDER/STAGE-KEY.begun/     a stage under way, or killed: it goes on from what it finds there

The key is a hash of the stage's settings and of the contents of its inputs. An artefact counts when its own contents
have the hash that was noted when it was made; the folder gets its name last.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tripool
from tripool.batch.pipeline.config import PipelineError
from tripool.checkpoints.content import content_hash, json_hash, sync, write_durably
from tripool.checkpoints.json_files import read_object
from tripool.errors import CheckpointError

_NOTE, _BEGUN = "artefact.json", ".begun"


@dataclass(frozen=True, slots=True)
class Artefact:
    stage: str
    key: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Content hashes, by what they are."""
    output: str
    """The part of its folder that is hashed and used."""
    content: str
    figures: Mapping[str, float]
    seconds: float
    made_s: float
    tripool: str
    """The version that made it."""
    path: Path = field(compare=False)

    def lineage(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}


@dataclass(frozen=True, slots=True)
class Made:
    """What a stage returns."""

    output: Path
    """In the folder that it was given."""
    figures: Mapping[str, float] = field(default_factory=dict)
    spent: Sequence[str] = ()
    """Files of its folder that are not needed once it is done."""


def key_of(stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    return json_hash({"stage": stage, "settings": settings, "inputs": inputs})[:16]


class Artefacts:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, stage: str, key: str) -> Artefact | None:
        """None: not made, or not what it was when it was made."""
        path = self.folder / f"{stage}-{key}"
        if not (path / _NOTE).is_file():
            return None
        try:
            found = Artefact(**read_object(path / _NOTE), path=path)
            output = path / found.output
            if output.exists() and content_hash(output) == found.content:
                return found
        except (CheckpointError, TypeError):  # the note itself is damaged
            pass
        return None

    def is_begun(self, stage: str, key: str) -> bool:
        return (self.folder / f"{stage}-{key}{_BEGUN}").is_dir()

    def make(
        self,
        stage: str,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str],
        run: Callable[[Path], Made],
        *,
        afresh: bool = False,
    ) -> Artefact:
        """`afresh`: without what an earlier run of the stage has left, whose inputs are not those files any more."""
        key = key_of(stage, settings, inputs)
        path, begun = self.folder / f"{stage}-{key}", self.folder / f"{stage}-{key}{_BEGUN}"
        if afresh:
            shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        made = run(begun)
        output = made.output.relative_to(begun).as_posix()
        note = Artefact(
            stage, key, settings, inputs, output, content_hash(made.output), dict(made.figures),
            round(time.monotonic() - started_s, 3), time.time(), tripool.__version__, path,
        )  # fmt: skip
        for file in [made.output, *made.output.rglob("*")]:
            sync(file)
        write_durably(begun / _NOTE, note.lineage())
        shutil.rmtree(path, ignore_errors=True)  # one that is not what it was
        begun.rename(path)
        sync(self.folder)
        for name in made.spent:
            (path / name).unlink(missing_ok=True)
        return note

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time; the system drops the lock of a run that dies."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(f"cannot write {self.folder}: {error.strerror}", hint="give another folder") from error
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                hint = "wait for it, or end it; what it has finished is kept"
                raise PipelineError(f"another process runs the pipeline in {self.folder}", hint=hint) from error
            yield

    @property
    def is_running(self) -> bool:
        try:
            with (self.folder / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
