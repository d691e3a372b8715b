"""Masks that mean what they say, forwards and back, at the ends above all."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar import Guide
from tripool.grammar.compiled import Compiled

from .counted import Counted
from .schemas import random_schema

ANYTHING = Structure("regex", r"(?s:.*)")


def text_ids(tokenizer, text):
    return tokenizer.encode(text, special=False)


def follow(guide, ids):
    for token in ids:
        assert guide.mask()[token]
        guide.accept(token)


def test_ends_are_allowed_exactly_when_the_text_is_complete(guide_of, tokenizer):
    (end,) = tokenizer.end_ids
    guide = guide_of(Structure("regex", "(ab)+"))
    states = []
    for char in "abab":
        states.append(bool(guide.mask()[end]))
        follow(guide, text_ids(tokenizer, char))
    assert states == [False, False, True, False]
    assert guide.mask()[end] and not guide.done


def test_done_means_that_only_an_end_can_follow(guide_of, tokenizer):
    (end,) = tokenizer.end_ids
    guide = guide_of(Structure("regex", "[0-9]{2}"))
    follow(guide, text_ids(tokenizer, "4"))
    assert not guide.done
    follow(guide, text_ids(tokenizer, "2"))
    assert guide.done and not guide.spent
    assert guide.mask().nonzero()[0].tolist() == [end]
    guide.accept(end)
    assert guide.done and guide.spent


def test_special_extra_and_foreign_ids_are_never_text(guide_of, tokenizer, num_ids):
    guide = guide_of(ANYTHING)
    mask = guide.mask()
    assert mask.shape == (num_ids,) and mask.dtype == np.bool_
    assert not mask[tokenizer.vocab_size :].any()
    assert {i for i in tokenizer.special_ids if mask[i]} == tokenizer.end_ids
    plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    assert mask[plain].mean() > 0.98  # what is missing cannot begin a character


def test_a_model_without_an_end_is_spent_when_it_is_done(guide_of, tokenizer):
    guide = guide_of(Structure("regex", "[0-9]{2}"), frozenset())
    follow(guide, text_ids(tokenizer, "42"))
    assert guide.done and guide.spent
    assert not guide.error


def test_stop_tokens_wait_for_a_complete_text(guide_of, tokenizer):
    """A stop token that is text elsewhere would cut the answer anywhere: it may stand for the end, and for no text."""
    (comma,) = text_ids(tokenizer, ",")
    structure = Structure("regex", "[0-9,]*[0-9]")
    assert guide_of(structure).mask()[comma]
    guide = guide_of(structure, tokenizer.end_ids | {comma})
    assert not guide.mask()[comma]
    follow(guide, text_ids(tokenizer, "7"))
    assert guide.mask()[comma]
    guide.accept(comma)
    assert guide.done and guide.spent


def test_a_stop_token_that_is_the_only_way_stays(guide_of, tokenizer):
    (comma,) = text_ids(tokenizer, ",")
    guide = guide_of(Structure("regex", ",+1"), tokenizer.end_ids | {comma})
    assert guide.mask().nonzero()[0].tolist() == [comma]
    guide.accept(comma)


def test_a_token_that_is_not_allowed_is_our_mistake(guide_of, tokenizer):
    guide = guide_of(Structure("choice", ["yes"]))
    with pytest.raises(AssertionError, match="not allowed"):
        guide.accept(text_ids(tokenizer, "no")[0])


@pytest.mark.parametrize("seed", range(12))
def test_the_same_tokens_lead_to_the_same_masks(guide_of, tokenizer, seed):
    """A second guide gives every mask of a random walk again, up to the end of the text."""
    rng = Random(seed)
    structure = Structure("json_schema", random_schema(rng)) if seed % 2 else Structure("regex", "([a-c]{1,9} ){3}x*")
    guide = guide_of(structure)
    likings = {text_ids(tokenizer, text)[0] for text in ('"', "}", "]")}
    tokens, masks = [], []
    while not guide.spent:
        masks.append(guide.mask().copy())
        allowed = guide.mask().nonzero()[0].tolist()
        wanted = [i for i in allowed if i in tokenizer.end_ids] or [i for i in allowed if i in likings]
        tokens.append(rng.choice(wanted if wanted and rng.random() < 0.7 else allowed))
        guide.accept(tokens[-1])
    assert tokens[-1] in tokenizer.end_ids
    again = guide_of(structure)
    for token, mask in zip(tokens, masks, strict=True):
        assert np.array_equal(again.mask(), mask)
        again.accept(token)
    assert again.done and again.spent


def test_guides_of_one_grammar_do_not_know_each_other(guide_of, tokenizer):
    structure = Structure("regex", "[ab]{3}")
    one, other = guide_of(structure), guide_of(structure)
    follow(one, text_ids(tokenizer, "ab"))
    assert not other.done and other.mask().sum() > one.mask().sum()


def test_a_text_that_looks_like_a_special_token_is_spelt_in_plain_ones(guide_of, tokenizer, walk):
    marks = ["<|end|>", "<|user|>now"]
    for mark in marks:
        assert walk(guide_of(Structure("choice", [mark])), Random(1)) == mark
    assert tokenizer.encode(marks[0], special=False) == list(tokenizer.end_ids)


def test_running_into_a_limit_is_the_end_and_not_a_success(guide_of, tokenizer):
    guide = guide_of(Structure("regex", r"((a{1,900}b){1,900}c){1,900}"))
    (a,) = text_ids(tokenizer, "a")
    while not guide.spent:
        guide.accept(a if guide.mask()[a] else int(guide.mask().nonzero()[0][0]))
    assert not guide.done and guide.error


def test_nothing_to_generate(guide_of):
    """The empty answer takes an end token; without one there is nothing that a step could give."""
    only_empty = Structure("regex", "()")
    assert guide_of(only_empty).done
    with pytest.raises(InvalidRequest, match="leaves nothing to generate"):
        guide_of(only_empty, frozenset())
    with pytest.raises(InvalidRequest, match="no text can satisfy it"):
        guide_of(Structure("regex", r"[^\s\S]"))


TOO_LARGE = Structure(
    "json_schema",
    {"anyOf": [{"type": "string"}, {"properties": {f"p{i}": {"type": "integer"} for i in range(505)}}]},
)
"""More ways on than llguidance bears, once an object is begun."""


@pytest.mark.parametrize("ends", [True, False], ids=["with an end", "without"])
def test_a_grammar_that_gives_up_leaves_an_answer_that_was_cut_off(guide_of, tokenizer, ends):
    guide = guide_of(TOO_LARGE, tokenizer.end_ids if ends else frozenset())
    (brace,) = text_ids(tokenizer, "{")
    assert guide.mask()[brace] and not guide.spent
    guide.accept(brace)
    assert guide.spent and not guide.done and "2000" in guide.error
    # Replayed from here, or asked once more: it takes anything, and what it offers is an end.
    offered = guide.mask().nonzero()[0].tolist()
    assert offered == sorted(tokenizer.end_ids) if ends else len(offered) == len(guide.mask())
    for token in (offered[0], brace):
        guide.accept(token)
        assert guide.spent and not guide.done


@pytest.fixture
def counts(compiler, text) -> tuple[Compiled, Counter[str]]:
    """Of a grammar that was just compiled."""
    outcome = compiler.prepare(Structure("regex", "[a-z ]{1,40}")).result(60)
    counts: Counter[str] = Counter()
    compiled = Compiled(Counted(outcome.matcher, counts), outcome.num_ids)
    counts.clear()
    return compiled, counts


def test_a_guide_costs_nothing_until_it_is_followed(counts, tokenizer):
    compiled, counted = counts
    guides = [Guide(compiled, tokenizer.end_ids) for _ in range(128)]
    assert not counted
    masks = [guide.mask() for guide in guides]
    assert all((mask == masks[0]).all() for mask in masks)
    assert not counted, "the first mask is that of the grammar, and computed with it"
    guides[0].accept(int(masks[0].argmax()))
    guides[0].mask()
    assert counted == {"deep_copy": 1, "consume_token": 1, "compute_bitmask": 1}
    assert guides[1].mask() is not guides[0].mask() and (guides[1].mask() == masks[1]).all()


def test_what_is_known_already_costs_no_masks(counts, tokenizer):
    compiled, counted = counts
    known = text_ids(tokenizer, "once upon a time")
    guide = Guide(compiled, tokenizer.end_ids, known)
    assert not counted
    mask = guide.mask()
    assert counted == {"deep_copy": 1, "consume_token": len(known), "compute_bitmask": 1}
    step_by_step = Guide(compiled, tokenizer.end_ids)
    follow(step_by_step, known)
    assert (step_by_step.mask() == mask).all()


def test_a_mask_says_how_long_it_took_and_before_it_the_grammar_says_it(counts, tokenizer):
    compiled, _ = counts
    compiled.mask_s = 7.0
    guide = Guide(compiled, tokenizer.end_ids)
    first = guide.mask()
    assert guide.mask_s == 7.0
    guide.accept(int(first.argmax()))
    guide.mask()
    assert 0.0 < guide.mask_s != 7.0
