"""`tripool simulate`: what it prints, and how it says that a rule is broken."""

from __future__ import annotations

import pytest

from tripool.cache import PoolIndex
from tripool.router.ledger import Ledger


def test_a_few_runs(tripool, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ran = tripool("simulate", "--faults", "--seeds", "3", "--workers", "1")
    assert ran.code == 0
    assert "finished" in ran.out and "kill" in ran.out and "events/s" in ran.out and "hung requests 0" in ran.out
    assert "3 runs" in ran.out


def test_several_processes_see_the_same(tripool, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a line that wraps would end elsewhere when the times in it grow

    def summary(workers):
        ran = tripool("simulate", "--faults", "--seeds", "4", "--workers", workers)
        return [line.partition(" in ")[0] for line in ran.out.splitlines() if " runs, " in line]

    assert summary("1") == summary("2") != []


def test_one_run_in_full(tripool):
    ran = tripool("simulate", "--seed", "1", "--trace")
    assert ran.code == 0 and "prefill-0.1 starts" in ran.out and "r0 arrives" in ran.out
    assert "fault" not in ran.out.partition("requests by outcome")[0], "without --faults nothing goes wrong"


@pytest.mark.parametrize("one", [("--seeds", "5", "--workers", "1"), ("--seed", "3")])
def test_a_broken_rule_is_named_with_its_seed(tripool, monkeypatch, one):
    monkeypatch.setattr(Ledger, "let_go", lambda self, choice: None)
    monkeypatch.setattr(PoolIndex, "check", lambda self: None)
    ran = tripool("simulate", "--faults", *one)
    assert ran.code == 1
    assert "breaks a rule" in ran.err and "replay it: tripool simulate --faults --seed" in ran.err
