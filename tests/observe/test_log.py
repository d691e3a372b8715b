"""The log of a process: what gets into it, and that nobody waits for whoever reads it."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tripool.observe.lines import LineFormatter
from tripool.observe.log import Bounded, LineWriter, Log, LogHandler

DEADLINE_S = 60.0
CANARY = "kanarienvogel"


@contextmanager
def piped() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


class Logged:
    """A process's log as lines that were read back."""

    def __init__(self, level: str = "info", *, serving: bool = True) -> None:
        self.lines: list[dict[str, Any]] = []
        self._level, self._serving = level, serving

    def __enter__(self) -> Logged:
        self._reader, self._writer = os.pipe()
        self._log = Log("server", self._level, "json", fd=self._writer).__enter__()
        if self._serving:
            self._log.serving()
        return self

    def __exit__(self, *error: object) -> None:
        self._log.__exit__(None, None, None)
        os.close(self._writer)
        with open(self._reader, encoding="ascii") as whole:
            self.lines = [json.loads(line) for line in whole]


def test_everything_goes_into_it_and_only_while_it_is_open() -> None:
    hook, level = threading.excepthook, logging.getLogger("tripool").level
    with Logged() as log:
        logging.getLogger("tripool.gateway").info("hello", extra={"status": 200})
        logging.getLogger("tripool.gateway").debug("not this")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("uvicorn.error").info("nor this: %s", CANARY)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", DeprecationWarning, stacklevel=1)

        def fail() -> None:
            raise RuntimeError(CANARY)

        thread = threading.Thread(target=fail, name="tripool-engine")
        thread.start()
        thread.join(DEADLINE_S)
    logging.getLogger("tripool.gateway").info("too late")
    said = [(line["level"], line["message"]) for line in log.lines]
    assert said[:2] == [("info", "hello"), ("warning", "Invalid HTTP request received.")]
    assert said[2][1].endswith("DeprecationWarning: old")
    assert said[3:] == [("error", "a thread was ended by an exception")]
    assert (log.lines[3]["thread_name"], log.lines[3]["exception"]) == ("tripool-engine", "RuntimeError")
    assert CANARY not in str(log.lines)
    assert (threading.excepthook, logging.getLogger("tripool").level) == (hook, level)


def test_what_could_not_be_raised_is_told_by_its_type() -> None:
    class Bad:
        def __del__(self) -> None:
            raise RuntimeError(CANARY)

    with Logged() as log:
        bad = Bad()
        del bad
        gc.collect()
    (said,) = log.lines
    assert (said["message"], said["exception"]) == ("an exception could not be raised", "RuntimeError")


def test_whoever_logs_does_not_wait_for_a_reader_that_has_stopped() -> None:
    with piped() as (reader, fd):
        writer = LineWriter(fd, max_waiting=100)
        handler = LogHandler(LineFormatter("json", "server", 1), writer)
        logger = logging.Logger("tripool.test")
        logger.addHandler(handler)
        for number in range(3000):  # far more than a pipe holds: this would hang for ever
            logger.info("line", extra={"number": number, "filler": "x" * 200})
        taken: list[dict[str, Any]] = []

        def read() -> None:
            with open(reader, encoding="ascii", closefd=False) as lines:
                for line in lines:
                    taken.append(json.loads(line))
                    if taken[-1].get("number") == -1:
                        return

        thread = threading.Thread(target=read)
        thread.start()
        deadline = threading.Event()
        while writer.full:
            deadline.wait(0.01)
        logger.info("last", extra={"number": -1})
        thread.join(DEADLINE_S)
        writer.close()
    numbers = [line["number"] for line in taken if line["message"] == "line"]
    dropped = sum(line["lines"] for line in taken if line["message"] == "lines were dropped")
    assert dropped and len(numbers) + dropped == 3000
    assert numbers == sorted(numbers), "those that were taken are in order"


def test_a_mistake_of_whoever_logs_is_a_line_without_its_arguments() -> None:
    with piped() as (reader, fd):
        writer = LineWriter(fd)
        logger = logging.Logger("tripool.test")
        logger.addHandler(LogHandler(LineFormatter("json", "server", 1), writer))
        logger.info("%d", CANARY)
        writer.close(DEADLINE_S)
        said = json.loads(os.read(reader, 4096))
    assert (said["message"], said["file"]) == ("a line could not be made", "test_log.py")
    assert CANARY not in str(said)


def test_the_end_does_not_wait_for_a_reader_that_has_stopped() -> None:
    with piped() as (reader, fd):
        writer = LineWriter(fd)
        for _ in range(100):
            writer.put("x" * 4000)
        ended = threading.Thread(target=writer.close, args=(0.05,))
        ended.start()
        ended.join(DEADLINE_S)
        assert not ended.is_alive()
        os.read(reader, 2**20)  # lets the thread go


def test_nobody_is_harmed_when_nobody_reads() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = LineWriter(fd)
    writer.put("into a broken pipe")
    writer.close(DEADLINE_S)
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "seen"),
    [("uvicorn.error", 5), ("tripool.connections", 5), ("tripool.unauthenticated", 5), ("tripool.gateway", 50)],
)
def test_what_clients_can_cause_at_will_is_told_a_few_times(name: str, seen: int) -> None:
    now_s = 0.0
    bounded = Bounded(lambda: now_s)
    record = logging.makeLogRecord({"name": name, "msg": "Invalid HTTP request received."})
    assert sum(bounded(record) for _ in range(50)) == seen
    now_s = 10.0
    assert bounded(record)
    assert getattr(record, "more", 0) == 50 - seen
    for number in range(1000):
        bounded(logging.makeLogRecord({"name": "uvicorn.error", "msg": str(number)}))
    assert len(bounded._kinds) <= 100
