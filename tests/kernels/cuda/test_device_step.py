"""The CUDA table and runner on a CPU: the same code without graphs and Triton, against the float32 CPU path."""

from __future__ import annotations

import random

import pytest
import torch

from oracle.close import assert_close
from tripool.checkpoints import open_checkpoint
from tripool.engine import device_runner as device_runner_module
from tripool.engine.device_runner import DeviceRunner, Size
from tripool.engine.device_segments import ROWS
from tripool.engine.runner import Runner
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.models import Model, load_model
from tripool.sequence import Work
from tripool.text import Tokenizer

NUM_BLOCKS = 24
ASKED = ("Tell me a story about a fox named Mira.", "Hello!", "Name the days of the week. " * 10, "Who are you?")


def prompts() -> list[list[int]]:
    """Of lengths that cross no block, and one that does; what follows can be guessed, so that drafts come true."""
    with open_checkpoint("tiny") as checkpoint:
        tokenizer = Tokenizer(checkpoint.text)
    return [tokenizer.encode_chat([{"role": "user", "content": asked}]) for asked in ASKED]


PROMPTS = prompts()


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    """The bundled model through the CPU table and through the CUDA one."""
    with open_checkpoint("tiny") as checkpoint:
        device = load_model(checkpoint, kernels=cuda_table(torch.float32, fused=False), store=OnDevice("cpu"))
        return load_model(checkpoint), device


def device_runner(model: Model) -> DeviceRunner:
    return DeviceRunner(model, num_blocks=NUM_BLOCKS, device="cpu", dtype=torch.float32, mtp=True)


def tables(rng: random.Random) -> list[list[int]]:
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [blocks[i * 4 : i * 4 + 4] for i in range(len(PROMPTS))]


def test_mixed_steps_agree_with_the_cpu_path(models: tuple[Model, Model]) -> None:
    """Prompt pieces, decode pieces of one, two and three rows, in any order: same hidden states row by row."""
    rng = random.Random(3)
    cpu, device = Runner(models[0], num_blocks=NUM_BLOCKS, mtp=True), device_runner(models[1])
    block_tables = tables(rng)
    for step in range(7):
        work = []
        for i, prompt in enumerate(PROMPTS):
            known = list(prompt) + [rng.randrange(8192) for _ in range(40)]
            start = len(prompt) + 3 * (step - 1) if step else 0
            count = len(prompt) if step == 0 else (i % 3) + 1 if step < 5 else 1
            work.append(Work(known[start : start + count], start, block_tables[i], step > 0))
        if step == 0:
            work.reverse()
        ours, reference = device.hidden(work), cpu.hidden(work)
        torch.testing.assert_close(ours, reference, atol=2e-4, rtol=1e-3)
        shifted = [Work(w.tokens, w.start + 1, w.table, w.decode) for w in work]
        torch.testing.assert_close(
            device.mtp_hidden(shifted, ours), cpu.mtp_hidden(shifted, reference), atol=2e-4, rtol=1e-3
        )


def test_a_captured_size_is_used_for_smaller_batches_too(models: tuple[Model, Model]) -> None:
    """Three requests in a step of four: rows that fill it up change nothing and write to nobody's block."""
    runner = device_runner(models[1])
    block_tables = tables(random.Random(1))
    runner.hidden([Work(p, 0, t, False) for p, t in zip(PROMPTS, block_tables, strict=True)])
    before = runner.kv.clone()
    three = [Work([50 + i], len(PROMPTS[i]), block_tables[i], True) for i in range(3)]
    together = runner.hidden(three)
    written = (runner.kv != before).any(-1).any(0).nonzero()[:, 0].tolist()
    own = {block_tables[i][len(PROMPTS[i]) // 64] * 64 + len(PROMPTS[i]) % 64 for i in range(3)}
    assert own <= set(written) <= own | set(range(NUM_BLOCKS * 64, (NUM_BLOCKS + 1) * 64))
    alone = torch.cat([runner.hidden([piece]) for piece in three])
    assert_close(together, alone)


def test_experts_in_sorted_rows_equal_every_expert_over_every_row() -> None:
    from tripool.kernels.cuda.make import all_rows, sorted_rows

    rng = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(torch.bfloat16)

    x, gate_up, down = normal(33, 64), normal(8, 96, 64) / 8, normal(8, 64, 48) / 7
    chosen = torch.rand(33, 7, generator=rng).topk(3).indices  # nobody chooses the last
    weights = torch.rand(33, 3, generator=rng)
    ours, plain = sorted_rows(x, chosen, weights, gate_up, down), all_rows(x, chosen, weights, gate_up, down)
    error = (ours - plain).float().norm() / plain.float().norm()
    assert error < 1e-2


def test_warming_up_takes_every_size_and_touches_nobodys_block(models: tuple[Model, Model]) -> None:
    runner = device_runner(models[1])
    runner.kv[:, : NUM_BLOCKS * 64] = 7.0
    told: list[str] = []
    runner.warm(20, 100, told.append)
    assert (runner.kv[:, : NUM_BLOCKS * 64] == 7.0).all()
    sizes = {(size.requests, size.queries, kind) for size, kind in runner._steps}
    steps = {("hidden", 1), ("hidden", 2), ("mtp", 1), ("mtp", 2), ("logits", 1)}
    assert sizes == {(n, queries, kind) for n in (1, 2, 4, 8, 16, 32) for kind, queries in steps}
    assert told[-1] == "warming up, 21 of 21"  # and prompts of 16, 32, 64 and 100 tokens, of one less, and of 96
    block_tables = tables(random.Random(2))
    before = len(runner._steps)
    runner.kv.zero_()
    runner.hidden([Work(p, 0, t, False) for p, t in zip(PROMPTS[:2], block_tables, strict=False)])
    runner.hidden([Work([5], len(p), t, True) for p, t in zip(PROMPTS[:2], block_tables, strict=False)])
    assert len(runner._steps) == before, "a short context finds its step"


def test_captured_steps_are_bounded_and_the_last_used_ones_stay(
    models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runner_module, "_MAX_STEPS", 3)
    runner, block_tables = device_runner(models[1]), tables(random.Random(4))
    runner.kv.zero_()
    alone = runner.hidden([Work([7], 0, block_tables[0], True)])
    for count in (2, 3, 1, 5, 9):  # of sizes 2, 4, 1, 8, 16
        together = runner.hidden([Work([7], 0, block_tables[i % 4], True) for i in range(count)])
        assert_close(together[:1], alone)
        assert len(runner._steps) <= 3
    assert [size.requests for size, _ in runner._steps] == [1, 8, 16]


def test_a_table_reaches_as_far_as_the_length_of_its_request() -> None:
    """A request of one row beside one of two is given a length of two: its table must cover that position too."""
    work = [Work([5], 63, [0], True), Work([5, 6], 3, [1], True)]
    assert Size.of(work, 9, lambda width: width).width == 2
    assert Size.of(work[:1], 9, lambda width: width).width == 1


def test_contexts_up_to_8192_tokens_need_no_capture_while_serving() -> None:
    with open_checkpoint("tiny") as checkpoint:
        table = cuda_table(torch.bfloat16, fused=False)
        model = load_model(checkpoint, torch.bfloat16, kernels=table, store=OnDevice("cpu"))
    runner = DeviceRunner(model, num_blocks=NUM_BLOCKS, device="cpu", dtype=torch.bfloat16)
    runner.warm(3, 16)
    before = set(runner._steps)
    assert {size.requests for size, _ in before} == {1, 2, 4}
    for length in (0, 1, 511, 512, min(8192, model.arch.context_tokens) - 1):
        runner.step_logits([Work([5], length, [NUM_BLOCKS] * (length // 64 + 1), True)] * 3, range(3))
    assert set(runner._steps) == before


def test_every_size_of_a_prompt_step_is_captured_before_serving(models: tuple[Model, Model]) -> None:
    model = models[1]
    runner = DeviceRunner(model, num_blocks=NUM_BLOCKS, device="cpu", dtype=torch.float32)
    runner.warm(2, 100)
    assert runner._segments is not None
    assert set(runner._segments._steps) >= {rows for rows in ROWS if rows <= 96}
