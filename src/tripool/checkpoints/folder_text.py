"""Text files of a Hugging Face folder: tokenizer, chat template, special tokens, and end-of-answer tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tripool.checkpoints.json_files import MAX_TOKENIZER_BYTES, parse_object, read_object_if_there, read_text
from tripool.errors import CheckpointCorrupt, CheckpointMissing
from tripool.text.files import TextFiles

_MAX_ID_CHARS = 10
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_text_files(folder: Path, config: Mapping[str, Any]) -> TextFiles:
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.exists():
        hint = "make it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...) into the folder"
        raise CheckpointMissing("the folder has no tokenizer", hint=hint, file=tokenizer_path)
    settings = read_object_if_there(folder / "tokenizer_config.json")
    generation = read_object_if_there(folder / "generation_config.json")
    special = _special_tokens(read_object_if_there(folder / "special_tokens_map.json")) | _special_tokens(settings)
    source = read_text(tokenizer_path, most_bytes=MAX_TOKENIZER_BYTES)
    tokenizer = parse_object(source, tokenizer_path)
    if _add_missing_tokens(tokenizer, settings.get("added_tokens_decoder"), tokenizer_path):
        source = json.dumps(tokenizer, ensure_ascii=False)
    end_ids = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    if "eos_token" in special:
        end_ids |= _ids(_token_id(tokenizer, special["eos_token"], tokenizer_path))
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is int:  # the network has no logits for larger ids
        end_ids = {token_id for token_id in end_ids if token_id < vocab_size}
    return TextFiles(
        tokenizer_json=source,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        end_ids=frozenset(end_ids),
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and similar, each either a string or an object with the string."""
    found = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if type(item) is int and item >= 0}


def _added_tokens(tokenizer: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(_is_token(token) for token in added):
        raise CheckpointCorrupt("added_tokens is malformed", hint="fetch the file again", file=path)
    return added


def _is_token(token: Any) -> bool:
    if not isinstance(token, dict):
        return False
    return type(token.get("id")) is int and token["id"] >= 0 and isinstance(token.get("content"), str)


def _token_id(tokenizer: Mapping[str, Any], content: str, path: Path) -> Any:
    for token in _added_tokens(tokenizer, path):
        if token["content"] == content:
            return token["id"]
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary.get(content) if isinstance(vocabulary, dict) else None


def _add_missing_tokens(tokenizer: dict[str, Any], decoder: Any, path: Path) -> bool:
    """Add tokens declared only in tokenizer_config.json; returns whether any was added."""
    if not isinstance(decoder, dict):
        return False
    added = _added_tokens(tokenizer, path)
    known_ids = {token["id"] for token in added}
    known_contents = {token["content"] for token in added}
    missing = [
        {"id": int(key), "content": token["content"]} | {flag: bool(token.get(flag, False)) for flag in TOKEN_FLAGS}
        for key, token in decoder.items()
        if key.isdecimal()
        and len(key) < _MAX_ID_CHARS
        and isinstance(token, dict)
        and isinstance(token.get("content"), str)
    ]
    missing = [token for token in missing if token["id"] not in known_ids and token["content"] not in known_contents]
    # The library numbers tokens in order of addition, so they must come in the order of their ids.
    tokenizer["added_tokens"] = sorted([*added, *missing], key=lambda token: token["id"])
    return bool(missing)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template file takes precedence over the settings, as in transformers; None if the model has no chat
    template.
    """
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return read_text(own_file)
    for value in (
        settings.get("chat_template"),
        read_object_if_there(folder / "chat_template.json").get("chat_template"),
    ):
        template = _named_default(value) if isinstance(value, list) else value
        if isinstance(template, str):
            return template
    return None


def _named_default(entries: Iterable[Any]) -> str | None:
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
