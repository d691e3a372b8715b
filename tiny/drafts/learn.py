"""From a trained model to one whose drafts come true more often: it answers questions, then its MTP layer learns from
what it said. If that layer is not better on other answers, the old one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from tiny.drafts.lesson import LINE_S, ROW_TOKENS, Lesson
from tiny.drafts.loss import Scores
from tiny.drafts.questions import questions
from tiny.drafts.speaker import ANSWER_TOKENS, PROMPT_TOKENS, Speaker
from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.engine.device import DeviceSpec
from tripool.models.arch import Arch
from tripool.models.load import arch_of
from tripool.text import Tokenizer
from tripool.train.config import TrainError
from tripool.train.device import Tell, choose_device, choose_way
from tripool.train.encode import Encoded
from tripool.train.export import STORED, fill, published, write_model
from tripool.train.metrics import FILE as METRICS
from tripool.train.metrics import said
from tripool.train.network import Network, trainable
from tripool.train.plan import Optimise
from tripool.train.rows import pack
from tripool.train.run import MODEL_FOLDER

_SPEAKING = 0.6
"""Share of the minutes that goes into answers."""
_CLOSING_S, _LEAST_MINUTES = 8.0, 0.25
"""Kept for the last look and the export; and what loading, closing and one round of answers take anyway."""
_STATES_BYTES = {"cuda": 16 << 30, "cpu": 2 << 30}
"""Most that is spent on final states: the model stops speaking when its answers would need more."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is asked and learned: by the clock, or by number."""

    minutes: float | None = None
    answers: int = 512
    steps: int = 100

    def __post_init__(self) -> None:
        if self.minutes is not None and not _LEAST_MINUTES <= self.minutes < inf:
            raise TrainError(f"{self.minutes:g} minutes", hint=f"give at least {_LEAST_MINUTES:g}", key="--minutes")
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
        arch = _check(checkpoint, seed)
        _prepare(out)
        quiet_s = ends_s = None
        if amount.minutes is not None:
            ends_s = began_s + 60 * amount.minutes - _CLOSING_S
            quiet_s = began_s + _SPEAKING * (ends_s - began_s)
        limit = Limit(None if quiet_s else amount.answers, quiet_s, _STATES_BYTES[device.type] // (4 * arch.hidden))
        rows = pack(_answers(model, device, limit, seed, tell, clock), ROW_TOKENS, pad=0)
        if len(rows) < 2:
            hint = "some are learned from, others judged by: ask for more, or give more time"
            raise TrainError("too few answers", hint=hint)
        plan = _plan(device, amount.steps, seed)
        way = choose_way(device, trainable(arch), (rows,), plan.rows_per_pass, tell)
        network = Network(arch, way.attend, ROW_TOKENS)
        fill(network, checkpoint)
        lesson = Lesson(network.to(device), way, rows.to(device), plan, out)
        old, before = lesson.layer(), lesson.held_out()
        tell(f"before: {before}")
        steps = lesson.run(ends_s, tell, clock)
        after = lesson.held_out()
        tell(f"after {steps} steps: {after}")
        if not after.divergence < before.divergence:
            lesson.put_back(old)
            tell("no better than before: the old layer stays. More answers and steps may help")
        _write(checkpoint, network, out / MODEL_FOLDER)
    tell(f"exported to {out / MODEL_FOLDER} after {said(clock() - began_s)}")
    return before, after


def _check(checkpoint: Checkpoint, seed: int) -> Arch:
    arch, file = arch_of(checkpoint.config, checkpoint.name), checkpoint.path
    trainable(arch)
    if not arch.mtp_layers:
        raise TrainError("has no MTP layer", hint="train it with num_nextn_predict_layers = 1", file=file)
    in_floats = {info.dtype for info in checkpoint.infos().values()} <= STORED.keys()
    if checkpoint.config.get("quantization_config") or not in_floats:
        hint = "give it as it was before quantising, and quantise what comes out"
        raise TrainError("is quantised", hint=hint, file=file)
    if (least := PROMPT_TOKENS + ANSWER_TOKENS) > arch.context_tokens:
        raise TrainError(f"has a context of {arch.context_tokens} tokens", hint=f"{least} are needed", file=file)
    if (known := Tokenizer(checkpoint.text).vocab_size) > arch.vocab:
        raise TrainError(f"has {arch.vocab} tokens, its tokenizer {known}", hint="they must be one model's", file=file)
    if not 0 <= seed < 2**31:
        raise TrainError(f"is {seed}", hint="it must be from 0 to 2^31 - 1", key="--seed")
    return arch


def _prepare(out: Path) -> None:
    """What is there stays: it may be the model that was given."""
    if (out / MODEL_FOLDER).exists() or (out / METRICS).exists():
        raise TrainError("holds a model or a run", hint="give another --out", file=out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"cannot be made: {error}", hint="give another --out", file=out) from error


def _write(checkpoint: Checkpoint, network: Network, folder: Path) -> None:
    """Every tensor of the checkpoint in the type it has there, those of the MTP layer with what it has learned."""
    learned = {
        name: values for name, values in published(network) if name.startswith(f"model.layers.{network.arch.layers}.")
    }
    tensors, labels = dict[str, torch.Tensor](), dict[str, str]()
    for name, info in checkpoint.infos().items():
        labels[name] = info.dtype
        if name in learned:
            tensors[name] = learned[name]
        else:
            tensors[name] = torch.empty(info.shape)
            checkpoint.read(name, tensors[name])
    write_model(folder, tensors, labels, checkpoint.config, checkpoint.text)


def _plan(device: torch.device, steps: int, seed: int) -> Optimise:
    cuda = device.type == "cuda"
    rows = 32 if cuda else 4
    return Optimise(
        steps=steps,
        rows_per_step=rows,
        rows_per_pass=rows,
        peak_lr=1e-3 if cuda else 6e-4,  # a larger step is surer of its direction
        final_lr_share=0.02,
        warmup_steps=10,
        beta_2=0.98,
        weight_decay=0.0,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """Of what the model says, whichever comes first."""

    answers: int | None
    until_s: float | None
    tokens: int

    def is_reached(self, answers: int, tokens: int, now_s: float) -> bool:
        if tokens >= self.tokens or (self.answers is not None and answers >= self.answers):
            return True
        return bool(answers) and self.until_s is not None and now_s >= self.until_s


def _answers(model: str, device: torch.device, limit: Limit, seed: int, tell: Tell, clock: Clock) -> list[Encoded]:
    cuda = device.type == "cuda"
    device_spec = DeviceSpec(device, torch.bfloat16 if cuda else torch.float32)
    speaker = Speaker(device_spec, model, rows=2048 if cuda else 16, seed=seed)
    asked, found, num_tokens = questions(seed), list[Encoded](), 0
    began_s = told_s = clock()
    while not limit.is_reached(len(found), num_tokens, now_s := clock()):
        if now_s - told_s >= LINE_S:
            told_s = now_s
            tell(_line(found, num_tokens, now_s - began_s))
        new = speaker.answers(asked)[: None if limit.answers is None else limit.answers - len(found)]
        found += new
        num_tokens += sum(len(one.tokens) for one in new)
    tell(_line(found, num_tokens, now_s - began_s))
    return found


def _line(found: Sequence[Encoded], num_tokens: int, took_s: float) -> str:
    speed = num_tokens / max(took_s, 1e-9)
    return f"{len(found):,} answers, {num_tokens:,} tokens with questions, {speed:,.0f} tokens/s"
