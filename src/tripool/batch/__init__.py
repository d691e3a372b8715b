"""Files in, answers out: batches of requests in a server's idle capacity, and tables mapped through a model.

Batches are `BatchRunner` over a `BatchStore`, behind `/v1/batches`. Tables are a `TableJob` given to `run_table` or
`run_table_on_ray` with the model that answers: `LocalModel("tiny")`, or `ServedModel(url)` for all workers of a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tripool.batch.runner import BatchRunner
from tripool.batch.store import BatchStore

if TYPE_CHECKING:
    from tripool.batch.answerers import LocalModel, ServedModel
    from tripool.batch.job import Partitioning, Summary, TableJob
    from tripool.batch.on_ray import run_table_on_ray
    from tripool.batch.table import run_table

_MODULE_OF = {
    "LocalModel": "answerers",
    "Partitioning": "job",
    "ServedModel": "answerers",
    "Summary": "job",
    "TableJob": "job",
    "run_table": "table",
    "run_table_on_ray": "on_ray",
}
__all__ = [
    "BatchRunner", "BatchStore", "LocalModel", "Partitioning", "ServedModel", "Summary", "TableJob", "run_table",
    "run_table_on_ray",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imported on first use: a gateway needs no engine."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tripool.batch' has no attribute '{name}'")
    return getattr(import_module(f"tripool.batch.{_MODULE_OF[name]}"), name)
