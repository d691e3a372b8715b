"""On the 8-bit path a row's logits are the same to the bit: alone, in any batch and order, however it was chunked."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tripool.checkpoints import open_checkpoint
from tripool.engine.runner import Runner, Work
from tripool.kernels import CPU8
from tripool.kernels.cpu8.library import set_threads
from tripool.models import Model, load_model
from tripool.text import Tokenizer

TEXT = """The lighthouse stood at the end of the long stone pier, and every evening the keeper climbed its stairs to
light the lamp. He had done so for thirty years. On clear nights he could see the fishing boats come home, one by one,
and he knew each of them by the sound of its engine. On foggy nights he saw nothing at all, but he rang the bell, twice
every minute, until the sun came up. "Somebody has to do it," he used to say when people asked him whether he was not
lonely. One winter a storm broke the bell, and the keeper walked down to the village to find the smith. The smith looked
at the crack and shook her head. It would take a week, she said, and there were no two ways about it. So for a week the
children of the village took turns beating an old iron pot at the end of the pier, and not one boat was lost."""

TALKS = (
    ("Hello!", "Hi there! It's nice to meet you. How can I help you today?"),
    ("Why do birds sing?", "Birds sing to find a mate and to tell other birds that a place is theirs. Many of them "
     "sing most in the morning, when the air is still and their songs can be heard from far away."),
    ("Tell me a story about a fox named Mira.", "Once upon a time there was a brave fox named Mira who lived in a "
     "green forest. One day Mira heard someone call for help. A duck had fallen into a hole. Mira was a little afraid, "
     "but she wanted to help. It took a long time, but in the end the duck was safe. \"Thank you,\" said the duck."),
    ("How do I make tea?", "1. Boil some water in a kettle.\n2. Put a tea bag into a cup.\n3. Pour the hot water over "
     "it.\n4. Wait for three minutes and take the bag out."),
    ("I feel sad today.", "I'm sorry to hear that. It is fine to feel sad sometimes. Would you like to talk about it?"),
    ("What is 12 plus 30?", "12 plus 30 is 42."),
)  # fmt: skip
"""What the bundled model can read: of other text its perplexity is near a thousand, and says nothing of rounding."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small only lose time to a second thread; the test that wants two asks for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_threads(1)
    yield
    set_threads(1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[Model, Model, list[int]]]:
    with open_checkpoint("tiny") as checkpoint:
        ids = Tokenizer(checkpoint.text).encode(TEXT)
        yield load_model(checkpoint, kernels=CPU8), load_model(checkpoint), ids


def logits(runner: Runner, ids: list[int], table: list[int], cuts: list[int], prompt_len: int) -> torch.Tensor:
    """Of every position, computed in pieces that end at `cuts`, prompt form before `prompt_len`, decode form after."""
    edges = sorted({0, *cuts, prompt_len, len(ids)})
    pieces = [Work(ids[a:b], a, table, a >= prompt_len) for a, b in pairwise(edges)]
    return torch.cat([runner.logits(runner.hidden([piece])) for piece in pieces])


def test_any_chunking_gives_the_same_bits(tiny):
    model, _, ids = tiny
    table = [4, 0, 2, 5]
    whole = logits(Runner(model, num_blocks=6), ids, table, [], 130)
    rng = random.Random(3)
    for cuts in ([1], [64], [65], [63, 64], *([rng.sample(range(1, len(ids)), 9) for _ in range(4)])):
        assert torch.equal(logits(Runner(model, num_blocks=6), ids, table, cuts, 130), whole)
    one_by_one = logits(Runner(model, num_blocks=6), ids, [1, 2, 3, 4], list(range(130, len(ids))), 130)
    assert torch.equal(one_by_one, whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_company_gives_the_same_bits(tiny, threads):
    """64 sequences at different places, prompts and decodes mixed, in shuffled order and in batches of every size."""
    set_threads(threads)
    model, _, ids = tiny
    rng = random.Random(5)
    runner = Runner(model, num_blocks=64 * 3)
    works = []
    for i in range(64):
        prompt, table = rng.randrange(1, 120), [i, 64 + i, 128 + i]
        decode = i % 3 > 0
        sequence = ids[i % 40 :]
        runner.hidden([Work(sequence[:prompt], 0, table, False)])
        count = 1 if decode else rng.choice([1, 5, 40])
        works.append(Work(sequence[prompt : prompt + count], prompt, table, decode))
    alone = [runner.logits(runner.hidden([work])) for work in works]
    for size in (2, 3, 8, 33, 64) if threads == 1 else (2, 64):
        order = rng.sample(range(64), size)
        together = runner.logits(runner.hidden([works[i] for i in order]))
        assert torch.equal(together, torch.cat([alone[i] for i in order]))


def losses(model: Model, ids: list[int]) -> torch.Tensor:
    """Of each token after the first."""
    runner = Runner(model, num_blocks=8)
    rows = runner.logits(runner.hidden([Work(ids, 0, list(range(8)), False)])).log_softmax(-1)
    return -rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def perplexity(model: Model, ids: list[int]) -> float:
    return math.exp(losses(model, ids).mean())


def test_eight_bits_cost_less_than_a_percent_of_perplexity(tiny):
    eight, full, _ = tiny
    with open_checkpoint("tiny") as checkpoint:
        tokenizer = Tokenizer(checkpoint.text)
    roles = ("user", "assistant")
    talk = [{"role": role, "content": said} for pair in TALKS for role, said in zip(roles, pair, strict=True)]
    ids = tokenizer.encode_chat(talk, add_generation_prompt=False)
    exact = losses(full, ids)
    assert exact.mean().exp() < 30 and len(ids) > 250
    lost = losses(eight, ids) - exact
    # Each loss moves by some per cent, up or down as the last bits fall, and those are other ones on other CPUs:
    # of so few tokens the mean is known to its standard error.
    error = float(lost.std()) / len(lost) ** 0.5
    assert error < 0.02 and abs(float(lost.mean())) < 0.01 + 2 * error


@pytest.mark.prove
def test_eight_bits_cost_smollm2_less_than_a_percent_of_perplexity():
    """Needs the package index. Prints the figure; the texts are ours, so they are in nobody's training data."""
    root = Path(__file__).parents[2]
    prose = [TEXT, *((root / name).read_text("utf-8") for name in ("README.md", "docs/decisions.md", "docs/walk.md"))]
    with open_checkpoint("smollm2") as checkpoint:
        tokenizer = Tokenizer(checkpoint.text)
        eight, full = load_model(checkpoint, kernels=CPU8), load_model(checkpoint)
    pieces = [ids[i : i + 512] for ids in map(tokenizer.encode, prose) for i in range(0, len(ids), 512)]
    pieces = [piece for piece in pieces if len(piece) > 64]
    losses = [[len(piece) * math.log(perplexity(model, piece)) for piece in pieces] for model in (eight, full)]
    count = sum(map(len, pieces))
    ratio = math.exp((sum(losses[0]) - sum(losses[1])) / count)
    print(f"SmolLM2 in 8 bits: perplexity x {ratio:.4f} over {count} tokens")
    assert ratio == pytest.approx(1.0, abs=0.01)
