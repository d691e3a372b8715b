"""kill -9 of `tripool batch` at any moment: run again, it ends with the bytes of a run that was not killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from batch.tables import PROMPT, run, whole, with_bad_ones, write_lines
from tripool.batch import Partitioning

DEADLINE_S = 600.0
CHILD = """
import os, signal, sys
from pathlib import Path

left = int(sys.argv.pop(1))

def struck(kind):
    real = getattr(Path, kind) if kind != "fsync" else os.fsync
    def call(*args, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **named)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    return call

Path.rename, os.fsync = struck("rename"), struck("fsync")

from tripool.cli.main import main
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake

main(sys.argv[1:], lambda model, config: PagedFake(fake_text(), context_tokens=2048, name="fake"))
"""
"""Dies before or after its N-th rename or fsync, the steps by which a partition becomes finished; 0: never."""


def child(at: int, path: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(at), "batch", "fake", "--in", str(path), "--out", str(out)]
    return subprocess.Popen([*command, "--prompt", PROMPT, "--max-tokens", "6", *options], stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it finished; else it was killed."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode == 0


def num_files(out: Path) -> int:
    """Of what is under way and what is done."""
    found = 0
    for name in ("_work", "_done"):
        with suppress(FileNotFoundError):  # not made yet, or the run has ended
            found += len(os.listdir(out / name))
    return found


@pytest.mark.parametrize("partition", ["rows:60", pytest.param("hash:text:3", marks=pytest.mark.prove)])
def test_a_run_that_is_killed_goes_on(tmp_path: Path, partition: str) -> None:
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(240, 40))
    run(path, tmp_path / "whole", partition=Partitioning.parse(partition), format="parquet")
    options = ("--partition", partition, "--format", "parquet")
    for at in (3, 9, 0):
        assert ended(child(at, path, tmp_path / "out", *options)) == (at == 0)
    assert whole(tmp_path / "out") == whole(tmp_path / "whole")


@pytest.mark.prove
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_ten_thousand_rows_under_kills(tmp_path: Path, format: str) -> None:
    """1 % of them bad. Every third run dies around a step of a partition's end, the others whenever it strikes."""
    random, killed, at = Random(format), 0, 1
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(10_000))
    fields = {"partition": Partitioning("rows", 500), "format": format}
    done = run(path, tmp_path / "whole", **fields)
    assert (done.rows, done.bad, done.partitions) == (9_900, 100, 20)
    options, out = ("--partition", "rows:500", "--format", format), tmp_path / "out"
    while True:
        runs_to = 0 if killed % 3 else (at := at + 3)
        process = child(runs_to, path, out, *options)
        if not runs_to:
            # As far as some further file: its time, not a clock's, decides when it strikes.
            goal = num_files(out) + random.randrange(1, 4)
            while process.poll() is None and num_files(out) < goal:
                pass
            process.kill()
        if ended(process):
            break
        killed += 1
        if killed >= 40:
            assert ended(child(0, path, out, *options))
            break
    assert killed >= 10
    assert whole(out) == whole(tmp_path / "whole")
    print(f"killed {killed} times")


@pytest.mark.prove
def test_a_million_rows_stream_through(tmp_path: Path) -> None:
    """Peak memory of the process does not grow with the table: ten times the rows, as much memory."""
    peaks = []
    for count in (100_000, 1_000_000):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            file.writelines(f'{{"id": {n}, "text": "Question {n} {"x" * 200}"}}\n' for n in range(count))
        done = subprocess.run(
            [sys.executable, "-c", STREAM, str(path), str(tmp_path / f"out-{count}")],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=os.environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows, peak_kib = map(int, done.stdout.split())
        assert rows == count
        peaks.append(peak_kib)
    print(f"peaks in KiB: {peaks}")
    assert peaks[1] < 1.15 * peaks[0]


STREAM = """
import resource, sys
from tripool.batch import Partitioning, TableJob, run_table
from tripool.batch.job import Reply

class Echo:
    "A model that costs nothing."
    name, at_once = "echo", 64
    def open(self, job): self.asked = []; return self
    def submit(self, asked): self.asked.append(asked)
    def wait(self): found, self.asked = self.asked, []; return [Reply(one.id, one.text) for one in found]
    def close(self): pass

job = TableJob(
    inputs=(sys.argv[1],), out=sys.argv[2], prompt="{{ text }}", format="parquet", partition=Partitioning("files", 0)
)
done = run_table(job, Echo())
print(done.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
