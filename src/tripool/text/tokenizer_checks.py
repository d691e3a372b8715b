"""Checks a tokenizer.json before the `tokenizers` library loads it: its Rust code aborts when memory runs out.

So all factors by which a text may grow when encoded, or tokens when decoded, are multiplied and bounded, and so are
ids, which size arrays elsewhere. What the library does to every text (Unicode normalisation) is not counted.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tripool.errors import CheckpointCorrupt
from tripool.text.familiar_patterns import FAMILIAR
from tripool.text.patterns import check_pattern

MAX_IDS = 2**21
"""Published vocabularies have a quarter of a million tokens."""
MAX_TOKEN_CHARS = 2**12
MAX_ADDED_CHARS = 2**22
"""Of all added tokens, which one automaton searches for."""
MAX_GROWTH = 64
"""Growth factor; published tokenizers double at most."""
MAX_AROUND = 1024
"""Characters or tokens added before and after a text, whatever its length."""
_MAX_PARTS = 64
_MAX_WORD_CHARS = 10_000

_BYTES_AS_CHARS = 2
_HINT = "fetch the file again; if that does not help, do not trust this checkpoint"


def check_tokenizer(source: str) -> bool:
    """Raises CheckpointCorrupt; returns whether it splits texts by unknown patterns, whose run time is unknown."""
    try:
        tokenizer = json.loads(source, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"it is not JSON: {str(error)[:200]}") from error
    if not isinstance(tokenizer, dict):
        raise _corrupt("it is not an object")
    _check_ids(tokenizer)
    _check_model(tokenizer.get("model"))
    parts = [*_parts(tokenizer.get("normalizer")), *_parts(tokenizer.get("pre_tokenizer"))]
    _check_growth(parts, "normalizer")
    _check_growth(list(_parts(tokenizer.get("decoder"))), "decoder")
    _check_around(tokenizer.get("post_processor"), _num_ids(tokenizer))
    patterns = [part["pattern"].get("Regex") for part in parts if isinstance(part.get("pattern"), dict)]
    strange = {pattern for pattern in patterns if isinstance(pattern, str)} - FAMILIAR
    for pattern in strange:
        check_pattern(pattern)
    return bool(strange)


def _corrupt(problem: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"cannot read the tokenizer: {problem}", hint=_HINT, file="tokenizer.json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two entries with one name, the library might take the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names an entry twice")
    return found


def _vocabulary(tokenizer: Mapping[str, Any]) -> Any:
    model = tokenizer.get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _added(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise _corrupt("added_tokens is malformed")
    return added


def _num_ids(tokenizer: Mapping[str, Any]) -> int:
    vocabulary = _vocabulary(tokenizer)
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
    return 1 + max([*ids, *(token["id"] for token in _added(tokenizer))], default=-1)


def _check_ids(tokenizer: Mapping[str, Any]) -> None:
    vocabulary, added = _vocabulary(tokenizer), _added(tokenizer)
    if isinstance(vocabulary, dict):  # of a unigram model it is a list indexed by id
        for token, token_id in vocabulary.items():
            _check_token(token, token_id)
    elif isinstance(vocabulary, list):
        for i, entry in enumerate(vocabulary):
            _check_token(entry[0] if isinstance(entry, list) and entry else entry, i)
    elif vocabulary is not None:
        raise _corrupt("the vocabulary is malformed")
    for token in added:
        _check_token(token.get("content"), token.get("id"))
    if sum(len(token["content"]) for token in added) > MAX_ADDED_CHARS:
        raise _corrupt(f"its added tokens have more than {MAX_ADDED_CHARS} characters")


def _check_token(token: Any, token_id: Any) -> None:
    if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
        raise _corrupt(f"token {str(token_id)[:30]} is not a string of at most {MAX_TOKEN_CHARS} characters")
    if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
        raise _corrupt(f"the id of '{token[:50]}' is {str(token_id)[:30]}; ids run from 0 to {MAX_IDS - 1}")


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        return
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # added for every character of a text
        if isinstance(model.get(name), str) and len(model[name]) > MAX_GROWTH:
            raise _corrupt(f"its {name} is longer than {MAX_GROWTH} characters")
    word_chars = model.get("max_input_chars_per_word")
    if isinstance(word_chars, int) and word_chars > _MAX_WORD_CHARS:
        raise _corrupt(f"its max_input_chars_per_word is above {_MAX_WORD_CHARS}")


def _parts(description: Any) -> Iterator[dict[str, Any]]:
    """The parts in order, with sequences flattened."""
    open_, found = [description], 0
    while open_:
        part = open_.pop()
        if part is None:
            continue
        found += 1
        if not isinstance(part, dict) or found > _MAX_PARTS:
            raise _corrupt(
                f"a normalizer, pre_tokenizer or decoder is not an object, or has more than {_MAX_PARTS} parts"
            )
        inner = [part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part]
        for parts in inner:
            if not isinstance(parts, list):
                raise _corrupt("a sequence of its parts is not a list")
            open_ += reversed(parts)
        if not inner:
            yield part


def _check_growth(parts: list[dict[str, Any]], what: str) -> None:
    times, around = 1.0, 0
    for part in parts:
        times *= _growth(part)
        before = part.get("prepend")
        around += len(before) if isinstance(before, str) else 0
        if times > MAX_GROWTH or around > MAX_AROUND:
            raise _corrupt(f"its {what} makes texts more than {MAX_GROWTH} times as long")


def _growth(part: Mapping[str, Any]) -> float:
    match part:
        case {"type": "ByteLevel"}:
            return _BYTES_AS_CHARS
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return max(1, _longest_entry(charsmap))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new.encode(errors="replace")) / len(old.encode(errors="replace")))
        case {"type": "Replace", "content": str(new)}:  # an empty match inserts it between all characters
            return 1.0 + len(new)
    return 1.0


def _longest_entry(charsmap: Any) -> int:
    """Sentencepiece's table: the size of an index, the index, then replacements, each with a trailing zero."""
    try:
        table = base64.b64decode(charsmap) if isinstance(charsmap, str) else bytes(charsmap)
    except (binascii.Error, ValueError, TypeError) as error:
        raise _corrupt("its precompiled_charsmap is malformed") from error
    index_bytes = int.from_bytes(table[:4], "little")
    return max(map(len, table[4 + index_bytes :].split(b"\0")))


def _check_around(description: Any, num_ids: int) -> None:
    """The text is inserted once, with few and only known tokens around it."""
    processors = description.get("processors") if isinstance(description, dict) else None
    if processors is not None and not isinstance(processors, list):
        raise _corrupt("its post_processor is malformed")
    added = 0
    for processor in [description] if processors is None else processors:
        if not isinstance(processor, dict) or "processors" in processor:
            if processor is None:
                continue
            raise _corrupt("its post_processor is malformed")
        if processor.get("type") == "TemplateProcessing":
            added += _template_tokens(processor, num_ids)
        for name in ("sep", "cls"):  # ("</s>", 2)
            if isinstance(pair := processor.get(name), list):
                _check_known(pair[1:], num_ids)
    if added > MAX_AROUND:
        raise _corrupt(f"its post_processor adds more than {MAX_AROUND} tokens")


def _template_tokens(processor: Mapping[str, Any], num_ids: int) -> int:
    special = processor.get("special_tokens") or {}
    if not isinstance(special, dict):
        raise _corrupt("its post_processor is malformed")
    for token in special.values():
        ids = token.get("ids") if isinstance(token, dict) else None
        _check_known(ids if isinstance(ids, list) else [None], num_ids)
    most = 0
    for name in ("single", "pair"):
        pieces = processor.get(name) or []
        if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
            raise _corrupt("its post_processor is malformed")
        if sum("Sequence" in piece for piece in pieces) > 2:
            raise _corrupt("its post_processor repeats the text")
        names = [piece["SpecialToken"].get("id") for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
        most = max(most, sum(len(special[one]["ids"]) for one in names if isinstance(one, str) and one in special))
    return most


def _check_known(ids: list[Any], num_ids: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < num_ids:
            raise _corrupt(f"its post_processor adds token {str(token_id)[:30]}, which does not exist")
