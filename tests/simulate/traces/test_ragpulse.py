"""RAGPulse's prompts: which lengths follow from the sums, what is estimated, and which blocks prompts share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tripool.bench.trace import BadTrace, measure_trace
from tripool.simulate.rng import Rng
from tripool.simulate.traces.ragpulse import KINDS, Component, Lengths, Prompt, parse_length, parse_prompt, to_requests


def line(**changes: object) -> str:
    ids = {"sys_prompt": [8, 9], "passages_ids": [70, 71], "history": [15], "web_search": [], "user_input": [26]}
    fields: dict[str, Any] = {"timestamp": "82", "input_length": 3112, "output_length": 192, "hash_ids": ids}
    return json.dumps({name: value for name, value in (fields | changes).items() if value is not None})


def prompt(num_tokens: int, *components: Component, at_s: float = 0.0) -> Prompt:
    return Prompt(at_s, num_tokens, 10, components)


def test_a_record() -> None:
    found = parse_prompt(line(session_id="x"), "line 1")
    assert (found.arrival_s, found.num_tokens, found.output_tokens) == (82.0, 3112, 192)
    assert found.components == ((0, 8), (0, 9), (1, 70), (1, 71), (2, 15), (4, 26))
    assert parse_prompt(line(timestamp=7), "line 1").arrival_s == 7.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (line(timestamp="noon"), "line 3: timestamp is 'noon'"),
        (line(timestamp=None), "line 3: timestamp is None"),
        (line(input_length="9"), "line 3: input_length is '9'"),
        (line(hash_ids=[1, 2]), "line 3: hash_ids is no object of sys_prompt, passages_ids"),
        (line(hash_ids={"poem": [1]}), "line 3: hash_ids is no object"),
        (line(hash_ids={"history": "15"}), "line 3: history is no list of integers"),
        ("{", "line 3 is not JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, told: str) -> None:
    with pytest.raises(BadTrace, match=told) as refused:
        parse_prompt(text, "line 3")
    assert refused.value.hint


def test_tables_of_lengths() -> None:
    assert parse_length('{"passage_id": 7, "token_length": 84}', "line 1") == ((1, 7), 84)
    with pytest.raises(BadTrace, match="line 1: token_length is None"):
        parse_length('{"passage_id": 7}', "line 1")
    with pytest.raises(BadTrace, match="names no component"):
        parse_length('{"token_length": 84}', "line 1")


def test_lengths_follow_from_prompts_that_share_components() -> None:
    system, one, two, question = (0, 1), (1, 2), (1, 3), (4, 4)
    prompts = [
        prompt(600, system, one, question),
        prompt(700, system, two, question),
        prompt(950, system, one, two, question),
    ]
    lengths = Lengths(prompts, {})
    assert (lengths[one], lengths[two]) == (250, 350)
    # The other two only come together: their sum is known, their lengths are not.
    assert (lengths.num_inferred, lengths.num_unknown) == (2, 2)
    assert Lengths([*prompts, prompt(60, question)], {}).num_unknown == 0


def test_published_lengths_come_first() -> None:
    lengths = Lengths([prompt(600, (0, 1), (4, 4))], {(0, 1): 512, (3, 99): 7})
    assert (lengths[0, 1], lengths[4, 4]) == (512, 88)
    assert (lengths.num_components, lengths.num_published, lengths.num_inferred) == (2, 1, 1)


def test_whatever_is_inferred_is_right() -> None:
    rng, inferred = Rng(3), 0
    for _ in range(60):
        true = {(kind, each): rng.between(0, 400) for kind in range(len(KINDS)) for each in range(4)}
        every = list(true)
        prompts = []
        for _ in range(rng.between(1, 25)):
            parts = [rng.pick(every) for _ in range(rng.between(1, 4))]
            prompts.append(prompt(max(1, sum(true[part] for part in parts)), *parts))
        prompts = [each for each in prompts if each.num_tokens == sum(true[part] for part in each.components)]
        if not prompts:
            continue
        lengths = Lengths(prompts, {})
        wrong = [part for each in prompts for part in each.components if lengths[part] != true[part]]
        assert len(set(wrong)) <= lengths.num_unknown
        inferred += lengths.num_inferred
    assert inferred > 200


def test_sums_that_contradict_each_other_are_no_lengths() -> None:
    lengths = Lengths([prompt(10, (0, 1)), prompt(5, (0, 1), (4, 2))], {})
    assert lengths.num_unknown >= 1 and lengths[4, 2] >= 0


def test_estimates_give_the_sums_and_what_all_share_its_part() -> None:
    rng, prompts = Rng(7), []
    for number in range(200):
        passages = [(1, rng.between(0, 60)) for _ in range(rng.between(1, 6))]
        length = 900 + sum(100 + 3 * each for _, each in passages) + 10
        prompts.append(prompt(length, (0, 1), *passages, (4, number)))
    lengths = Lengths(prompts, {})
    assert lengths.num_inferred == 0 and lengths[0, 1] == pytest.approx(900, rel=0.4)
    off = [abs(each.num_tokens - sum(lengths[part] for part in each.components)) for each in prompts]
    assert sum(off) / sum(each.num_tokens for each in prompts) < 0.03


def test_prompts_share_blocks_up_to_their_first_difference() -> None:
    lengths = {(0, 1): 130, (1, 2): 200, (1, 3): 200, (4, 4): 40, (4, 5): 41}
    prompts = [
        prompt(370, (0, 1), (1, 2), (4, 4), at_s=9.0),
        prompt(371, (0, 1), (1, 2), (4, 5), at_s=10.0),
        prompt(370, (0, 1), (1, 3), (4, 4), at_s=12.5),
        prompt(370, (0, 1), (1, 2), (4, 4), at_s=11.0),
    ]
    one, two, again, three = to_requests(prompts, Lengths(prompts, lengths))
    assert [each.arrival_s for each in (one, two, again, three)] == [0.0, 1.0, 2.0, 3.5]
    assert len(one.block_ids) == 370 // 64 and one.block_ids == again.block_ids
    assert one.block_ids[:5] == two.block_ids[:5]  # 320 of 330 equal tokens
    assert one.block_ids[:2] == three.block_ids[:2] and one.block_ids[2] != three.block_ids[2]
    assert measure_trace([one, two, again, three]).cached_share == pytest.approx((320 + 320 + 128) / 1481)


def test_estimates_never_exceed_a_prompt() -> None:
    prompts = [prompt(100, (0, 1), (1, 2)), prompt(5000, (0, 1), (1, 3))]
    assert [len(each.block_ids) for each in to_requests(prompts, Lengths(prompts, {(0, 1): 4000}))] == [1, 78]
