"""A run's state on disk: weights, optimiser and place in the schedule, in one file that is whole or not there.

Nothing in a step draws random numbers, and which rows a step reads follows from its number: there is no other state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tripool.checkpoints.write import read_tensors, write_tensors
from tripool.train.config import TrainError
from tripool.train.network import Network

FILE = "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is."""

    step: int
    """Steps done."""
    progress: float
    """Of the schedule, from 0 to 1."""
    elapsed_s: float
    """Spent on steps so far, by all runs together."""


def plan_digest(plan: Mapping[str, Any]) -> torch.Tensor:
    """uint8 [16]: another config or other documents would not go on with these weights."""
    said = json.dumps(plan, sort_keys=True).encode()
    return torch.frombuffer(bytearray(blake2b(said, digest_size=16).digest()), dtype=torch.uint8)


def save(
    folder: Path, network: Network, optimiser: torch.optim.Optimizer, place: Place, plan: Mapping[str, Any]
) -> None:
    tensors = {
        "plan": plan_digest(plan),
        "step": torch.tensor([place.step]),
        "progress": torch.tensor([place.progress, place.elapsed_s], dtype=torch.float64),
    }
    for name, value in network.state_dict().items():
        tensors[f"weights.{name}"] = value
    for name, weight in network.named_parameters():
        moments = optimiser.state[weight]
        tensors |= {f"{kind}.{name}": moments[kind] for kind in _MOMENTS}
    write_tensors(folder / FILE, tensors)
    sync_folder(folder)


def restore(folder: Path, network: Network, optimiser: torch.optim.Optimizer, plan: Mapping[str, Any]) -> Place:
    held = read_tensors(folder / FILE)
    if not torch.equal(held["plan"], plan_digest(plan)):
        hint = "give the config and the documents it was begun with, or another --out"
        raise TrainError("was begun with another config or other documents", hint=hint, file=folder / FILE)
    step = int(held["step"])
    network.load_state_dict({name: held[f"weights.{name}"] for name in network.state_dict()})
    for name, weight in network.named_parameters():
        moments = {kind: held[f"{kind}.{name}"].to(weight.device) for kind in _MOMENTS}
        optimiser.state[weight] = {"step": torch.tensor(float(step), device=_step_device(optimiser, weight)), **moments}
    progress, elapsed_s = held["progress"].tolist()
    return Place(step, progress, elapsed_s)


def sync_folder(folder: Path) -> None:
    """A file that was renamed is found under its name after a crash of the machine, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _step_device(optimiser: torch.optim.Optimizer, weight: torch.Tensor) -> torch.device:
    """The fused optimiser counts on the device, the plain one beside it."""
    return weight.device if optimiser.defaults.get("fused") else torch.device("cpu")
