from __future__ import annotations

import json

import pytest
import tokenizers

from tripool.checkpoints.folder_text import read_text_files
from tripool.errors import CheckpointCorrupt, CheckpointMissing


def put(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_tokens_may_be_text_or_objects(folder):
    put(folder, "special_tokens_map.json", {"eos_token": "<|old|>", "pad_token": {"content": "<|pad｜>"}})
    put(
        folder,
        "tokenizer_config.json",
        {"bos_token": {"content": "<|begin|>", "special": True}, "eos_token": "<|end|>"},
    )
    text = read_text_files(folder, {})
    assert text.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad｜>"}
    assert text.end_ids == {1}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {1, 7, 8, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": None}, {1, 7}),
        (None, {"eos_token_id": [3, 1]}, {1, 3}),
        (None, {}, {1}),
    ],
)
def test_end_tokens_are_the_union_of_all_that_is_said(folder, generation, config, expected):
    if generation is not None:
        put(folder, "generation_config.json", generation)
    assert read_text_files(folder, config).end_ids == expected


def test_ends_that_no_logit_stands_for_are_dropped(folder):
    put(folder, "generation_config.json", {"eos_token_id": [7, 10**6, 2**63]})
    assert read_text_files(folder, {"eos_token_id": 300, "vocab_size": 300}).end_ids == {1, 7}


def test_an_end_token_of_the_plain_vocabulary_is_found(folder, byte_level):
    put(folder, "tokenizer_config.json", {"eos_token": "q"})
    assert read_text_files(folder, {}).end_ids == {byte_level.token_to_id("q")}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "two"}, "two"),
        ({"chat_template.json": {"chat_template": "three"}}, "three"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
                }
            },
            "b",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "a"}]}}, "a"),
        ({"tokenizer_config.json": {"chat_template": []}}, None),
    ],
)
def test_the_chat_template_is_found_wherever_it_is(folder, files, expected):
    for name, value in files.items():
        put(folder, name, value)
    assert read_text_files(folder, {}).chat_template == expected


def test_tokens_declared_only_in_the_settings_are_added_in_order(folder, byte_level):
    size = byte_level.get_vocab_size()
    added = {
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<think>", "special": True},
        "0": {"content": "<|begin|>", "special": True},
    }
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = tokenizers.Tokenizer.from_str(read_text_files(folder, {}).tokenizer_json)
    assert tokenizer.encode("<think>a<tool>").ids == [size, tokenizer.token_to_id("a"), size + 1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"


def test_the_tokenizer_is_passed_on_unchanged(folder):
    assert read_text_files(folder, {}).tokenizer_json == (folder / "tokenizer.json").read_text()


def test_a_missing_tokenizer_says_how_to_make_one(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").touch()
    with pytest.raises(CheckpointMissing, match="save_pretrained") as caught:
        read_text_files(folder, {})
    assert caught.value.file == str(folder / "tokenizer.json")


@pytest.mark.parametrize("broken", ["{", "[]", '{"added_tokens": [{"id": 3}]}'])
def test_a_broken_tokenizer_is_named(folder, broken):
    put(folder, "tokenizer.json", broken)
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer\.json"):
        read_text_files(folder, {})
