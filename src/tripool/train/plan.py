"""Settings of a training run and its schedule: rows, learning rate by progress, reports. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi


def learning_rate(plan: Optimise, step: int, progress: float) -> float:
    """`step` from 0 warms up; `progress` from 0 to 1, by steps or by time, lets it fall to the final share."""
    warm = min((step + 1) / plan.warmup_steps, 1.0) if plan.warmup_steps else 1.0
    return plan.peak_lr * warm * level(plan, progress)


def balance_rate(plan: Optimise, progress: float) -> float:
    """Of the experts' biases: at once in full, because favourites arise in the first steps; fine at the end."""
    return plan.bias_rate * level(plan, progress)


def level(plan: Optimise, progress: float) -> float:
    """From 1 down to the final share."""
    progress = min(max(progress, 0.0), 1.0)
    left = (1 + cos(pi * progress)) / 2 if plan.decay == "cosine" else 1 - progress
    return plan.final_lr_share + (1 - plan.final_lr_share) * left


def progress_by_time(now_s: float, began_s: float, ends_s: float, before: float = 0.0) -> float:
    """What was left of the schedule at `began_s` is spread over the time until `ends_s`."""
    share = 1.0 if ends_s <= began_s else min(max((now_s - began_s) / (ends_s - began_s), 0.0), 1.0)
    return before + (1 - before) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """How documents become rows."""

    row_tokens: int = 2048
    """Length of a packed row; a longer document is cut, and its cut end is not trained."""
    prompt_loss: float = 0.05
    """Weight of a token that a user or the system wrote; an assistant's counts 1."""
    text: str = "tiny"
    """Checkpoint whose tokenizer and chat template are used and exported: a known name or a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimise:
    """AdamW and its schedule."""

    steps: int = 3000
    """Without a time limit; with one, as many as fit."""
    rows_per_step: int = 32
    rows_per_pass: int = 32
    """Rows that go through the network together: memory for speed. Divides `rows_per_step`."""
    peak_lr: float = 2e-3
    final_lr_share: float = 0.05
    warmup_steps: int = 100
    decay: str = "cosine"
    beta_1: float = 0.9
    beta_2: float = 0.95
    weight_decay: float = 0.1
    """Of matrices; norms and embeddings are left alone."""
    clip: float = 1.0
    mtp_weight: float = 0.3
    """Of the loss on the token after the next one."""
    bias_rate: float = 5e-3
    """How far a step moves an expert's bias toward an even load; less and less, as the learning rate falls."""
    init_std: float = 0.02
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    line_s: float = 10.0
    """Seconds between printed lines."""
    save_steps: int = 1000
    """Steps between states that a killed run goes on from."""
    eval_steps: int = 1000
    eval_rows: int = 64
    """Most held-out rows that are looked at during the run; at the end it is all of them."""
