"""The engine's step on CUDA against the float32 path on the CPU, on the bundled model: same tokens, with drafts or not.

    python3 bench/gpu/engine_cuda.py [--json FILE] [--commit ID] [--toy]

Agreement is the share of greedy tokens up to each answer's first difference, over all answers. In float32 (the bar:
99 %) and, for information, in bfloat16 with Triton kernels; with the checkpoint's own integers through our INT8
kernels; and with the same model written in e4m3 by blocks through torch's FP8 products. For these also the share of
next tokens that are float32's along float32's own answers. Drafts on must equal drafts off, greedy and sampled. A
batch that shrinks by one request at a time takes a captured step of every size, and the kernels of `kernels/cuda` are
compared with their plain forms on odd sizes, outputs poisoned. Tokens come from the executor that serves.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TOY = "--toy" in sys.argv
if TOY:
    os.environ["TRITON_INTERPRET"] = "1"

import timing  # noqa: E402
import torch  # noqa: E402
from driving import Batch, Driven  # noqa: E402
from fp8_folder import write_fp8  # noqa: E402
from timing import Row  # noqa: E402

from tripool.checkpoints import Checkpoint, FolderCheckpoint, open_checkpoint  # noqa: E402
from tripool.engine.device import DeviceSpec, table_of  # noqa: E402
from tripool.engine.device_runner import DeviceRunner  # noqa: E402
from tripool.engine.runner import Runner  # noqa: E402
from tripool.kernels.cuda.make import all_rows, sorted_rows  # noqa: E402
from tripool.kernels.cuda.table import OnDevice  # noqa: E402
from tripool.models import Model, load_model  # noqa: E402
from tripool.sequence import Work  # noqa: E402
from tripool.text import TextFiles, Tokenizer  # noqa: E402

QUESTIONS = (
    "Tell me a story about a fox named Mira.",
    "Write a short story about a robot called Otto.",
    "Tell me a story about Ben, a brave boy who lost a kite.",
    "Tell me a story about a bear and a small bird.",
    "Write a story about a girl named Anna and her dog.",
    "Please tell me a story about a boat.",
    "Tell me a short story about a kind owl named Tom.",
    "Write a story about Clara, a shy baker who finds a golden key.",
)
"""Their answers are longer than what is compared: past its end, an answer is nothing that was ever trained."""
KINDS = {
    "cuda-float32": "float32",
    "cuda-bfloat16": "bfloat16",
    "cuda-bfloat16-I8": "own int8",
    "cuda-bfloat16-F8_E4M3": "fp8 by blocks",
}
BLOCKS_EACH = 6
ODD_SIZES = [(64, 6, 64, 2048, 1408), (1, 6, 64, 2048, 1408), (33, 3, 7, 200, 72), (128, 8, 16, 512, 256)]
"""Rows, choices, experts, hidden, width."""
DEVICE = "cpu" if TOY else "cuda"
HALF = torch.float16 if TOY else torch.bfloat16
"""Triton 3.6's interpreter cannot multiply bfloat16."""


def encoded(text: TextFiles) -> list[list[int]]:
    tokenizer = Tokenizer(text)
    return [tokenizer.encode_chat([{"role": "user", "content": asked}]) for asked in QUESTIONS]


def tables(count: int) -> list[list[int]]:
    """Blocks without order: a table must be followed, not guessed."""
    blocks = torch.randperm(count * BLOCKS_EACH, generator=torch.Generator().manual_seed(3)).tolist()
    return [blocks[i * BLOCKS_EACH : (i + 1) * BLOCKS_EACH] for i in range(count)]


def stepwise(runner: Runner, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Greedy by steps through a runner: the reference."""
    places = tables(len(prompts))
    work = [Work(list(p), 0, table, False) for p, table in zip(prompts, places, strict=True)]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        ends = torch.tensor([len(piece.tokens) for piece in work]).cumsum(0) - 1
        tokens = runner.logits(runner.hidden(work)[ends]).argmax(-1).tolist()
        work = [Work([token], piece.stop, piece.table, True) for token, piece in zip(tokens, work, strict=True)]
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    return answers


def served(
    model: Model, prompts: Sequence[list[int]], counts: Sequence[int], *, mtp: bool, temperature: float = 0.0
) -> Driven:
    lengths = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    batch = Batch(DeviceSpec(torch.device(DEVICE), dtype_of(model)), model, lengths, mtp=mtp)
    return batch.run(prompts, counts, temperature)


def dtype_of(model: Model) -> torch.dtype:
    return model.logits(torch.zeros(1, model.arch.hidden, device=DEVICE)).dtype  # 8 bits come out in 16


def runner_of(model: Model, requests: int) -> DeviceRunner:
    return DeviceRunner(
        model, num_blocks=requests * BLOCKS_EACH, device=DEVICE, dtype=dtype_of(model), mtp=model.mtp is not None
    )


def agreed(ours: Sequence[list[int]], reference: Sequence[list[int]]) -> float:
    """Share of tokens up to each answer's first difference."""
    same = 0
    for mine, theirs in zip(ours, reference, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
    return same / sum(map(len, ours))


def alike_along(runner: Runner, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """Share of the answers' tokens that this says too, each after the answer's own ones before it."""
    same = 0
    for prompt, answer, table in zip(prompts, answers, tables(len(prompts)), strict=True):
        hidden = runner.hidden([Work(list(prompt) + answer[:-1], 0, table, False)])[len(prompt) - 1 :]
        same += sum(a == b for a, b in zip(runner.logits(hidden).float().argmax(-1).tolist(), answer, strict=True))
    return same / sum(map(len, answers))


WAYS = {
    "float32": DeviceSpec(torch.device(DEVICE), torch.float32),
    "bfloat16": DeviceSpec(torch.device(DEVICE), torch.bfloat16),
    "8 bits": DeviceSpec(torch.device(DEVICE), torch.bfloat16, use_8_bit_products=True),
}


def on_device(checkpoint: Checkpoint, way: str) -> tuple[str, Model]:
    """And what its table is called."""
    place = WAYS[way]
    table = table_of(place, checkpoint)
    return table.name, load_model(checkpoint, place.dtype, kernels=table, store=OnDevice(DEVICE))


def model_rows(name: str, folder: Path | None, count: int) -> list[Row]:
    with (
        open_checkpoint("tiny") if folder is None else FolderCheckpoint(folder) as checkpoint,
        tempfile.TemporaryDirectory() as scratch,
    ):
        prompts = encoded(checkpoint.text)
        plain = load_model(checkpoint)
        models = dict(on_device(checkpoint, way) for way in WAYS)
        with FolderCheckpoint(write_fp8(checkpoint, Path(scratch))) as fp8:
            models |= [on_device(fp8, "8 bits")]
    reference = stepwise(Runner(plain, num_blocks=len(prompts) * BLOCKS_EACH), prompts, count)
    rows = []
    for table, model in models.items():
        kind = KINDS[table]
        bar = 1.0 if kind == "float32" else None
        rows.append(
            _share(
                f"{name}, {kind}: next token as the CPU's float32's",
                alike_along(runner_of(model, len(prompts)), prompts, reference),
                0.99,
                bar,
                f"{model.num_bytes / 1e6:.1f} MB of weights",
            )
        )
        counts = [count] * len(prompts)
        shrinking = [max(1, count - i) for i in range(len(prompts))]
        off, on = (served(model, prompts, counts, mtp=mtp) for mtp in (False, True))
        every_size = served(model, prompts, shrinking, mtp=False)
        hot = [served(model, prompts, counts, mtp=mtp, temperature=0.8).answers for mtp in (False, True)]
        rows += [
            _share(f"{name}, {kind}: greedy as the CPU's float32", agreed(off.answers, reference), 0.99, bar),
            _share(
                f"{name}, {kind}: the same, captured steps of every size",
                agreed(every_size.answers, reference),
                0.99,
                bar,
            ),
            _share(
                f"{name}, {kind}: drafts on = off, greedy",
                agreed(on.answers, off.answers),
                1.0,
                bar,
                f"{off.num_steps} steps became {on.num_steps}",
            ),
            _share(f"{name}, {kind}: drafts on = off, temperature 0.8", agreed(hot[1], hot[0]), 1.0, bar),
        ]
    return rows


def _share(name: str, ours: float, peer: float, target: float | None, note: str = "") -> Row:
    return Row(name=name, ours=ours, peer=peer, unit="of tokens", target=target, note=note)


def kernel_rows() -> list[Row]:
    """Relative error against the plain forms, in float32 where they can."""
    from tripool.kernels.triton.experts import routed_experts
    from tripool.kernels.triton.norm_quant import quantise_rows

    rows = []
    sizes = (
        ((3, 2, 5, 48, 32),)
        if TOY
        else ((64, 6, 64, 2048, 1408), (1, 6, 64, 2048, 1408), (33, 3, 7, 200, 72), (128, 8, 16, 512, 256))
    )
    for count, top_k, experts, hidden, width in sizes:
        x, gate_up, down = (
            torch.randn(shape, device=DEVICE).to(HALF) / shape[-1] ** 0.5
            for shape in ((count, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
        )
        x = x * hidden**0.5
        chosen = torch.rand(count, experts, device=DEVICE).topk(top_k).indices
        weights = torch.rand(count, top_k, device=DEVICE)
        exact = all_rows(x.double(), chosen, weights.double(), gate_up.double(), down.double())
        junk = torch.full((64 << (2 if TOY else 20),), float("nan"), device=DEVICE)  # what the next allocations find
        del junk
        for form in (routed_experts,) if TOY else (routed_experts, sorted_rows):
            error = float((form(x, chosen, weights, gate_up, down).double() - exact).norm() / exact.norm())
            name = f"{form.__name__} {count} × {top_k} of {experts}, {hidden}→{width}: relative error"
            rows.append(Row(name=name, ours=error, peer=1e-2, unit="", target=1.0, lower_is_better=True))
    y = torch.randn(5, 16384 if not TOY else 96, device=DEVICE).to(torch.bfloat16)
    q, scale = quantise_rows(y)
    error = float(((q.float() * scale[:, None] - y.float()).abs() / scale[:, None]).max())
    rows.append(
        Row(
            name="quantise_rows: largest error in steps",
            ours=error,
            peer=0.51,
            unit="",
            target=1.0,
            lower_is_better=True,
        )
    )
    return rows


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--toy", action="store_true", help="on a CPU, few tokens")
    parser.add_argument("--model", type=Path, help="a checkpoint folder to check beside the bundled model")
    asked = parser.parse_args()
    if TOY:
        from toy import patch_interpreter

        patch_interpreter()
    began, count = time.monotonic(), 6 if TOY else 96
    with torch.inference_mode():
        rows = kernel_rows() + model_rows("bundled tiny", None, count)
        if asked.model is not None:
            rows += model_rows(asked.model.name, asked.model, count)
    origin = timing.Origin("a toy on a CPU", "none") if TOY else timing.gpu_origin(asked.commit)
    timing.print_rows(rows, origin)
    print(f"{time.monotonic() - began:.0f} s")
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
