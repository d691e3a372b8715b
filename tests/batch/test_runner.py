"""The runner of batches by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tripool.batch.runner import BatchRunner, Reply
from tripool.batch.store import BatchStore
from tripool.batch.types import Batch


async def _answer(batch: Batch, request_id: str, body: bytes) -> Reply:
    return Reply(200, request_id, b"{}")


def test_a_runner_that_is_woken_while_it_is_stopped_ends(tmp_path: Path) -> None:
    """Something ends at the very moment of the shutdown, as answers do; the folder's lock must be free afterwards."""

    async def woken_and_stopped() -> None:
        runner = BatchRunner(BatchStore(tmp_path), _answer, lambda: 1)
        runner.start()
        for _ in range(20):
            await runner.call(lambda: None)  # its own calls are done long before: it waits
        runner.wake()
        await asyncio.wait_for(runner.stop(), 10.0)

    for _ in range(3):
        asyncio.run(woken_and_stopped())
    BatchStore(tmp_path).close()
