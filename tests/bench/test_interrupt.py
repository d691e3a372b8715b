"""Ctrl-C in the middle of a run, as a terminal sends it to the process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from .conftest import speaking, whole_answer

DEADLINE_S = 60.0

# A shell starts background jobs with Ctrl-C ignored, and the test run may be one: undo that, as a terminal would.
BENCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tripool.cli.main import main
main(sys.argv[1:])
"""
DONE = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


async def interrupted(options: list[str]) -> tuple[int | None, str, str]:
    """Two answers, then none: the interrupt comes while two more are awaited."""
    all_there = asyncio.Event()

    async def says(body, writer, count):
        if count == 1:
            writer.write(whole_answer(b'{"data": [{"id": "slow"}]}'))
        elif count == 2:
            writer.write(whole_answer(b"", "404 Not Found"))
        elif count <= 4:
            writer.write(whole_answer(DONE))
        else:
            if count == 6:
                all_there.set()
            await asyncio.Event().wait()

    async with speaking(says) as url, asyncio.timeout(DEADLINE_S):
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        command = [sys.executable, "-c", BENCH, "bench", "--url", url, "--concurrency", "2", *options]
        process = await asyncio.create_subprocess_exec(*command, **pipes)
        try:
            await all_there.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    return process.returncode, out.decode(), err.decode()


def test_ctrl_c_prints_what_was_measured(tmp_path):
    told = tmp_path / "told.json"
    code, out, err = asyncio.run(interrupted(["--requests", "50", "--json", str(told)]))
    assert code == 130, err
    assert "2 of 50" in out and "2 were still open" in out
    summary = json.loads(told.read_text())["summary"]
    assert (summary["completed"], summary["failed"], summary["cancelled"]) == (2, 0, 2)
