"""Files and batches: requests in a file, answered in idle capacity, each exactly once, over any number of restarts."""

from tripool.batch.runner import BatchRunner
from tripool.batch.store import BatchStore

__all__ = ["BatchRunner", "BatchStore"]
