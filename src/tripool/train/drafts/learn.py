"""From a trained model to one with better drafts: it answers questions, then its MTP layer learns from what it said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.engine.device import Place
from tripool.models.load import arch_of
from tripool.train.config import TrainError
from tripool.train.device import Tell, choose_device, choose_way
from tripool.train.drafts.lesson import ROW_TOKENS, Lesson
from tripool.train.drafts.loss import Scores
from tripool.train.drafts.questions import questions
from tripool.train.drafts.speaker import Speaker
from tripool.train.encode import Encoded
from tripool.train.export import export, fill
from tripool.train.metrics import said
from tripool.train.network import Network, trainable
from tripool.train.plan import Optimise
from tripool.train.rows import pack
from tripool.train.run import MODEL_FOLDER

_SPEAKING = 0.6
"""Share of the minutes that goes into answers."""
_CLOSING_S = 8.0
"""Kept for the last look and the export."""
_LINE_S = 10.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is asked and learned: by the clock, or by number."""

    minutes: float | None = None
    answers: int = 512
    steps: int = 100

    def __post_init__(self) -> None:
        if self.minutes is not None and self.minutes <= 0:
            raise TrainError(f"{self.minutes:g} minutes", hint="give more than 0", key="--minutes")
        for name in ("answers", "steps"):
            if getattr(self, name) < 1:
                raise TrainError(f"{getattr(self, name)} {name}", hint="give at least 1", key=f"--{name}")


def learn_drafts(
    model: str, out: Path, amount: Amount, *, seed: int = 0, tell: Tell = print, clock: Clock = time.monotonic
) -> tuple[Scores, Scores]:
    """Scores on answers that were not learned from, before and after. `out/model` is whole when this returns."""
    began_s = clock()
    device = choose_device()
    with open_checkpoint(model) as checkpoint:
        _check(checkpoint)
        quiet_s = ends_s = None
        if amount.minutes is not None:
            ends_s = began_s + 60 * amount.minutes - _CLOSING_S
            quiet_s = began_s + _SPEAKING * (ends_s - began_s)
        rows = pack(_answers(model, device, amount.answers, seed, quiet_s, tell, clock), ROW_TOKENS, pad=0)
        if len(rows) < 2:
            raise TrainError(
                "too few answers to learn from some and be judged on others", hint="ask for more", key="--answers"
            )
        plan = _plan(device, amount.steps, seed)
        config = dict(checkpoint.config)
        arch = arch_of(config, checkpoint.name)
        way = choose_way(device, trainable(arch), (rows,), plan.rows_per_pass, tell)
        network = Network(arch, way.attend, ROW_TOKENS)
        fill(network, checkpoint)
        out.mkdir(parents=True, exist_ok=True)
        lesson = Lesson(network.to(device), way, rows.to(device), plan, out)
        before = lesson.held_out()
        tell(f"before: {before}")
        steps = lesson.run(ends_s, tell, clock)
        after = lesson.held_out()
        tell(f"after {steps} steps: {after}")
        dtype = torch.float32 if config.get("torch_dtype") == "float32" else torch.bfloat16
        export(network, config, checkpoint.text, out / MODEL_FOLDER, dtype)
    tell(f"exported to {out / MODEL_FOLDER} after {said(clock() - began_s)}")
    return before, after


def _check(checkpoint: Checkpoint) -> None:
    arch, file = arch_of(checkpoint.config, checkpoint.name), checkpoint.path
    trainable(arch)
    if not arch.mtp_layers:
        raise TrainError("has no MTP layer", hint="train it with num_nextn_predict_layers = 1", file=file)
    if checkpoint.config.get("quantization_config"):
        hint = "give it as it was before quantising, and quantise what comes out"
        raise TrainError("is quantised", hint=hint, file=file)


def _plan(device: torch.device, steps: int, seed: int) -> Optimise:
    cuda = device.type == "cuda"
    rows = 32 if cuda else 4
    return Optimise(
        steps=steps,
        rows_per_step=rows,
        rows_per_pass=rows,
        peak_lr=1e-3 if cuda else 6e-4,  # a larger step is surer of its direction
        final_lr_share=0.02,
        warmup_steps=20,
        beta_2=0.98,
        weight_decay=0.0,
        seed=seed,
    )


def _answers(
    model: str, device: torch.device, count: int, seed: int, quiet_s: float | None, tell: Tell, clock: Clock
) -> list[Encoded]:
    """Until `quiet_s`; without it, `count` of them."""
    cuda = device.type == "cuda"
    place = Place(device, torch.bfloat16 if cuda else torch.float32)
    speaker = Speaker(place, model, rows=2048 if cuda else 16, seed=seed)
    asked, found = questions(seed), list[Encoded]()
    began_s = told_s = clock()

    def line(now_s: float) -> str:
        tokens = _num_tokens(found)
        return f"{len(found):,} answers, {tokens:,} tokens, {tokens / max(now_s - began_s, 1e-9):,.0f} tokens/s"

    while (len(found) < count) if quiet_s is None else (not found or clock() < quiet_s):
        found += speaker.answers(asked)
        if (now_s := clock()) - told_s >= _LINE_S:
            told_s = now_s
            tell(line(now_s))
    tell(line(clock()))
    return found if quiet_s is not None else found[:count]


def _num_tokens(encoded: Sequence[Encoded]) -> int:
    return sum(len(one.tokens) for one in encoded)
