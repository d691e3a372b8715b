"""The loop that answers the draft lessons' questions, on a CPU: the text of the float32 path, one token at a time."""

from __future__ import annotations

import random

import pytest
import torch

from tiny.drafts.decode_loop import DecodeLoop
from tripool.checkpoints import open_checkpoint
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.noise import draw, noise_key, stream_base, token_hashes
from tripool.engine.runner import Runner
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.models import Model, load_model
from tripool.sequence import Work
from tripool.text import Tokenizer

pytestmark = pytest.mark.prove  # only `make tiny` runs this code

NUM_BLOCKS, COUNT = 24, 24
ASKED = ("Tell me a story about a fox named Mira.", "Hello!", "Name the days of the week. " * 10, "Who are you?")


def one_by_one(model: Model, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    hashes, answers = token_hashes(model.arch.vocab), []
    for choice, prompt in enumerate(prompts):
        runner, answer = Runner(model, num_blocks=4), []
        work = Work(list(prompt), 0, [0, 1, 2, 3], False)
        while len(answer) < COUNT:
            row = runner.logits(runner.hidden([work])[-1:])[0]
            if temperature:
                answer.append(draw(row, temperature, noise_key(11, choice, len(answer)), hashes))
            else:
                answer.append(int(row.argmax()))
            work = Work(answer[-1:], len(prompt) + len(answer) - 1, [0, 1, 2, 3], True)
        answers.append(answer)
    return answers


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_loop_says_what_single_steps_say(temperature: float) -> None:
    with open_checkpoint("tiny") as checkpoint:
        device = load_model(checkpoint, kernels=cuda_table(torch.float32, fused=False), store=OnDevice("cpu"))
        plain, tokenizer = load_model(checkpoint), Tokenizer(checkpoint.text)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": asked}]) for asked in ASKED]
    blocks = random.Random(8).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    runner = DeviceRunner(device, num_blocks=NUM_BLOCKS, device="cpu", dtype=torch.float32)
    loop = DecodeLoop(runner, [blocks[i * 4 : i * 4 + 4] for i in range(len(prompts))], count=COUNT)
    loop.sample_with([temperature] * len(prompts), [stream_base(11, i) for i in range(len(prompts))])
    expected = one_by_one(plain, prompts, temperature)
    assert loop.run(prompts, chunk_tokens=70) == expected
    assert loop.run(prompts) == expected, "a second run starts anew"
