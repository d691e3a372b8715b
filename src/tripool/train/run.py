"""A training run from beginning to end: rows, network, steps until the schedule is over, a folder that can be served.

The clock is an argument. With a time limit the schedule follows time instead of steps, so that the learning rate has
come all the way down and the export is done when the time is over, however fast the machine turned out to be.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from math import exp, isfinite
from pathlib import Path

import torch

from tripool.checkpoints import open_checkpoint
from tripool.models.load import arch_of
from tripool.text import TextFiles
from tripool.train import state
from tripool.train.attention import Way
from tripool.train.batch import make_batch
from tripool.train.config import TrainConfig, TrainError
from tripool.train.device import autocast, choose_device, choose_way
from tripool.train.documents import Split, mixed, read_documents, split
from tripool.train.encode import Writer, encode_in_processes
from tripool.train.export import export
from tripool.train.learner import Learner, Step, token_losses
from tripool.train.metrics import PLOT, Metrics, loss_plot, read_metrics, said
from tripool.train.network import Network, trainable
from tripool.train.plan import balance_rate, learning_rate, progress_by_time
from tripool.train.rows import Rows, pack

HELD_OUT_FILE = "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Prepared:
    rows: Rows
    held_out: Rows
    text: TextFiles
    digest: str
    """Of all rows: another folder, filter or tokenizer is another one."""


def prepare(config: TrainConfig, data: Path, out: Path, tell: Callable[[str], None]) -> Prepared:
    with open_checkpoint(config.data.text) as checkpoint:
        text = checkpoint.text
    parts = split(read_documents(data))
    _write_held_out(parts, out)
    documents = mixed(parts.train, config.mix)
    if not documents:
        raise TrainError("nothing is left to train on", hint="give more documents, or a mix that is not 0", file=data)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one["kind"] for one in documents).most_common())
    tell(f"{len(documents)} documents ({kinds}), {len(parts.held_out)} held out")
    processes = os.cpu_count() or 1
    pad = Writer(text).pad
    rows, held_out = (
        pack(encode_in_processes(text, some, processes), config.data.row_tokens, pad)
        for some in (documents, parts.held_out)
    )
    if not len(rows):
        raise TrainError("no document can be written as tokens", hint="look at what they say", file=data)
    filled = rows.num_tokens / rows.tokens.numel()
    tell(f"{rows.num_tokens:,} tokens in {len(rows):,} rows, {filled:.1%} filled; {held_out.num_tokens:,} held out")
    return Prepared(rows, held_out, text, _digest(rows, held_out))


def _write_held_out(parts: Split, out: Path) -> None:
    """So that other models can be measured on the very same text."""
    lines = [json.dumps(dict(one), ensure_ascii=False) + "\n" for one in parts.held_out]
    (out / HELD_OUT_FILE).write_text("".join(lines), encoding="utf-8")


def _digest(*parts: Rows) -> str:
    hashed = blake2b(digest_size=16)
    for rows in parts:
        for values in (rows.tokens, rows.documents, rows.kinds):
            hashed.update(values.contiguous().numpy().data)
    return hashed.hexdigest()


@torch.no_grad()
def evaluate(network: Network, rows: Rows, way: Way, rows_per_pass: int, most_rows: int | None) -> dict[str, float]:
    """Losses in nats: of answers, and of every token. `draft_agreement`: where the MTP layer, reading the text itself,
    finds likeliest after an answer's token what the network then finds likeliest."""
    with torch.compiler.set_stance("force_eager"):  # a few passes of odd sizes: compiling them would take longer
        return _evaluate(network, rows, way, rows_per_pass, most_rows)


def _evaluate(network: Network, rows: Rows, way: Way, rows_per_pass: int, most_rows: int | None) -> dict[str, float]:
    device = network.embed.device
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    numbers = torch.arange(len(rows) if most_rows is None else min(most_rows, len(rows)), device=device)
    for part in numbers.split(rows_per_pass):
        batch = make_batch(rows, part, 1.0, way.sight)
        with autocast(device):
            states = network(batch.tokens, batch.sight, batch.real)
            for row in range(len(part)):  # one at a time: logits of many would not fit
                each = token_losses(states.hidden[row], network.head, batch.next.tokens[row])
                answers, every = batch.answers[row], batch.next.weights[row]
                sums[:4] += torch.stack([(each * answers).sum(), answers.sum(), (each * every).sum(), every.sum()])
                if states.mtp is not None:
                    said, guessed = (network.logits(one[row]).argmax(-1) for one in (states.hidden, states.mtp))
                    place = answers[1:] * batch.after_next.weights[row, :-1]
                    sums[4:] += torch.stack([((guessed[:-1] == said[1:]) * place).sum(), place.sum()])
    answer, num_answers, every_loss, num_every, agreed, drafted = sums.tolist()
    loss = answer / max(num_answers, 1)
    found = {
        "held_out_loss": loss,
        "held_out_perplexity": exp(min(loss, 50.0)),
        "held_out_loss_of_all": every_loss / max(num_every, 1),
        "held_out_tokens": num_answers,
    }
    return found | ({"draft_agreement": agreed / max(drafted, 1)} if network.mtp is not None else {})


MODEL_FOLDER = "model"
_CLOSING_S = 15.0
"""Kept for the last evaluation and the export."""


@dataclass(frozen=True, slots=True)
class Trained:
    folder: Path
    steps: int
    tokens_per_s: float
    """Of this run's steps."""
    held_out: dict[str, float] = field(default_factory=dict)


def train(
    config: TrainConfig,
    data: Path,
    out: Path,
    *,
    minutes: float | None = None,
    resume: bool = False,
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    ends_s = None if minutes is None else clock() + 60 * minutes - _CLOSING_S
    if (out / state.FILE).exists() and not resume:
        hint = "go on with --resume, or give another --out"
        raise TrainError("holds a run that was begun", hint=hint, file=out)
    arch = arch_of(config.model, "[model]")
    shape = trainable(arch)
    out.mkdir(parents=True, exist_ok=True)
    prepared = prepare(config, data, out, tell)
    if (largest := int(prepared.rows.tokens.max())) >= arch.vocab:
        hint = f"the text of '{config.data.text}' has a token {largest}"
        raise TrainError(f"is {arch.vocab}", hint=hint, key="model.vocab_size")
    device = choose_device()
    rows_per_pass = config.optimise.rows_per_pass
    way = choose_way(device, shape, (prepared.rows, prepared.held_out), rows_per_pass, tell)
    network = Network(arch, way.attend, config.data.row_tokens)
    network.begin(config.optimise.init_std, config.optimise.seed)
    network.to(device)
    learner = Learner(config, network, way, prepared.rows.to(device))
    count = sum(weight.numel() for weight in network.parameters())
    tell(f"{count / 1e6:.1f} M parameters on {device}, attention by {way.name}")
    if device.type == "cuda":
        before_s = clock()
        learner.compile(tell)
        tell(f"compiled and tried in {clock() - before_s:.0f} s")
    return _Run(config, learner, prepared, out, ends_s, tell, clock).run(resume)


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        prepared: Prepared,
        out: Path,
        ends_s: float | None,
        tell: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._config, self._learner, self._prepared, self._out = config, learner, prepared, out
        self._ends_s, self._tell, self._clock = ends_s, tell, clock
        self._held_out = prepared.held_out.to(learner.device)
        self._plan = config.fingerprint() | {"rows": prepared.digest}
        self._tokens_per_step = config.optimise.rows_per_step * prepared.rows.num_tokens / len(prepared.rows)

    def run(self, resume: bool) -> Trained:
        learner, out = self._learner, self._out
        self._before = state.Place(0, 0.0, 0.0)
        if resume and (out / state.FILE).exists():
            self._before = state.restore(out, learner.network, learner.optimiser, self._plan)
            self._tell(f"goes on after step {self._before.step}")
        self._metrics = Metrics(out, self._before.step)
        self._began_s = self._told_s = self._clock()
        self._told_step = self._before.step
        try:
            place = self._steps()
            held_out = self._evaluate(place.step, None)
        finally:
            self._metrics.close()
        self._tell(self._summary(place))
        (out / PLOT).write_text(loss_plot(read_metrics(out)), encoding="utf-8")
        network, config = learner.network, self._config
        counts = self._prepared.rows.counts(network.arch.vocab)
        num_weights = export(network, config.model, self._prepared.text, out / MODEL_FOLDER, counts=counts)
        self._tell(f"exported {num_weights / 1e6:.1f} M weights to {out / MODEL_FOLDER}")
        return Trained(out / MODEL_FOLDER, place.step, self._speed(place), held_out)

    def _steps(self) -> state.Place:
        plan, report = self._config.optimise, self._config.report
        place = self._before
        waiting: deque[tuple[state.Place, float, Step]] = deque()
        while not self._over(place):
            lr = learning_rate(plan, place.step, place.progress)
            found = self._learner.step(place.step, lr, balance_rate(plan, place.progress))
            place = self._place(place.step + 1)
            waiting.append((place, lr, found))
            if len(waiting) > 1:  # the step before: the device is kept busy, and never far behind
                self._note(*waiting.popleft())
            if place.step % report.save_steps == 0 and not self._over(place):
                self._save(place)
            if place.step % report.eval_steps == 0 and not self._over(place):
                self._evaluate(place.step, report.eval_rows)
        for one in waiting:
            self._note(*one)
        self._save(place)
        return place

    def _over(self, place: state.Place) -> bool:
        if self._ends_s is None:
            return place.step >= self._config.optimise.steps
        return place.progress >= 1

    def _place(self, step: int) -> state.Place:
        now_s, before = self._clock(), self._before
        if self._ends_s is None:
            progress = step / self._config.optimise.steps
        else:
            progress = progress_by_time(now_s, self._began_s, self._ends_s, before.progress)
        return state.Place(step, progress, before.elapsed_s + now_s - self._began_s)

    def _summary(self, place: state.Place) -> str:
        spent = said(place.elapsed_s - self._before.elapsed_s)
        line = f"{place.step - self._before.step} steps in {spent}, {self._speed(place) / 1e3:,.1f}k tokens/s"
        if self._learner.device.type == "cuda":
            line += f", at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
        return line

    def _speed(self, place: state.Place) -> float:
        spent_s = max(place.elapsed_s - self._before.elapsed_s, 1e-9)
        return (place.step - self._before.step) * self._tokens_per_step / spent_s

    def _note(self, place: state.Place, lr: float, step: Step) -> None:
        found = step.found()
        if not isfinite(found.loss):
            hint = "lower optimise.peak_lr, or raise optimise.warmup_steps; the last state is still good"
            raise TrainError(f"the loss is not a number at step {place.step}", hint=hint, file=self._out)
        line = {"step": place.step, "progress": round(place.progress, 6), **asdict(found), "lr": lr}
        tokens = round(place.step * self._tokens_per_step)
        self._metrics.put(line | {"tokens": tokens, "elapsed_s": round(place.elapsed_s, 3)})
        now_s = self._clock()
        if now_s - self._told_s >= self._config.report.line_s:
            speed = (place.step - self._told_step) * self._tokens_per_step / (now_s - self._told_s)
            self._told_s, self._told_step = now_s, place.step
            self._metrics.flush()
            left = said(self._left_s(place, now_s))
            self._tell(
                f"step {place.step}  {place.progress:.1%}  loss {found.loss:.3f}  mtp {found.mtp_loss:.3f}  "
                f"lr {lr:.1e}  load {found.load:.2f}  {speed / 1e3:,.1f}k tokens/s  {left} left"
            )

    def _left_s(self, place: state.Place, now_s: float) -> float:
        if self._ends_s is not None:
            return self._ends_s - now_s
        steps_left = self._config.optimise.steps - place.step
        return steps_left * self._tokens_per_step / max(self._speed(place), 1e-9)

    def _save(self, place: state.Place) -> None:
        self._metrics.flush()
        state.save(self._out, self._learner.network, self._learner.optimiser, place, self._plan)

    def _evaluate(self, step: int, most_rows: int | None) -> dict[str, float]:
        if not len(self._held_out):
            return {}
        rows_per_pass = self._config.optimise.rows_per_pass
        found = evaluate(self._learner.network, self._held_out, self._learner.way, rows_per_pass, most_rows)
        self._metrics.put({"step": step, **found})
        drafts = f", drafts agree {found['draft_agreement']:.3f}" if "draft_agreement" in found else ""
        self._tell(
            f"held out at step {step}: loss {found['held_out_loss']:.4f}, "
            f"perplexity {found['held_out_perplexity']:.2f}{drafts}"
        )
        return found
