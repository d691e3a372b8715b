"""Tokenizers that would end the process, or never end: refused when they are loaded, by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from tripool.checkpoints.gguf.pretokenizers import PRE_TOKENIZERS
from tripool.errors import CheckpointCorrupt, WrongArchitecture
from tripool.text import NotQuick, TextFiles, Tokenizer
from tripool.text.patterns import check_pattern
from tripool.text.tokenizer_checks import MAX_GROWTH, MAX_IDS

MODEL = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {"a": 0, "b": 1}, "merges": [],
}  # fmt: skip
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def source(**parts: Any) -> str:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    return json.dumps(
        {**empty, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": MODEL, **parts}
    )


def load(**parts: Any) -> Tokenizer:
    return Tokenizer(TextFiles(tokenizer_json=source(**parts)))


def replaces(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def sequence(what: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", what: list(parts)}


def template(pieces: list[dict[str, Any]], ids: list[int]) -> dict[str, Any]:
    special = {"a": {"id": "a", "ids": ids, "tokens": ["a"] * len(ids)}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special}


SPECIAL = {"SpecialToken": {"id": "a", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
HOSTILE: dict[str, dict[str, Any]] = {
    "replacements that multiply": {"normalizer": sequence("normalizers", *[replaces(1000)] * 4)},
    "one that is hidden deeper": {
        "normalizer": sequence("normalizers", sequence("normalizers", replaces(50)), replaces(50))
    },
    "an expression that matches nothing": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "x?"}, "content": "a" * 9999}
    },
    "bytes of bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 40)},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
    "a table of long texts": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(bytes(4) + b"a" * 99999 + b"\0").decode(),
        }
    },
    "tokens that multiply": {"decoder": sequence("decoders", *[replaces(1000)] * 4)},
    "tokens around a text": {"post_processor": template([SPECIAL] * 1000 + [TEXT], [0] * 100_000)},
    "a text that is repeated": {"post_processor": template([SPECIAL] + [TEXT] * 1000, [0])},
    "tokens that there are not": {"post_processor": template([SPECIAL, TEXT], [5])},
    "an id beyond all": {"model": {**MODEL, "vocab": {"a": 0, "b": 2**32 - 1}}},
    "an added id beyond all": {"added_tokens": [{"id": 2**31, "content": "x", **FLAGS}]},
    "no id": {"model": {**MODEL, "vocab": {"a": 0, "b": "1"}}},
    "a token without end": {"model": {**MODEL, "vocab": {"a": 0, "b" * 300_000: 1}}},
    "an added token without end": {"added_tokens": [{"id": 2, "content": "x" * 300_000, **FLAGS}]},
    "a prefix for every letter": {"model": {**MODEL, "continuing_subword_prefix": "x" * 10**6}},
    "too many parts": {"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 1000)},
    "a pattern that takes for ever": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(a|a)*c"}, "behavior": "Isolated", "invert": False
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_what_would_end_the_process_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt) as refused:
        load(**parts)
    assert refused.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**6, "[]", "null", '{"model": {"vocab": []}, "model": 1}', source(added_tokens=3),
        source(normalizer=[1]), source(normalizer={"type": "Sequence", "normalizers": 3}), source(post_processor=[1]),
        source(post_processor={"type": "Sequence", "processors": [[]]}), source(model={**MODEL, "vocab": 3}),
    ],
)  # fmt: skip
def test_malformed_files_are_refused_by_us_or_by_the_library(text: str) -> None:
    with pytest.raises((CheckpointCorrupt, WrongArchitecture)):
        Tokenizer(TextFiles(tokenizer_json=text))


def test_ordinary_parts_pass() -> None:
    tokenizer = load(
        normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "a"}, replaces(MAX_GROWTH)),
        post_processor=template([SPECIAL, TEXT], [1]),
        decoder=sequence("decoders", replaces(2), {"type": "Fuse"}),
    )
    assert tokenizer.encode("a") == [1, *[0] * 2 * MAX_GROWTH]
    assert tokenizer.longest_token_bytes == 2


def test_only_ids_that_exist_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(model={**MODEL, "vocab": {"a": 0, "b": MAX_IDS - 1}})
    seen: list[int] = []
    token_bytes: Callable[..., bytes] = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: (seen.append(i), token_bytes(self, i))[1])
    assert tokenizer.longest_token_bytes == 1
    assert sorted(seen) == [0, MAX_IDS - 1]


KNOWN = [
    *(step["pattern"]["Regex"] for one in PRE_TOKENIZERS.values() for step in one.steps if step["type"] == "Split"),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+(?!\S)|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?",
    r" ?[^(\s|[.,!?…。,、।۔،])]+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"(?=(\d{3})+(?!\d))",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s\p{L}\p{N}]++[\r\n]*",
    " {2,}",
]
ENDLESS = [
    "(a|a)*c", "(a*)*d", "(a+)+$", "(?:a|b){2,}c", "((a{200}){200}){200}", "a*a*a*a*b", r"(a)\1", r"(?<n>a)\k<n>",
    r"\g<0>", "(a*){9}", "(?~a)", "a{1000}", "((a|b)?)*c", "(a?){200}", "(a{1,200}){1,200}", "a{1,200}+c", "a**b",
    "x" * 10_000, "(" * 30 + ")" * 30, "[[a]", "(?:a+|b)+",
]  # fmt: skip


@pytest.mark.parametrize("pattern", KNOWN)
def test_patterns_of_published_tokenizers_pass(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_may_never_end_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="pattern"):
        check_pattern(pattern)


def test_unknown_patterns_run_outside_of_an_event_loop() -> None:
    def cutting(pattern: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    strange, known = load(pre_tokenizer=cutting("a*[bc]")), load(pre_tokenizer=cutting(r"\p{N}{1,3}"))
    assert len(strange.encode("a" * 1000)) == 1000
    assert strange.quick.encode("a") == [0]
    with pytest.raises(NotQuick):
        strange.quick.encode("a" * 1000)
    assert len(known.quick.encode("a" * 1000)) == 1000


def test_what_is_checked_is_what_the_library_loads() -> None:
    """Of two entries with one name, each side might take another."""
    twice = source().replace('"normalizer": null', '"normalizer": null, "normalizer": null')
    assert LibraryTokenizer.from_str(twice)
    with pytest.raises(CheckpointCorrupt, match="twice"):
        Tokenizer(TextFiles(tokenizer_json=twice))
