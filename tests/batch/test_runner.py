"""The runner of batches without a server: answers are given by the test."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tripool.batch import BatchRunner, BatchStore
from tripool.batch import runner as module
from tripool.batch.runner import Reply
from tripool.batch.types import MAX_TRIES, Batch, StorageFull

CHAT, DEADLINE_S = "/v1/chat/completions", 60.0
GOOD = b'{"ok":true}'


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_TICK_S": 0.002, "_WRITE_S": 0.001, "MAX_REST_S": 0.002, "_LOOK_S": 0.01}.items():
        monkeypatch.setattr(module, name, value)


def add(store: BatchStore, tenant: str, num_lines: int, now_s: int = 1000) -> str:
    rows = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"n": n}} for n in range(num_lines)]
    path = store.upload_path()
    path.write_text("\n".join(map(json.dumps, rows)))
    file = store.add_file(tenant, "batch", "in.jsonl", path, now_s)
    return store.add_batch(
        tenant, "key", CHAT, file.id, window="24h", window_s=86_400, metadata=None, now_s=now_s
    ).id  # fmt: skip


class Answers:
    """`reply(tenant, line, how many times it was asked)`; counts what is asked."""

    def __init__(self, reply: Callable[[str, int, int], Reply]) -> None:
        self.reply, self.asked, self.most, self._running = reply, Counter[tuple[str, int]](), 0, 0

    async def __call__(self, batch: Batch, request_id: str, body: bytes) -> Reply:
        at = batch.tenant, json.loads(body)["n"]
        self.asked[at] += 1
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0)
        self._running -= 1
        return self.reply(*at, self.asked[at])


def good(tenant: str, line: int, times: int) -> Reply:
    return Reply(200, "id", GOOD)


def refused(status: int, code: str) -> Reply:
    return Reply(status, "id", json.dumps({"error": {"code": code}}).encode(), code)


@asynccontextmanager
async def running(store: BatchStore, answers: Answers, slots: int = 8) -> AsyncIterator[BatchRunner]:
    runner = BatchRunner(store, answers, lambda: slots, clock=lambda: 1000.0)
    runner.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield runner
    finally:
        await runner.stop()


async def until(runner: BatchRunner, batch_id: str, tenant: str = "a", status: str = "completed") -> Batch:
    while (found := await runner.call(runner.store.batch, tenant, batch_id)).status != status:
        await asyncio.sleep(0)
    return found


def test_every_line_is_asked_once_and_no_more_at_once_than_there_are_slots(tmp_path: Path) -> None:
    async def run() -> None:
        store, answers = BatchStore(tmp_path), Answers(good)
        batch_id = add(store, "a", 300)
        async with running(store, answers) as runner:
            done = await until(runner, batch_id)
            assert (done.completed, done.failed) == (300, 0)
        assert set(answers.asked.values()) == {1} and len(answers.asked) == 300 and answers.most <= 8

    asyncio.run(run())


def test_a_refusal_that_passes_costs_no_line_and_holds_no_slot(tmp_path: Path) -> None:
    """Of tenant a, whose model has no workers for a while, more lines are refused than there are slots."""

    def reply(tenant: str, line: int, times: int) -> Reply:
        return good(tenant, line, times) if tenant == "b" or free else refused(503, "no_workers")

    async def run() -> None:
        nonlocal free
        store, answers = BatchStore(tmp_path), Answers(reply)
        waiting, other = add(store, "a", 200), add(store, "b", 50)
        async with running(store, answers, slots=4) as runner:
            await until(runner, other, "b")
            while max(answers.asked["a", line] for line in range(200)) <= MAX_TRIES:
                await asyncio.sleep(0)
            assert len([one for one in answers.asked if one[0] == "a"]) <= 4 + module._MAX_RESTING
            free = True
            assert (await until(runner, waiting)).completed == 200

    free = False
    asyncio.run(run())


@pytest.mark.parametrize(("status", "code"), [(500, "internal_error"), (503, "workers_failed")])
def test_a_line_that_fails_by_itself_is_given_up(tmp_path: Path, status: int, code: str) -> None:
    async def run() -> None:
        store = BatchStore(tmp_path)
        answers = Answers(lambda tenant, line, times: refused(status, code) if line == 3 else good("", 0, 0))
        batch_id = add(store, "a", 10)
        async with running(store, answers) as runner:
            done = await until(runner, batch_id)
            assert (done.completed, done.failed) == (9, 1)
        assert answers.asked["a", 3] == MAX_TRIES

    asyncio.run(run())


def test_batches_wait_for_room_for_their_answers(tmp_path: Path) -> None:
    async def run() -> None:
        answers, path = Answers(lambda *_: Reply(200, "id", b'{"x":"' + b"x" * 2000 + b'"}')), tmp_path
        store = BatchStore(path, tenant_bytes=400_000)
        big = store.upload_path()
        big.write_bytes(b"x" * 100_000)
        old = store.add_file("a", "batch", "old", big, 1000)
        batch_id = add(store, "a", 2000)
        async with running(store, answers) as runner:
            while await runner.call(store.room, "a") > 0:
                await asyncio.sleep(0)
            with pytest.raises(StorageFull):
                add(store, "a", 1)
            await runner.call(store.delete_file, "a", old.id)
            while await runner.call(store.room, "a") > 0:
                await asyncio.sleep(0)
            assert (await runner.call(store.batch, "a", batch_id)).status == "in_progress"
            await runner.call(store.cancel, "a", batch_id, 1000)
            runner.wake()
            assert (await until(runner, batch_id, status="cancelled")).completed < 2000

    asyncio.run(run())


def test_a_disk_that_is_full_for_a_while_stops_nothing_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the end, where the output file is written; nothing of what was begun is left behind."""

    async def run() -> None:
        store, full = BatchStore(tmp_path), 2
        write = store._write_entries

        def fails(*given: object, **named: object) -> int:
            nonlocal full
            full -= 1
            write(*given, **named)  # type: ignore[arg-type]
            if full >= 0:
                raise OSError(28, "No space left on device")
            return write(*given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "_write_entries", fails)
        batch_id = add(store, "a", 5)
        async with running(store, Answers(good)) as runner:
            done = await until(runner, batch_id)
            names = {done.input_file_id, done.output_file_id}
            assert {path.name for path in (tmp_path / "files").iterdir()} == names

    monkeypatch.setattr(module, "_FAILED_S", 0.001)
    asyncio.run(run())


def test_stopping_at_any_time_loses_no_line(tmp_path: Path) -> None:
    """Also when a line ends in the moment of the stop."""

    async def run() -> None:
        batch_id, answers = None, Answers(good)
        for steps in range(0, 400, 7):
            store = BatchStore(tmp_path)
            batch_id = batch_id or add(store, "a", 100)
            async with running(store, answers, slots=3) as runner:
                for _ in range(steps):
                    await asyncio.sleep(0)
        store = BatchStore(tmp_path)
        async with running(store, answers) as runner:
            done = await until(runner, str(batch_id))
            assert (done.completed, done.failed) == (100, 0)
            text = store.path(str(done.output_file_id)).read_text()
        assert [json.loads(one)["custom_id"] for one in text.splitlines()] == [str(n) for n in range(100)]

    asyncio.run(run())


def test_what_ended_long_ago_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.batch.store.TENANT_BATCHES", 3)
    store = BatchStore(tmp_path)
    ids = [add(store, "a", 1) for _ in range(5)]
    assert len(store.batches("a")) == 5, "open ones are kept"
    for one in ids[:4]:
        store.cancel("a", one, 1000)
        store.finish(one, 1000, {})
    last = add(store, "a", 1)
    assert [one.id for one in store.batches("a")] == [last, ids[4], ids[3]]
    store.expire(1000 + 40 * 86_400)
    assert [one.id for one in store.batches("a")] == [last, ids[4]], "open ones never"
    store.close()


def test_a_runner_that_is_woken_while_it_is_stopped_ends(tmp_path: Path) -> None:
    """Something ends at the very moment of the shutdown, as answers do; the folder's lock must be free afterwards."""

    async def woken_and_stopped() -> None:
        runner = BatchRunner(BatchStore(tmp_path), Answers(good), lambda: 1)
        runner.start()
        for _ in range(20):
            await runner.call(lambda: None)  # its own calls are done long before: it waits
        runner.wake()
        await asyncio.wait_for(runner.stop(), 10.0)

    for _ in range(3):
        asyncio.run(woken_and_stopped())
    BatchStore(tmp_path).close()
