"""Prompts: equal names, equal tokens; prefixes repeat truly; lengths are what was asked for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench.endpoint import WORDS
from tripool.bench.prompts import MIN_POOL, ORDINARY_IDS, Piece, TextPrompts, TokenPrompts, choose_words
from tripool.engine.fake import fake_text
from tripool.text import Tokenizer

names = st.text(alphabet="ab ", max_size=4)
pieces = st.lists(st.builds(Piece, names, st.integers(0, 40)), min_size=1, max_size=6).map(tuple)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(pieces, st.integers(-3, 3))
def test_ids_have_the_exact_length(pieces, seed):
    ids = TokenPrompts(ORDINARY_IDS, seed).ids(pieces)
    assert len(ids) == sum(piece.num_tokens for piece in pieces)
    assert set(ids) <= set(ORDINARY_IDS)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(names, st.integers(0, 60), st.integers(0, 60))
def test_a_short_piece_begins_a_long_one(name, short, more):
    prompts, texts = TokenPrompts(range(1000), 7), TextPrompts(WORDS, 7)
    long_ids = prompts.ids((Piece(name, short + more),))
    assert prompts.ids((Piece(name, short),)) == long_ids[:short]
    assert texts.text((Piece(name, 1 + short + more),)).startswith(texts.text((Piece(name, 1 + short),)))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(pieces, pieces, pieces)
def test_equal_beginnings_give_equal_tokens_and_text(shared, one, other):
    prompts, texts = TokenPrompts(ORDINARY_IDS, 0), TextPrompts(WORDS, 0)
    length = sum(piece.num_tokens for piece in shared)
    assert prompts.ids(shared + one)[:length] == prompts.ids(shared + other)[:length] == prompts.ids(shared)
    start = texts.text((*shared, Piece("x", 1)))[: len(texts.text(shared)) if length else 0]
    assert texts.text(shared + one).startswith(start)


def test_different_blocks_differ_at_once():
    prompts = TokenPrompts(ORDINARY_IDS, 0)
    starts = {tuple(prompts.ids((Piece(f"block {block}", 8),))) for block in range(2000)}
    assert len(starts) == 2000
    other_seed = TokenPrompts(ORDINARY_IDS, 1).ids((Piece("block 0", 64),))
    assert other_seed != prompts.ids((Piece("block 0", 64),))


def test_the_same_everywhere():
    """Runs on two machines must send the same prompts, so this may never change."""
    assert TokenPrompts(ORDINARY_IDS, 0).ids((Piece("block 0", 6),)) == [148, 195, 67, 145, 51, 70]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(1, 200), st.integers(0, 30), st.integers(1, 4))
def test_text_makes_room_for_the_template(num_tokens, spare, word_tokens):
    text = TextPrompts(WORDS, 0, word_tokens=word_tokens, spare_tokens=spare).text((Piece("a", num_tokens),))
    expected = max(num_tokens - spare, word_tokens)
    assert len(text.split()) == min(expected, num_tokens) // word_tokens


def test_words_of_one_price():
    cheap = {f"w{i}": 1 for i in range(MIN_POOL)}
    assert choose_words(cheap | {"dear": 2}) == (tuple(cheap), 1)
    few = {"one": 1} | {f"w{i}": 3 for i in range(MIN_POOL)}
    assert choose_words(few)[1] == 3
    assert choose_words({"a": 2, "b": 0}) == (("a",), 2)


def test_words_keep_their_price_among_neighbours():
    """Against a real tokenizer: as many tokens as words, and shared pieces share their token ids."""
    tokenizer = Tokenizer(fake_text())
    words, price = choose_words({word: len(tokenizer.encode(" " + word)) for word in WORDS})
    prompts = TextPrompts(words, 3, word_tokens=price)
    one, other = (tokenizer.encode(prompts.text((Piece("s", 48), Piece(end, 10 * price)))) for end in "xy")
    assert len(one) == len(other) == 48 // price * price + 10 * price
    assert one[: 48 // price * price] == other[: 48 // price * price]
    assert one != other
