"""The layout of an explanation: whatever a server names is shown, and nothing that it says drives the terminal."""

import io

import pytest
from rich.console import Console

from tripool.cli.explain import render

TOLD = {
    "id": "cmpl-1",
    "state": "finished",
    "error": None,
    "api": "completions",
    "stream": True,
    "prompts": 1,
    "n": 1,
    "prompt_tokens": 1200,
    "cached_tokens": 960,
    "completion_tokens": 64,
    "draft_tokens": 10,
    "accepted_draft_tokens": 7,
    "finish_reasons": {"stop": 1},
    "timing": {
        "gateway": 1.0,
        "queue": 30.0,
        "lookup": 2.0,
        "prefill": 7.0,
        "transfer": 0.0,
        "decode": 60.0,
        "first_token": 40.0,
        "per_token": 0.9,
        "total": 100.0,
    },
    "placement": [],
}


def shown(**changes) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(render({**TOLD, **changes}))
    return console.file.getvalue()


def test_tokens_and_times_come_first():
    text = shown()
    assert text.startswith("cmpl-1: finished (1 stop), completions, streamed\n")
    assert "1,200 prompt tokens, 960 of them cached; 64 answered; 7 of 10 drafts accepted" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "60.0 ms" in lines["decode"] and lines["decode"].count("█") == 18
    assert lines["queue"].count("█") == 9
    assert "100.0 ms" in lines["total"]


def test_facts_of_any_name_are_shown_and_empty_ones_are_not():
    text = shown(placement=[{"invented tomorrow": 4200, "unknown": None, "steps": []}])
    assert "invented tomorrow" in text and "4,200" in text
    assert "unknown" not in text and "steps" not in text


def test_rows_become_a_table_without_columns_that_say_nothing():
    steps = [{"at ms": 1.5, "worker": "a", "held by": ""}, {"at ms": 1200.0, "worker": "b", "held by": "", "more": 1}]
    text = shown(placement=[{"steps": steps}])
    header = next(line for line in text.splitlines() if "at ms" in line)
    assert header.split() == ["at", "ms", "worker", "more"]
    assert "1,200.0" in text


def test_several_prompts_are_separated():
    text = shown(prompts=2, n=3, placement=[{"mode": "x"}, {"mode": "y"}])
    assert "prompt 0" in text and "prompt 1" in text
    assert "64 answered to 2 prompts in 3 choices each" in text


@pytest.mark.parametrize("state", ["open", "failed"])
def test_one_that_did_not_end_well_has_no_reasons(state):
    text = shown(state=state, finish_reasons={}, error="overloaded" if state == "failed" else None)
    assert text.startswith(f"cmpl-1: {state}" + (" (overloaded)" if state == "failed" else ","))


def test_a_name_cannot_drive_the_terminal():
    text = shown(id="cmpl-\x1b[2Jgone[red]", placement=[{"choice\x1b[0m": "[bold]as it is[/bold]"}])
    assert "\x1b" not in text
    assert "gone[red]" in text and "[bold]as it is[/bold]" in text
