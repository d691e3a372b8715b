"""Stages of `vllm_beside.py` and `http_beside.py`: each runs one side in its own process, within a time limit.

Rows of all stages are kept in one file. It outlives a call, so that vLLM's rows, which change little, are measured once
in a stretch and our side is measured again against them. Every row has the time, the machine's boot and the commit it
was measured with.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLUGIN = "tripool_weights"
LIMIT_S = {"vllm": 240.0, "ours": 150.0}
MIXED_LIMIT_S = 420.0
KILL_AFTER_S = 10.0

Key = tuple[str, str, str, str]
"""Side, shape, kind, work."""


@dataclass(frozen=True)
class Stage:
    side: str
    shape: str
    kind: str
    work: str
    """Batch sizes joined by commas, `mixed`, or `profile`; for ours also several of them joined by +."""
    limit_s: float

    @classmethod
    def of(cls, text: str) -> Stage:
        """SIDE:SHAPE:KIND:WORK[:SECONDS]"""
        side, shape, kind, work, *rest = text.split(":")
        usual_s = MIXED_LIMIT_S if "mixed" in work else LIMIT_S[side]
        return cls(side, shape, kind, work, float(rest[0]) if rest else usual_s)

    @property
    def name(self) -> str:
        return f"{self.side}-{self.shape}-{self.kind}-{self.work.replace(',', '_').replace('+', '-')}"

    @property
    def batches(self) -> list[int]:
        parts = [part for part in self.work.split("+") if part not in ("mixed", "profile")]
        return [int(number) for part in parts for number in part.split(",")]


class Store:
    """Rows of all stages so far, the newest of each key."""

    def __init__(self, file: Path, peer_rows: Path | None = None) -> None:
        """`peer_rows`: another such file, whose rows of vLLM count where this one has none."""
        self._file = file
        kept = [row for row in _read(peer_rows) if row["side"] == "vllm"]
        self.rows: dict[Key, dict[str, Any]] = {key_of(row): row for row in kept + _read(self._file)}

    def add(self, rows: Sequence[dict[str, Any]], **more: Any) -> None:
        self.rows |= {key_of(row): row | more for row in rows}
        self._file.write_text(json.dumps(list(self.rows.values()), indent=1) + "\n")

    def forget(self, stage: Stage) -> None:
        """A stage that runs again and fails must not show its earlier rows."""
        works = {f"x{count}" for count in stage.batches}
        self.rows = {
            key: row
            for key, row in self.rows.items()
            if key[:3] != (stage.side, stage.shape, stage.kind)
            or not (
                key[3] in works
                or ("mixed" in stage.work and key[3].startswith(("closed", "load")))
                or ("profile" in stage.work and key[3].startswith("profile"))
            )
        }


def _read(file: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else []
    return rows


def key_of(row: dict[str, Any]) -> Key:
    return row["side"], row["shape"], row["kind"], row["work"]


def boot_id() -> str:
    """Changes with every start of the machine."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else "unknown"


@dataclass(frozen=True)
class Place:
    """Folders of a run."""

    folder: Path
    """Rows, logs, profiles, and vLLM if it came as an archive."""
    carried: Path | None
    """Holds `bundle.*`, the pieces of an archive of vLLM, and `lib.tar.xz`, packages that our side imports."""
    packages: Path | None = None
    """More packages that our server imports, unpacked; its folder `vllm` has those that vLLM's archive misses."""
    http: bool = False
    """The sides are servers, and each stage is a client that starts one."""

    @property
    def rows(self) -> Path:
        return self.folder / ("http_rows.json" if self.http else "rows.json")

    def unpack(self) -> None:
        """Once for each machine: a later call finds the folders."""
        if self.carried is None:
            return
        for pattern, made in (("lib.tar.xz", "lib"), ("bundle.*", "boot")):
            pieces = sorted(self.carried.glob(pattern))
            target = self.folder / ("ours" if made == "lib" else "vllm")
            if not pieces or (target / made).exists():
                continue
            began_s = time.monotonic()
            with (self.folder / "joined.tar.xz").open("wb") as joined:
                for piece in pieces:
                    joined.write(piece.read_bytes())
            with tarfile.open(self.folder / "joined.tar.xz") as archive:
                archive.extractall(target, filter="fully_trusted")
            (self.folder / "joined.tar.xz").unlink()
            print(f"unpacked {pattern} in {time.monotonic() - began_s:.0f} s", flush=True)

    def environment(self, side: str) -> dict[str, str]:
        """Paths of the side's packages; vLLM's archive puts itself behind what the machine has."""
        variables = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
        ours = [HERE.parents[1] / "src", self.folder / "ours" / "lib", *filter(None, [self.packages])]
        if side == "ours":
            paths = ours
        else:
            paths = [self.folder / "vllm" / "boot", self._plugin(), HERE]
            paths += [self.packages / "vllm"] if self.packages else []
            variables |= {
                # Greedy choices do not use that sampler, which the archive leaves out.
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "VLLM_PLUGINS": PLUGIN, "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
                "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        # A client that starts vLLM's server has our paths itself.
        inherited = [
            path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) not in ours
        ]
        variables["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *inherited])
        return variables

    def _plugin(self) -> Path:
        """A package of metadata only: vLLM looks for plugins among the installed packages, in each of its processes."""
        folder = self.folder / "plugin"
        info = folder / "tripool_beside-0.1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tripool-beside\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = beside_vllm:register\n")
        return folder


def command_of(stage: Stage, place: Place, rows: Path, peer_rate: float | None, more: Sequence[str]) -> list[str]:
    command = [sys.executable, str(HERE / f"beside_{stage.side}.py")]
    if place.http:
        command = [sys.executable, str(HERE / "http_side.py"), stage.side]
        more = [*more, "--folder", str(place.folder), *(["--packages", str(place.packages)] if place.packages else [])]
    command += [stage.shape, stage.kind, "--json", str(rows), *more]
    if stage.batches:
        command += ["--batches", ",".join(map(str, stage.batches))]
    if "mixed" in stage.work:
        command += ["--mixed", *([str(peer_rate)] if stage.side == "ours" else [])]
    if "profile" in stage.work:
        command += ["--profile", str(place.folder / f"profile-{stage.shape}-{stage.kind}.json")]
    return command


def run_stage(
    stage: Stage, place: Place, store: Store, *, peer_rate: float | None, more: Sequence[str], commit: str
) -> bool:
    """Whether it ended well. Its rows are kept in any case, as far as it came."""
    logs = place.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"http-{stage.name}" if place.http else stage.name
    rows, log = logs / f"{name}.json", logs / f"{name}.log"
    rows.unlink(missing_ok=True)
    store.forget(stage)
    if stage.side == "ours" and "mixed" in stage.work and peer_rate is None:
        print(f"== {name}: no closed-loop rate of vLLM to take shares of", flush=True)
        return False
    began_s = time.monotonic()
    command = command_of(stage, place, rows, peer_rate, more)
    code = _run(command, place.environment("ours" if place.http else stage.side), log, stage.limit_s)
    measured = json.loads(rows.read_text()) if rows.exists() else []
    store.add(measured, boot=boot_id(), commit=commit)
    lines = log.read_text(errors="replace").splitlines()
    for line in _fit_to_show(lines, stage.side, failed=code != 0):
        print(line[:300])
    print(f"== {name}: exit {code}, {len(measured)} rows, {time.monotonic() - began_s:.0f} s", flush=True)
    return code == 0


def _fit_to_show(lines: Sequence[str], side: str, *, failed: bool) -> Iterator[str]:
    """Rows and the kernels below a profile's row; the last lines of a failure."""
    yield from (line for line in lines if line.startswith((f"{side} ", "ready after")) or " µs " in line)
    if failed:
        yield from [line for line in lines if line.strip()][-25:]


def _run(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> int | str:
    """Runs it in a process group of its own, which ends with it: vLLM's engine is a process below it."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
    code: int | str
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = f"stopped after {limit_s:.0f} s"
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_AFTER_S)
    return code


def copy_results(place: Place, out: Path) -> None:
    """Rows, profiles, and all logs in one file."""
    out.mkdir(parents=True, exist_ok=True)
    for file in (place.rows, *sorted(place.folder.glob("profile-*.json"))):
        if file.exists():
            shutil.copy(file, out)
    logs = sorted((place.folder / "logs").glob("*.log"))
    (out / "logs.txt").write_text("\n".join(f"##### {log.name}\n{log.read_text(errors='replace')}" for log in logs))
