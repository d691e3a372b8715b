"""The network in training against the engine's and transformers': same weights, same logits, document by document."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oracle.close import assert_close
from oracle.drafts import DraftReference
from oracle.driving import deal_tables
from oracle.reference import Reference
from train.small import ROW_TOKENS, small_config, small_network
from tripool.checkpoints import open_checkpoint
from tripool.engine.runner import Runner, Work
from tripool.models import Model, load_model
from tripool.train.attention import MASKED, document_starts
from tripool.train.batch import wanted
from tripool.train.export import SHARD_BYTES, export, published
from tripool.train.network import Network
from tripool.train.rows import NO_DOCUMENT

NUM_BLOCKS = 6


@dataclass
class Exported:
    network: Network
    folder: Path
    model: Model
    prompt: list[int]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    config = small_config()
    network = small_network(config)
    folder = tmp_path_factory.mktemp("exported")
    with open_checkpoint("tiny") as tiny:
        export(network, config.model, tiny.text, folder, torch.float32)
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, dtype=torch.float32)
    rng = random.Random(3)
    return Exported(network, folder, model, [rng.randrange(8192) for _ in range(ROW_TOKENS)])


@torch.no_grad()
def trained_logits(network: Network, tokens: list[int], documents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a single row: what it says next, and after that."""
    numbers = torch.tensor([documents], dtype=torch.int16)
    states = network(torch.tensor([tokens]), MASKED.sight(numbers), numbers != NO_DOCUMENT)
    assert states.mtp is not None
    return network.logits(states.hidden)[0], network.logits(states.mtp)[0]


def test_logits_have_spread(exported: Exported) -> None:
    """Else agreement would prove little."""
    said, _ = trained_logits(exported.network, exported.prompt, [0] * ROW_TOKENS)
    assert said.std(-1).mean() > 1 and said.std(0).mean() > 1
    assert len(said.argmax(-1).unique()) > 20


def test_logits_are_the_engines(exported: Exported) -> None:
    ours, _ = trained_logits(exported.network, exported.prompt, [0] * ROW_TOKENS)
    runner = Runner(exported.model, num_blocks=NUM_BLOCKS, mtp=True)
    table = deal_tables([ROW_TOKENS], NUM_BLOCKS, random.Random(0))[0]
    assert_close(ours, runner.logits(runner.hidden([Work(exported.prompt, 0, table, False)])))


def test_mtp_logits_are_those_of_the_engines_draft_layer(exported: Exported) -> None:
    _, ours = trained_logits(exported.network, exported.prompt, [0] * ROW_TOKENS)
    runner = Runner(exported.model, num_blocks=NUM_BLOCKS, mtp=True)
    table = deal_tables([ROW_TOKENS], NUM_BLOCKS, random.Random(1))[0]
    hidden = runner.hidden([Work(exported.prompt, 0, table, False)])
    drafted = runner.logits(runner.mtp_hidden([Work(exported.prompt[1:], 1, table, False)], hidden[:-1]))
    assert_close(ours[:-1], drafted)


def test_logits_are_transformers(exported: Exported) -> None:
    reference = Reference.load(exported.folder)
    ours, drafted = trained_logits(exported.network, exported.prompt, [0] * ROW_TOKENS)
    assert_close(ours, reference.logits(exported.prompt))
    assert_close(drafted[:-1], DraftReference(reference).logits(exported.prompt))


def test_documents_of_a_row_do_not_see_each_other(exported: Exported) -> None:
    lengths = [1, 30, 2, 41]
    tokens = exported.prompt[: sum(lengths)] + [5] * (ROW_TOKENS - sum(lengths))
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)]
    numbers += [NO_DOCUMENT] * (ROW_TOKENS - len(numbers))
    packed, packed_mtp = trained_logits(exported.network, tokens, numbers)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        filled = tokens[here] + [5] * (ROW_TOKENS - length)
        only = [0] * length + [NO_DOCUMENT] * (ROW_TOKENS - length)
        alone, alone_mtp = trained_logits(exported.network, filled, only)
        assert_close(packed[here], alone[:length])
        if length > 1:  # the last token has no successor
            assert_close(packed_mtp[here][:-1], alone_mtp[: length - 1])
        start += length


def test_starts_of_documents_are_where_the_numbers_change() -> None:
    numbers = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.int16)
    assert document_starts(numbers, 8).tolist() == [0, 2, 3, 4, 5, 8, 12, 12, 12]
    assert document_starts(numbers, 6).tolist() == [0, 2, 3, 4, 5, 8, 12]


def test_what_is_wanted_two_on_is_the_token_after_the_next_of_the_same_document() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 20, 21, 5, 5]])
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, -1, -1]])
    weights = torch.tensor([[0.0, 0.5, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    one, two = wanted(tokens, numbers, weights, 1), wanted(tokens, numbers, weights, 2)
    assert one.weights.tolist() == [[0.5, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    assert two.weights.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert one.tokens[0, :3].tolist() == [11, 12, 13] and two.tokens[0, :2].tolist() == [12, 13]


def test_export_holds_every_weight_once_and_in_shards_of_bounded_size(exported: Exported) -> None:
    counted = sum(weight.numel() for weight in exported.network.parameters())
    counted += sum(experts.bias.numel() for experts in exported.network.experts())
    assert sum(values.numel() for _, values in published(exported.network)) == counted
    with open_checkpoint(exported.folder) as checkpoint:
        names = set(checkpoint.infos())
    assert names == {name for name, _ in published(exported.network)}
    assert "model.layers.2.mlp.gate.e_score_correction_bias" in names
    for file in exported.folder.glob("*.safetensors"):
        assert file.stat().st_size < 15_000_000
    assert SHARD_BYTES < 15_000_000


def test_large_exports_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.train.export.SHARD_BYTES", 200_000)
    config = small_config()
    network = small_network(config)
    with open_checkpoint("tiny") as tiny:
        export(network, config.model, tiny.text, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with open_checkpoint(tmp_path) as checkpoint:
        for name, values in published(network):
            held = torch.empty(values.shape)
            checkpoint.read(name, held)
            stored = values if name.endswith("bias") else values.to(torch.bfloat16).float()
            assert torch.equal(held, stored.detach()), name
