"""No valid request and no grammar fells a server, in one process or split. By hand, with other counts: `hammer.py`."""

from __future__ import annotations

import pytest

from robustness.hammer import Mode, hammer, judge
from robustness.random_requests import CHAT, Asked


@pytest.mark.parametrize(
    ("status", "text", "fine"),
    [
        (200, '{"choices": []}', True),
        (200, "half", False),
        (400, '{"error": {"message": "m", "type": "t", "code": "invalid_request"}}', True),
        (429, '{"error": {"message": "m", "type": "t", "code": "overloaded"}}', True),
        (400, "{}", False),
        (500, '{"error": {"message": "m", "type": "t", "code": "internal_error"}}', False),
        (503, '{"error": {"message": "m", "type": "t", "code": "engine_stopped"}}', False),
        (503, '{"error": {"message": "m", "type": "t", "code": "grammar_trial_failed"}}', True),
    ],
)
def test_the_judge_tells_a_refusal_from_harm(status: int, text: str, fine: bool) -> None:
    assert (judge(Asked(CHAT, {}), status, text) == "") == fine


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('data: {"choices": []}\n\ndata: [DONE]', True),
        ('data: {"choices": []}', False),
        ('data: {"choices": []}\n\ndata: {"error": {"message": "m", "code": "internal_error"}}\n\ndata: [DONE]', False),
    ],
)
def test_the_judge_reads_streams_to_their_end(text: str, fine: bool) -> None:
    assert (judge(Asked(CHAT, {"stream": True}), 200, text) == "") == fine


@pytest.mark.prove
@pytest.mark.parametrize("mode", ["colocated", "split"])
def test_nothing_falls_of_20000_requests_and_5000_grammars(mode: Mode) -> None:
    report = hammer("tiny", mode, requests=20_000, grammars=5_000, seed=17)
    print(f"\n{mode}\n{report.render()}")
    assert not report.harm, report.render()
    answered = sum(count for what, count in report.counts.items() if what.endswith(" 200") and what.startswith("/"))
    assert answered > 15_000, "most of them are valid"
