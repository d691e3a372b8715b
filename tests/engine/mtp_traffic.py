"""Mixed requests for the engine with and without drafts: every option that looks back at what was already said.

Prompts share beginnings, but none contains another's answer: blocks of an answer are written in decode form, so a
prompt that finds them instead of computing them itself may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.engine import Engine
from tripool.kernels import KernelTable
from tripool.models import Model, load_model
from tripool.text import TextFiles, Tokenizer

BLOCK_GB = 9 * 64 * 160 * 4 / 2**30
"""KV memory of one block of the bundled model, MTP layer included."""

CROWDED = {"kv_gb": 5.9 * BLOCK_GB, "max_running": 6, "step_tokens": 76}
"""Small chunks and far too few blocks: prompts in pieces, preemptions, drafts without room."""
ROOMY = {"kv_gb": 200 * BLOCK_GB, "max_running": 24, "step_tokens": 300}

TOPICS = ("a fox", "the sea at night", "why leaves fall", "bread", "two friends", "a clock", "rain", "an old map")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "likes": {"enum": ["tea", "rain"]}, "age": {"type": "integer"}},
    "required": ["name", "likes", "age"],
}

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.7, "repetition_penalty": 1.3, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "n": 2, "logit_bias": {17: 2.0, 300: -5.0}},
    {"temperature": 0.7, "n": 3, "presence_penalty": 0.5},
    {"temperature": 1.2, "top_k": 50, "logit_bias": {1: 1.5}},
    {"temperature": 0.7, "structure": {"json_schema": PERSON}},
    {"temperature": 0.0, "structure": {"regex": "[A-Z][a-z]+(, [a-z]+){2,9}!"}},
    {"temperature": 0.7, "structure": {"json_object": True}, "n": 2},
)


@dataclass(frozen=True)
class Bundled:
    """The bundled model in memory."""

    model: Model
    text: TextFiles
    tokenizer: Tokenizer

    def engine(self, **config: Any) -> Engine:
        return Engine("tiny", self.model, self.text, EngineConfig(**config))

    def chat_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_chat([{"role": "user", "content": text}]))


@contextmanager
def bundled(kernels: KernelTable) -> Iterator[Bundled]:
    """On one thread, so that float32 sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_checkpoint("tiny") as checkpoint:
        yield Bundled(load_model(checkpoint, kernels=kernels), checkpoint.text, Tokenizer(checkpoint.text))
    torch.set_num_threads(threads)


def ask(tiny: Bundled, number: int, *, repeat: int = 0, **params: object) -> Request:
    text = f"Tell me about {TOPICS[number % len(TOPICS)]}" + ", please" * repeat
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, "ignore_eos": True} | params)
    return Request(id=str(number), prompt_ids=tiny.chat_ids(text), params=sampling, seed=number)


def mixed_request(number: int, tiny: Bundled, *, longest: int) -> Request:
    random = Random(number)
    beginning = random.choice(("", "", "Answer in short plain sentences, like a teacher would. " * 7))
    # Any length up to about three blocks, but often nearly one block, which the answer then outgrows.
    pleases = random.choice((random.randrange(40), random.randint(20, 26)))
    text = f"{beginning}Tell me about {random.choice(TOPICS)}" + ", please" * pleases
    params = SETTINGS[number % len(SETTINGS)] | {"max_tokens": random.randint(1, longest)}
    if random.random() < 0.3:
        params["min_tokens"] = random.randint(1, params["max_tokens"])
    if random.random() < 0.3:
        params["stop_token_ids"] = [random.randrange(6, 600) for _ in range(20)]
    params["ignore_eos"] = random.random() < 0.5
    return Request(
        id=str(number),
        prompt_ids=tiny.chat_ids(text),
        params=SamplingParams(**params),
        seed=number,
        end_ids=tiny.tokenizer.end_ids,
        namespace=random.choice(("", "", "x")),
    )


@dataclass
class Told:
    """What an engine said, and what its drafts were."""

    events: dict[tuple[str, int], list[TokenEvent]] = field(default_factory=dict)
    drafts: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(request, choice, index of the token it is a guess of) -> token."""

    def answers(self) -> dict[tuple[str, int], list[tuple[object, ...]]]:
        """Everything a caller sees of them but the counters."""
        return {
            key: [(e.index, e.token_id, e.finish_reason, e.logprobs, e.prompt_logprobs) for e in each]
            for key, each in self.events.items()
        }

    def tokens(self) -> dict[tuple[str, int], list[int]]:
        return {key: [event.token_id for event in each] for key, each in self.events.items()}


def listen(engine: Engine) -> Told:
    """From now on, note every draft the engine proposes."""
    told, propose = Told(), engine.scheduler.propose

    def noted(seq: Any, draft: int) -> None:
        told.drafts[seq.request.id, seq.choice, seq.num_generated] = draft
        propose(seq, draft)

    engine.scheduler.propose = noted
    return told


def run(engine: Engine, requests: Sequence[Request], told: Told | None = None) -> Told:
    told = Told() if told is None else told
    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            told.events.setdefault((event.request_id, event.choice), []).append(event)
        engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0
    return told


def check_published(engine: Engine) -> None:
    """Every slot of every block that others may find was filled or emptied; a prompt's first has nothing to hold."""
    engine.draft()
    pool, layer = engine.scheduler.pool, engine.executor.runner.kv[-1].view(-1, 64, engine.executor.runner.kv.shape[2])
    found = list(pool._key_of)
    assert len(found) > 2
    assert not layer[found, 1:].isnan().any()
    firsts = sum(bool(layer[block, 0].isnan().any()) for block in found)
    assert firsts < len(found)
