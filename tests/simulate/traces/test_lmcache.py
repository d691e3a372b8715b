"""LMCache's texts: lengths by a tokenizer, reuse by common prefixes, and what is wrong in words."""

from __future__ import annotations

import json

import pytest

from tripool.bench.trace import BadTrace, TraceRequest
from tripool.simulate.traces.lmcache import PIECE_CHARS, TextTrace

BASE = 1760428436442742


def line(**changes: object) -> str:
    fields = {"timestamp": BASE, "input": "one two three\n", "output": "four five", "session_id": 1} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def words(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def parse(*lines: str) -> list[TraceRequest]:
    return TextTrace(words).parse((f"line {n}", text) for n, text in enumerate(lines, 1))


def test_lengths_are_tokens_and_times_are_since_the_first() -> None:
    two, one = parse(line(timestamp=BASE + 2_500_000), "", line(input="a b"))[::-1]
    assert (one.arrival_s, one.input_tokens, one.output_tokens) == (0.0, 2, 2)
    assert (two.arrival_s, two.input_tokens) == (2.5, 3)


def test_prompts_share_blocks_as_far_as_their_tokens_agree() -> None:
    start = "".join(f"w{n} x\n" for n in range(100))  # 200 tokens: three blocks and a part
    one, two, three = parse(line(input=start), line(input=start + "more words"), line(input="other\n" + start))
    assert (len(one.block_ids), one.block_tokens) == (4, 64)
    assert one.block_ids[:3] == two.block_ids[:3] and one.block_ids[3] != two.block_ids[3]
    assert not set(one.block_ids) & set(three.block_ids)


def test_a_line_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return words(text)

    start = "system prompt\n" * 5 + "x " * PIECE_CHARS + "\n"
    TextTrace(encode).parse([("line 1", line(input=start)), ("line 2", line(input=start + "next\n"))])
    assert asked.count("system prompt\n") == 1 and max(map(len, asked)) == PIECE_CHARS


def test_messages_and_counted_answers() -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    one, two = parse(line(input=talk[:1], output=None, output_length=7), line(input=talk))
    assert one.output_tokens == 7 and two.input_tokens > one.input_tokens


def test_requests_without_an_answer_are_left_out_and_counted() -> None:
    texts = TextTrace(words)
    assert len(texts.parse([("line 1", line(output="")), ("line 2", line())])) == 1 and texts.num_unanswered == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "line 2 is not JSON"),
        (line(timestamp="now"), "line 2: timestamp is 'now'"),
        (line(input=7), "line 2: input is no text"),
        (line(input="  "), "line 2: input is empty"),
        (line(output=None), "line 2: output is no text"),
        (line(output=None, output_length="x"), "line 2: output_length is 'x'"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, told: str) -> None:
    with pytest.raises(BadTrace, match=told) as refused:
        parse(line(), text)
    assert refused.value.hint
