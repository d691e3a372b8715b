"""The teacher's rows against transformers: whatever shares the batch, whenever a slot was refilled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny.distil.script import Ask, Said
from tiny.distil.teacher import Sampling, Teacher
from tiny.distil.weights import Weights, load_weights, open_parts
from tripool.checkpoints import open_checkpoint

PLACES = 48
ENDS = frozenset(range(5, 61, 6))
GREEDY = Sampling(penalty=1.0, min_p=0.1, end_ids=ENDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.4,
    )  # fmt: skip
    network = LlamaForCausalLM(shape).eval()
    folder = tmp_path_factory.mktemp("llama")
    network.save_pretrained(folder)
    return network, folder


@pytest.fixture(scope="module")
def weights(model: tuple[LlamaForCausalLM, Path]) -> Weights:
    with open_checkpoint(str(model[1])) as checkpoint:
        return load_weights(checkpoint, device="cpu", dtype=torch.float32, places=PLACES)


def by_transformers(network: LlamaForCausalLM, ask: Ask) -> tuple[list[int], bool]:
    ids = list(ask.ids)
    for _ in range(ask.max_tokens):
        with torch.inference_mode():
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ENDS:
            return ids[len(ask.ids) : -1], False
    return ids[len(ask.ids) :], True


def answer_all(teacher: Teacher, asks: list[Ask]) -> dict[int, Said]:
    """As the sampler does it: slots are refilled as soon as they are free."""
    waiting, where, answers = list(enumerate(asks)), {}, {}
    while waiting or where:
        filled = list(zip(teacher.free, waiting, strict=False))
        waiting = waiting[len(filled) :]
        where |= {slot: number for slot, (number, _) in filled}
        teacher.fill([(slot, ask) for slot, (_, ask) in filled])
        teacher.run()
        for said in teacher.collect():
            answers[where.pop(said.slot)] = said
    return answers


def some_asks() -> list[Ask]:
    draw = torch.Generator().manual_seed(9)
    lengths = [1, 2, 7, 3, 19, 5, 11, 4, 2]
    return [Ask(torch.randint(6, 61, (n,), generator=draw).tolist(), 6 + n % 9, 0.0) for n in lengths]


def test_greedy_answers_are_those_of_transformers(model: tuple[LlamaForCausalLM, Path], weights: Weights) -> None:
    asks = some_asks()
    answers = answer_all(Teacher(weights, GREEDY, rows=4, places=PLACES, steps=5, fast=False), asks)
    expected = [by_transformers(model[0], ask) for ask in asks]
    assert [(answers[n].ids, answers[n].cut) for n in range(len(asks))] == expected
    assert {cut for _, cut in expected} == {True, False}, "the case must hold both endings"


def test_a_warm_answer_depends_on_the_seed_and_is_repeatable(weights: Weights) -> None:
    def sample(seed: int) -> list[int]:
        sampling = Sampling(min_p=0.0, seed=seed)
        teacher = Teacher(weights, sampling, rows=2, places=PLACES, steps=4, fast=False)
        return answer_all(teacher, [Ask([7, 8, 9], 30, 3.0)])[0].ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_large_penalty_never_says_a_token_twice_unless_it_is_exempt(weights: Weights) -> None:
    penalised = torch.ones(61, dtype=torch.bool)
    penalised[30:] = False
    sampling = Sampling(penalty=1e6, min_p=0.5, penalised=penalised)
    (said,) = answer_all(
        Teacher(weights, sampling, rows=1, places=PLACES, steps=8, fast=False), [Ask([7, 8], 40, 0.0)]
    ).values()
    once = [token for token in said.ids if penalised[token]]
    assert len(set(once)) == len(once)
    assert len(said.ids) == 40, "nothing else may end it"


def test_a_row_never_outgrows_its_places(weights: Weights) -> None:
    sampling = Sampling(penalty=1.0)
    teacher = Teacher(weights, sampling, rows=1, places=PLACES, steps=7, fast=False)
    (said,) = answer_all(teacher, [Ask([9] * 40, 1000, 0.0)]).values()
    assert said.cut and len(said.ids) == PLACES - 40


def test_parts_are_one_file(tmp_path: Path, model: tuple[LlamaForCausalLM, Path]) -> None:
    whole = b"GGUF" + bytes(range(200))
    for number, piece in enumerate((whole[:50], whole[50:])):
        (tmp_path / f"part{number}").write_bytes(piece)
    seen = {}

    def opened(path: str) -> object:
        seen["bytes"] = Path(path).read_bytes()
        return open_checkpoint(str(model[1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny.distil.weights.open_checkpoint", opened)
        with open_parts([tmp_path / "part0", tmp_path / "part1"]):
            pass
    assert seen["bytes"] == whole
