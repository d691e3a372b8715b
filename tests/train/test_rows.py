"""Documents as rows: the engine's own tokens, nothing lost or mixed up, and the right tokens counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.small import documents
from tripool.checkpoints import open_checkpoint
from tripool.text import TextFiles, Tokenizer
from tripool.train.batch import make_batch
from tripool.train.config import TrainError
from tripool.train.documents import digest, is_held_out, mixed, read_documents, split
from tripool.train.encode import ANSWER, CUT_TOKENS, PROMPT, SKIPPED, Encoded, Writer, encode_in_processes
from tripool.train.rows import NO_DOCUMENT, pack, rows_of_step

PAD = 5


@pytest.fixture(scope="module")
def text() -> TextFiles:
    with open_checkpoint("tiny") as checkpoint:
        return checkpoint.text


def chat(*turns: tuple[str, str], cut: bool = False) -> dict[str, Any]:
    return {"kind": "chat", "messages": [{"role": role, "content": said} for role, said in turns], "cut": cut}


def test_tokens_are_those_an_engine_is_asked_with(text: TextFiles) -> None:
    tokenizer = Tokenizer(text)
    for document, encoded in zip(some := documents(20), Writer(text).encode(some), strict=True):
        whole = tokenizer.encode_chat(document["messages"], add_generation_prompt=False)
        assert encoded.tokens.tolist() == whole[: -1 if document["cut"] else None]


def test_answers_and_their_ends_count_and_what_was_asked_counts_as_a_prompt(text: TextFiles) -> None:
    tokenizer = Tokenizer(text)
    document = chat(
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Ok"), ("assistant", "!")
    )
    (encoded,) = Writer(text).encode([document])
    answers = [
        tokenizer.token(t) for t, kind in zip(encoded.tokens.tolist(), encoded.kinds, strict=True) if kind == ANSWER
    ]
    assert answers == ["Hello", ".", "<|end|>", "!", "<|end|>"]
    assert encoded.kinds[0] == SKIPPED and (encoded.kinds[1:4] == PROMPT).all()


def test_a_cut_answer_has_no_end_and_its_last_words_do_not_count(text: TextFiles) -> None:
    said = "One day a small boat went out on the wide river and nobody knew where it would"
    whole, cut = Writer(text).encode([chat(("user", "Go on"), ("assistant", said), cut=c) for c in (False, True)])
    assert cut.tokens.tolist() == whole.tokens.tolist()[:-1]
    assert (cut.kinds[-CUT_TOKENS:] == SKIPPED).all() and cut.kinds[-CUT_TOKENS - 1] == ANSWER
    assert whole.kinds[-1] == ANSWER


def test_text_that_spells_a_special_token_is_left_out(text: TextFiles) -> None:
    assert Writer(text).encode([chat(("user", "Say <|end|>"), ("assistant", "No."))]) == []


def test_more_processes_give_the_same(text: TextFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.train.encode._BATCH", 40)
    some = documents(90)
    for one, other in zip(encode_in_processes(text, some, 1), encode_in_processes(text, some, 2), strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.kinds, other.kinds)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_loses_nothing_and_crosses_no_row(lengths: list[int]) -> None:
    row_tokens, at = 32, 100
    encoded = []
    for length in lengths:
        kinds = np.full(length, ANSWER, dtype=np.uint8)
        encoded.append(Encoded(np.arange(at, at + length, dtype=np.int32), kinds))
        at += length
    rows = pack(encoded, row_tokens, PAD)
    found = []
    for tokens, numbers, kinds in zip(rows.tokens, rows.documents, rows.kinds, strict=True):
        for number in range(int(numbers.max()) + 1):
            places = (numbers == number).nonzero().flatten()
            assert places.diff().eq(1).all(), "one piece"
            found.append((tokens[places].tolist(), kinds[places].tolist()))
        assert (tokens[numbers == NO_DOCUMENT] == PAD).all() and (kinds[numbers == NO_DOCUMENT] == SKIPPED).all()
    assert sorted(t for t, _ in found) == sorted(one.tokens[:row_tokens].tolist() for one in encoded)
    for tokens, kinds in found:
        too_long = (
            len(tokens) == row_tokens
            and next(n for n, e in zip(lengths, encoded, strict=True) if e.tokens[0] == tokens[0]) > row_tokens
        )
        assert kinds == [ANSWER] * (len(tokens) - CUT_TOKENS * too_long) + [SKIPPED] * CUT_TOKENS * too_long
    assert rows.num_tokens == sum(min(length, row_tokens) for length in lengths)


def test_nothing_is_wanted_across_documents(text: TextFiles) -> None:
    rows = pack(Writer(text).encode(documents(30)), 96, PAD)
    batch = make_batch(rows, torch.arange(len(rows)), 0.05, lambda numbers: numbers)
    numbers = rows.documents
    for target, distance in ((batch.next, 1), (batch.after_next, 2)):
        for row, place in target.weights.nonzero().tolist():
            assert numbers[row, place] == numbers[row, place + distance] != NO_DOCUMENT
            assert target.tokens[row, place] == rows.tokens[row, place + distance]
            kind = rows.kinds[row, place + distance]
            assert target.weights[row, place] == (1.0 if kind == ANSWER else pytest.approx(0.05))
        last = torch.cat((numbers[:, distance:] != numbers[:, :-distance], torch.ones(len(rows), distance) > 0), 1)
        assert (target.weights[last] == 0).all()


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 99))
def test_every_epoch_reads_every_row_once_in_an_order_of_its_own(num_rows: int, count: int, seed: int) -> None:
    steps = -(-3 * num_rows // count)
    read = torch.cat([rows_of_step(num_rows, count, step, seed) for step in range(steps)])[: 3 * num_rows].view(3, -1)
    assert read.sort(-1).values.tolist() == [list(range(num_rows))] * 3
    if num_rows > 12:  # twelve in the same order twice would be one chance in 479 million
        assert read[0].tolist() != read[1].tolist()


def test_one_in_two_hundred_is_held_out_by_its_text_alone() -> None:
    some = [chat(("user", f"Question {i}"), ("assistant", "Yes.")) for i in range(20_000)]
    parts = split(some)
    assert 60 <= len(parts.held_out) <= 140
    assert len(parts.train) + len(parts.held_out) == len(some)
    assert all(is_held_out(one | {"kind": "other", "cut": True}) for one in parts.held_out)


@given(st.floats(0, 5))
def test_a_kind_is_used_as_often_as_the_mix_says(weight: float) -> None:
    some = [chat(("user", f"Question {i}"), ("assistant", "Yes.")) for i in range(300)]
    used = mixed(some, {"chat": weight})
    assert abs(len(used) - 300 * weight) <= 45
    assert len({digest(one) for one in used}) == (300 if weight >= 1 else len(used))


def test_files_that_are_not_documents_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"no \*.jsonl"):
        read_documents(tmp_path)
    good = json.dumps(chat(("user", "Hi"), ("assistant", "Hello.")))
    for bad, said in (
        ("{", "not JSON"),
        ("[]", "not a document"),
        ('{"kind": "a", "messages": []}', "not a document"),
        ('{"kind": "a", "messages": [{"role": "robot", "content": "Hi"}]}', "not a document"),
        ('{"kind": "a", "messages": [{"role": "user", "content": 3}]}', "not a document"),
    ):
        (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n", encoding="utf-8")
        with pytest.raises(TrainError, match=f"line 2 .*{said}"):
            read_documents(tmp_path)
