"""Real workers that really abort: the request they abort of is refused at the second, and costs nobody else a token."""

from __future__ import annotations

import asyncio
import signal

from . import aborting
from .faults import kill
from .serving import START, split_server
from .streams import Asked, Clients, expected, make_bodies

CHILDREN_MAY_ABORT = f"""
import functools, sys
from tripool.control.launch import launch
from tripool.control.supervisor import Supervisor
Supervisor.__init__.__kwdefaults__["start"] = functools.partial(launch, command=(sys.executable, {aborting.__file__!r}))
"""
CLOCK_IS_SET_BACK = """
import itertools, time
clock = itertools.count(10**18, -(10**12))
time.time_ns = lambda: next(clock)
"""


def test_two_workers_abort_and_no_third() -> None:
    with split_server(
        "fake:step_ms=5", prefill=1, decode=2, start=CLOCK_IS_SET_BACK + CHILDREN_MAY_ABORT + START
    ) as server:
        # Killed from outside, by a clock that runs backwards: the next one is welcome, and nobody is accused.
        before = server.worker_ids()
        kill(server.pids("decode")[0])
        server.wait(lambda pools: len(pools["workers"]) == 3 and server.worker_ids() != before)
        bodies = make_bodies(8, prompt_tokens=80, answer_tokens=60)
        killer = bodies[0] | {"seed": aborting.KILLER, "n": 1}
        asked = [Asked(body) for body in (*bodies[:4], killer, *bodies[4:])]
        outcomes = asyncio.run(Clients(server.url, asked).run())
        refused = outcomes.pop(4)
        assert refused.error is not None and "2 workers crashed" in refused.error
        assert len(refused.tokens[0]) == aborting.AT, "what it had said before is its client's"
        for body, outcome in zip(bodies, outcomes, strict=True):
            assert outcome.error is None and outcome.tokens == expected(body)
        aborted = [line for line in server.log if "process ended" in line and signal.SIGABRT.name in line]
        assert len(aborted) == 2, server.log
        server.wait_idle(3)
        assert server.http.post("/v1/completions", json=bodies[0]).status_code == 200
