"""A small network with every kind of layer, and documents to train it on: made here, by seed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tripool.models.load import arch_of
from tripool.train.attention import MASKED
from tripool.train.config import TrainConfig, read_config
from tripool.train.network import Network

ROW_TOKENS = 96


def small_config(**optimise: Any) -> TrainConfig:
    config = read_config("smoke")
    data, report = replace(config.data, row_tokens=ROW_TOKENS), replace(config.report, line_s=0.0)
    return replace(config, data=data, report=report, optimise=replace(config.optimise, **optimise))


def small_network(config: TrainConfig, *, row_tokens: int = ROW_TOKENS, std: float = 0.2) -> Network:
    """With weights and biases large enough that its logits differ from place to place."""
    network = Network(arch_of(config.model, "small"), MASKED.attend, row_tokens)
    network.begin(std, seed=1)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for experts in network.experts():
            experts.bias.copy_(0.2 * torch.randn(experts.bias.shape, generator=rng))
        for name, weight in network.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn(weight.shape, generator=rng))
            elif name.endswith(("down.weight", "o_proj.weight")):
                weight.mul_(4)
    return network


NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
THINGS = ("boat", "lamp", "kite", "stone", "clock")


def documents(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        name, thing, x, y = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(100), rng.randrange(100)
        kind, turns = rng.choice(
            [
                ("greeting", [("user", f"Hello, I am {name}."), ("assistant", f"Hello {name}! How can I help you?")]),
                ("arithmetic", [("user", f"What is {x} plus {y}?"), ("assistant", f"{x} plus {y} is {x + y}.")]),
                (
                    "story",
                    [
                        ("system", "Be brief."),
                        ("user", f"A story of {name} and a {thing}."),
                        ("assistant", f"One day {name} found a {thing} by the river and took it home."),
                        ("user", "What was found?"),
                        ("assistant", f"A {thing}."),
                    ],
                ),
            ]
        )
        messages = [{"role": role, "content": content} for role, content in turns]
        found.append({"kind": kind, "messages": messages, "cut": rng.random() < 0.05})
    return found


def write_documents(folder: Path, count: int, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps(one) + "\n" for one in documents(count, seed)]
    (folder / "some.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder
