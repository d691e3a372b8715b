"""Runs a table job on Ray Data: one actor on each node of the cluster takes partitions, over a folder all nodes see."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from tripool.batch.answerers import Answerer, Model
from tripool.batch.ask import Asker
from tripool.batch.job import Summary, TableJob, TablesMissing
from tripool.batch.out_folder import OutFolder
from tripool.batch.table import Job, OnProgress, TableRun
from tripool.batch.table_input import TableInput
from tripool.errors import EngineStopped, TripoolError, error_of


class _Partitions:
    """An actor. The model is loaded once."""

    def __init__(self, job: TableJob, given: TableInput, model: Model) -> None:
        self._job, self._input, self._model = job, given, model
        self._asker, self._folder = Asker(job), OutFolder(job.out)
        self._answerer: Answerer | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """An error of ours comes back as data: of one that is raised, Ray passes on its own words only."""
        try:
            if self._answerer is None:
                self._answerer = self._model.open(self._job)
            partition = self._input.partitions[int(row["number"])]
            TableRun(self._job, self._input, self._asker, self._folder, self._answerer).run([partition])
        except TripoolError as error:
            return {"rows": 0, "code": error.code, "message": error.message, "hint": error.hint}
        return {"rows": partition.num_rows, "code": "", "message": "", "hint": ""}


def run_table_on_ray(job: TableJob, model: Model, *, on_progress: OnProgress | None = None) -> Summary:
    """Begin or continue a job on the cluster that Ray finds, or on this machine. Any way of running it continues it."""
    try:
        ray: Any = import_module("ray")
        import_module("ray.data")
    except ImportError as error:
        raise TablesMissing("Ray is not installed", hint="pip install 'tripool[ray]'") from error
    one = Job(job, model, on_progress)
    with one.open() as rest:
        if rest:
            mine = not ray.is_initialized()
            if mine:
                ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
            try:
                nodes = len(ray.nodes())
                ray.data.DataContext.get_current().enable_progress_bars = False
                logging.getLogger("ray.data").setLevel(logging.ERROR)
                todo = ray.data.from_items(
                    [{"number": part.number} for part in rest], override_num_blocks=len(rest)
                ).map(
                    _Partitions,
                    fn_constructor_args=(job, one.input, model),
                    compute=ray.data.ActorPoolStrategy(size=min(nodes, len(rest))),
                    num_cpus=1,
                )
                for done in todo.iter_rows():
                    if done["code"]:
                        raise error_of(done["code"], done["message"], done["hint"])
                    one.tell(int(done["rows"]))
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines()
                raise EngineStopped(f"Ray: {lines[-1] if lines else error!r}", hint="run it again to go on") from error
            finally:
                if mine:
                    ray.shutdown()
    return one.summary()
