"""A table on Ray Data: real Ray on this machine. Run by hand where the extra `ray` is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch.tables import OPTIONS, PROMPT, whole, with_bad_ones, write_lines
from tripool.batch import LocalModel, Partitioning, TableJob, run_table, run_table_on_ray
from tripool.batch.job import OtherRun
from tripool.config import EngineConfig
from tripool.errors import TripoolError

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    runtime = {"env_vars": {"PYTHONPATH": ":".join(sys.path)}}
    ray.init(log_to_driver=False, include_dashboard=False, runtime_env=runtime)
    yield
    ray.shutdown()


def job(path: Path, out: Path, **fields: object) -> TableJob:
    by = Partitioning("rows", 40)
    return TableJob(inputs=(str(path),), out=str(out), prompt=PROMPT, sampling=OPTIONS, partition=by, **fields)  # type: ignore[arg-type]


def test_the_bytes_are_those_of_one_process(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(200, 50))
    model = LocalModel("tiny", EngineConfig(threads=1))
    told: list[int] = []
    done = run_table_on_ray(job(path, tmp_path / "ray"), model, on_progress=lambda ready, total: told.append(ready))
    assert (done.rows, done.bad, done.partitions) == (196, 4, 5) and told == [0, 40, 80, 120, 160, 200]
    assert run_table(job(path, tmp_path / "here"), model) == done
    assert whole(tmp_path / "ray") == whole(tmp_path / "here")
    (tmp_path / "ray/_done/part-00003.json").unlink()
    assert run_table_on_ray(job(path, tmp_path / "ray"), model).resumed == 4
    assert whole(tmp_path / "ray") == whole(tmp_path / "here")
    with pytest.raises(OtherRun):
        run_table_on_ray(job(path, tmp_path / "ray", seed=3), model)


def test_an_actors_error_is_ours(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(50))
    with pytest.raises(TripoolError, match="no-such-model"):
        run_table_on_ray(job(path, tmp_path / "out"), LocalModel("no-such-model"))
