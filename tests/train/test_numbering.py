"""Tokens numbered by use: the same text, cut the same way, the same logits; common tokens first, special ones fixed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from train.small import small_config, small_network
from tripool.checkpoints import open_checkpoint
from tripool.text import Tokenizer
from tripool.train.export import VOCABULARY, export, order_by_use, renumbered

TEXT = "The quick brown fox, 42 dogs: a caf\u00e9!"


def test_special_tokens_stay_and_common_ones_come_first() -> None:
    with open_checkpoint("tiny") as tiny:
        text = tiny.text
    vocab = Tokenizer(text).vocab_size
    counts = [(number * 7919) % 1000 for number in range(vocab)]
    order = order_by_use(text, counts)
    assert sorted(order) == list(range(vocab))
    fixed = [number for number, old in enumerate(order) if number == old and number < 6]
    assert fixed == list(range(6))
    assert all(counts[a] >= counts[b] for a, b in pairwise(order[6:]))
    old, new = Tokenizer(text), Tokenizer(renumbered(text, order))
    assert [order[number] for number in new.encode(TEXT, special=False)] == old.encode(TEXT, special=False)
    assert new.decode(new.encode(TEXT, special=False)) == TEXT


def test_an_export_has_its_rows_in_the_new_order_and_its_tokenizer_too(tmp_path: Path) -> None:
    config = small_config()
    network = small_network(config)
    with open_checkpoint("tiny") as tiny:
        text = tiny.text
    vocab = network.arch.vocab
    counts = [(number * 31) % 977 for number in range(vocab)]
    export(network, config.model, text, tmp_path, torch.float32, counts=counts)
    old, order = Tokenizer(text), order_by_use(text, counts)
    assert order != list(range(vocab))
    with open_checkpoint(tmp_path) as checkpoint:
        new = Tokenizer(checkpoint.text)
        for name, rows in zip(sorted(VOCABULARY), (network.head, network.embed), strict=True):
            stored = torch.empty(vocab, network.arch.hidden)
            checkpoint.read(name, stored)
            for before, after in zip(old.encode(TEXT, special=False), new.encode(TEXT, special=False), strict=True):
                assert torch.equal(stored[after], rows[before]), "the same token's row"
        assert checkpoint.text.end_ids == text.end_ids
