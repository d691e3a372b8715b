"""What goes wrong behind the gateway is not seen in front of it."""

from __future__ import annotations

import os
from itertools import product

import pytest

from .fault_table import FAULTS, HOPS, STAGES, Cell, Fault, Hop, Seen, Stage, judge, render, run_table
from .streams import Outcome, expected, make_bodies

SMALL: list[tuple[Fault, Hop, Stage]] = [
    ("kill -9", "prefill", "prefilling"),
    ("kill -9", "decode", "decoding"),
    ("SIGSTOP, SIGCONT", "decode", "decoding"),
    ("cut socket", "prefill", "prefilling"),
    ("cut socket", "decode", "transferring"),
    ("client disconnect", "prefill", "prefilling"),
    ("kill -9", "cache", "prefilling"),
    ("kill -9", "coordinator", "prefilling"),
    ("SIGSTOP, SIGCONT", "coordinator", "decoding"),
    ("cut socket", "coordinator", "transferring"),
    ("cut socket", "standby", "decoding"),
    ("kill -9", "gateway", "prefilling"),
    ("SIGSTOP, SIGCONT", "gateway", "decoding"),
    ("cut socket", "gateway", "decoding"),
    ("kill -9", "gateway and coordinator", "decoding"),
    ("kill -9", "supervisor", "decoding"),
]


def check(cells: list[Cell]) -> None:
    bad = [cell for cell in cells if not cell.good]
    assert not bad, "\n" + render(bad)


@pytest.mark.parametrize("harm", ["none", "lost", "twice", "changed", "error", "unfinished", "held", "never there"])
def test_the_judge_sees_each_kind_of_harm(harm: str) -> None:
    """A table that cannot turn red would prove nothing."""
    body = make_bodies(1, prompt_tokens=20, answer_tokens=10)[0]
    tokens = expected(body)[0]
    outcome = Outcome({0: list(tokens)}, {0: "length"})
    if harm == "lost":
        outcome.tokens[0].pop()
    elif harm == "twice":
        outcome.tokens[0].append(tokens[-1])
    elif harm == "changed":
        outcome.tokens[0][2] += 1
    elif harm == "error":
        outcome.error = "reset"
    elif harm == "unfinished":
        outcome.finish.clear()
    seen = Seen(found=0 if harm == "never there" else 1)
    cell = judge([body], [outcome], ("kill -9", "decode", "decoding"), seen, int(harm == "held"))
    assert cell.good == (harm == "none")


@pytest.mark.prove  # the whole table is there too; the suite kills workers and gateways in tests of their own
def test_a_few_faults_under_a_few_streams() -> None:
    check(run_table(12, SMALL))


@pytest.mark.prove
def test_every_fault_at_every_hop_in_every_stage(pytestconfig: pytest.Config) -> None:
    before = os.getloadavg()[0]
    cells = run_table(64, product(FAULTS, HOPS, STAGES))
    table = render(cells)
    print("\n" + table)
    results = pytestconfig.rootpath / "bench" / "results"
    if results.is_dir():
        (results / "faults.md").write_text(_page(table, (before, os.getloadavg()[0])), "utf-8")
    check(cells)
    assert len(cells) == len(FAULTS) * len(HOPS) * len(STAGES)


def _page(table: str, load: tuple[float, float]) -> str:
    return f"""# Faults under 64 live streams

Written by `pytest -m prove tests/split/test_faults.py`: two prefill workers, two decode workers, two cache members,
two gateways, a coordinator with its standby and a supervisor as real processes over the fake engine. Tokens are
compared with those of an engine that ran alone. {os.cpu_count()} cores; load average {load[0]:.1f} at the start and
{load[1]:.1f} at the end of the run.

- *in stage*: choices seen in that stage by the last look before the fault; some may have moved on by the time it hit.
  *transferring* includes those that are packed and wait for a decode worker.
- *left*: clients that hung up. A client's disconnect concerns no particular process: its four hops are one experiment,
  repeated with other requests.
- *held*: blocks, leases and requests that nobody gave back; after a kill of the supervisor, processes that outlive it.
- *capacity*: from the fault until every process was there again, finding out included; – where no process was lost.
  Stopped cache members, standbys and supervisors are woken after a second: nobody looks for them. *of it back-off*:
  what the supervisor waited on purpose, longer each time a place falls again within ten seconds, as here.
- Where a gateway is struck, clients have idempotency keys: their streams are cut off, they ask again with the id of
  their last event, and must have every token once. A stopped gateway is killed by the supervisor; a cut one loses the
  connections of its clients.
- A cut of the supervisor is a cut of its line to one decode worker, which it then replaces; one of the coordinator that
  of the gateways' lines to it, one of the standby that of its log. A stopped coordinator is killed by its standby.

{table}
"""
