"""How fast to learn when. Pure: progress and step are arguments, and nothing here has a clock."""

from __future__ import annotations

from math import cos, pi

from tripool.train.plan import Optimise


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
