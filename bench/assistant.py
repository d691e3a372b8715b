"""Whether a model answers like a small but sane assistant: 200 prompts outside the training mix, drafts, held-out text.

    python bench/assistant.py [--quick] [--model tiny] [--bootstrap FOLDER] [--heldout FILE.jsonl] [--json FILE]

| row                | ours                                                     | bound   |
|--------------------|----------------------------------------------------------|---------|
| repeated 6-grams   | share of six-word runs said before in the same answer    | ≤ 3 %   |
| answer length      | mean tokens                                              | ≥ 40    |
| distinct answers   | share of the answers                                     | ≥ 90 %  |
| ended by itself    | share within 300 tokens                                  | ≥ 95 %  |
| draft acceptance   | MTP drafts that came true; also told for temperature 0   | ≥ 0.72  |
| held-out           | perplexity over the bootstrap model's on the same tokens | ≤ 0.99  |

The 200 prompts lie in `assistant_prompts.txt`: subjects and wordings that the prompt maker of `tiny/distil` does not
have. They are answered at temperature 0.7. Acceptance moves by 0.01 from one set of random draws to another, so it is
the mean of ten sets, with its standard error beside it; the other rows are of the first set. For information: how many
answers hold a content word of their question (a crude sign of being about it), and repetition at temperature 0.

With `--bootstrap`, the model that was bundled before, its answers are scored too, and the held-out row is there: on
`assistant_heldout.jsonl`, 400 documents of the bundled model's corpus that it was never trained on.

Answers are printed to be read, at temperature 0 and 0.7: to a fixed list of questions, whose subjects the corpus has,
and to every fortieth of the 200 prompts, whose subjects it has not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness import Origin, Row, print_table, write_json
from tripool import LLM, SamplingParams, Structure
from tripool.answer import Generation
from tripool.checkpoints import open_checkpoint
from tripool.core import Conversation
from tripool.quant import Side
from tripool.text import Tokenizer

sys.path.append(str(Path(__file__).parent.parent))  # `tiny` is beside `bench`, not installed

from tiny.distil.clean import WORD, normalised, repeated_share
from tiny.distil.lists import words

PROMPTS = Path(__file__).with_name("assistant_prompts.txt")
HELD_OUT = Path(__file__).with_name("assistant_heldout.jsonl")
MAX_TOKENS, TEMPERATURE, WINDOW, NUM_SETS = 300, 0.7, 512, 10
READ = (
    "Hello!", "Who are you?", "Why is the sky blue?", "Why do we sleep?", "How do plants drink water?",
    "How is bread made?", "Why do cats purr?", "Tell me a story about a fox named Mira.",
    "Write a short story about a robot called Otto.",
    "Tell me a story about Clara, a shy baker who finds a golden key.",
)  # fmt: skip
FOLLOW_UP = ("My name is Elena and I live in Porto.", "Nice to meet you! How can I help you today?", "What is my name?")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_PROMPT = "Jonas is 31 years old. Answer in JSON with name, age."
STEM_LETTERS = 5
"""Words that begin with the same letters are taken for the same: freeze, freezes, freezing."""


@dataclass(frozen=True)
class Scores:
    """Of one set of answers."""

    about: float
    repeated: float
    mean_tokens: float
    distinct: float
    ended: float
    acceptance: float | None

    @classmethod
    def of(cls, prompts: Sequence[str], answers: Sequence[Generation]) -> Scores:
        texts = [answer.text for answer in answers]
        drafted = sum(answer.usage.draft_tokens for answer in answers)
        accepted = sum(answer.usage.accepted_draft_tokens for answer in answers)
        return cls(
            about=sum(map(is_about, prompts, texts)) / len(texts),
            repeated=mean_repeated(texts),
            mean_tokens=sum(len(answer.token_ids) for answer in answers) / len(answers),
            distinct=len({normalised(text) for text in texts}) / len(texts),
            ended=sum(answer.finish_reason == "stop" for answer in answers) / len(answers),
            acceptance=accepted / drafted if drafted else None,
        )


def mean_repeated(texts: Sequence[str]) -> float:
    """Of all six-word runs of all answers, the share that came before in its own answer."""
    runs = repeats = 0.0
    for text in texts:
        words = WORD.findall(text.lower())
        count = max(0, len(words) - 5)
        runs += count
        repeats += repeated_share(words) * count
    return repeats / runs if runs else 0.0


def is_about(prompt: str, text: str) -> bool:
    """Whether the answer has a content word of its question."""
    function_words = set(words("function_words"))
    asked, said = (
        {word[:STEM_LETTERS] for word in WORD.findall(one.lower()) if len(word) > 3 and word not in function_words}
        for one in (prompt, text)
    )
    return bool(asked & said)


def sample(llm: LLM, prompts: Sequence[str], temperature: float, number: int = 0) -> list[Generation]:
    """Every set, by its number, has seeds of its own."""
    seeds = range(1000 * number, 1000 * number + len(prompts))
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS) for seed in seeds]
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)


def rows_of(name: str, sets: Sequence[Scores], likeliest: Scores, count: int, target: float | None) -> Iterator[Row]:
    """`sets`: of several sets of random draws; `likeliest`: at temperature 0, where nothing is drawn."""
    first = sets[0]
    note = f"{count} prompts outside the training mix, temperature {TEMPERATURE:g}, at most {MAX_TOKENS} tokens"
    yield Row(name=f"{name}: repeated 6-grams", ours=first.repeated, peer=0.03, unit="share", target=target,
              lower_is_better=True, note=note, details={"sets": [scores.repeated for scores in sets]})  # fmt: skip
    yield Row(name=f"{name}: answer length", ours=first.mean_tokens, peer=40.0, unit="tokens", target=target, note=note)
    yield Row(name=f"{name}: distinct answers", ours=first.distinct, peer=0.9, unit="share", target=target, note=note)
    yield Row(name=f"{name}: ended by itself", ours=first.ended, peer=0.95, unit="share", target=target, note=note)
    yield from acceptance_rows(name, sets, likeliest, count, target)
    yield Row(name=f"{name}: repeated 6-grams, temperature 0", ours=likeliest.repeated, peer=0.03, unit="share",
              target=None, lower_is_better=True, note="for information")  # fmt: skip
    yield Row(name=f"{name}: a content word of the question in the answer", ours=first.about, peer=1.0, unit="share",
              target=None, note="for information")  # fmt: skip


def acceptance_rows(
    name: str, sets: Sequence[Scores], likeliest: Scores, count: int, target: float | None
) -> Iterator[Row]:
    title = f"{name}: draft acceptance"
    shares = [scores.acceptance for scores in sets if scores.acceptance is not None]
    if len(shares) < 2:
        yield Row(name=title, ours=None, peer=0.72, unit="share", target=target, note="this model does not draft")
        return
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    yield Row(name=title, ours=statistics.mean(shares), peer=0.72, unit="share", target=target,
              note=f"temperature {TEMPERATURE:g}, {len(shares)} sets of {count} answers from {min(shares):.3f} to "
                   f"{max(shares):.3f}, standard error {error:.4f}", details={"sets": shares})  # fmt: skip
    yield Row(name=f"{title}, temperature 0", ours=likeliest.acceptance, peer=0.72, unit="share", target=None,
              note=f"{count} answers; for information")  # fmt: skip


@torch.inference_mode()
def perplexity(side: Side, windows: Sequence[Sequence[int]]) -> float:
    """Of every token but each window's first."""
    loss, count = 0.0, 0
    for window in windows:
        said, wanted = side.logits(window)[:-1].log_softmax(-1), torch.tensor(window[1:])[:, None]
        loss -= float(said.gather(1, wanted).double().sum())
        count += len(wanted)
    return math.exp(loss / count)


def held_out_row(name: str, model: str, bootstrap: str, file: Path, count: int) -> Row:
    """Both models on the same documents, cut into the same tokens: only their numbers may differ."""
    talks = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()[:count]]
    perplexities, lengths = [], []
    for path in (model, bootstrap):
        with open_checkpoint(path) as checkpoint:
            tokenizer = Tokenizer(checkpoint.text)
            windows = [tokenizer.encode_chat(talk, add_generation_prompt=False)[:WINDOW] for talk in talks]
            side = Side(checkpoint, "int8", window=WINDOW, num_answers=1)
            perplexities.append(perplexity(side, windows))
            lengths.append([len(window) for window in windows])
    assert lengths[0] == lengths[1], "perplexities of different tokens say nothing"
    return Row(
        name=f"{name}: held-out perplexity / bootstrap's",
        ours=perplexities[0],
        peer=perplexities[1],
        unit="perplexity",
        target=0.99,
        lower_is_better=True,
        note=f"{len(talks)} documents, {sum(lengths[0])} tokens",
    )


def read_aloud(llm: LLM, outside: Sequence[str]) -> dict[str, list[str]]:
    """Answers to be read by people, at temperature 0 and 0.7."""
    follow: Conversation = [
        {"role": role, "content": said} for role, said in zip(("user", "assistant", "user"), FOLLOW_UP, strict=True)
    ]
    asked = (*READ, *outside, JSON_PROMPT)
    talks: list[Conversation] = [[{"role": "user", "content": question}] for question in asked]
    titles = [*READ, *(f"{question} (outside the mix)" for question in outside), f"{JSON_PROMPT} (plain)"]
    titles += [" / ".join(FOLLOW_UP), f"{JSON_PROMPT} (held to a schema)"]
    said: dict[str, list[str]] = {title: [] for title in titles}
    for temperature in (0.0, TEMPERATURE):
        plain = SamplingParams(temperature=temperature, seed=1, max_tokens=MAX_TOKENS)
        held = replace(plain, structure=Structure("json_schema", SCHEMA))
        every = [*talks, follow, talks[-1]]
        params = [plain] * (len(every) - 1) + [held]
        for title, answer in zip(titles, llm.chat(every, params), strict=True):
            said[title].append(answer.text)
    return said


def scored(llm: LLM, prompts: Sequence[str]) -> tuple[list[list[Generation]], Scores]:
    """Every set of answers, and the scores at temperature 0."""
    sets = [sample(llm, prompts, TEMPERATURE, number) for number in range(NUM_SETS)]
    return sets, Scores.of(prompts, sample(llm, prompts, 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every fifth prompt, fewer held-out documents")
    parser.add_argument("--model", default="tiny", help="a name or a path")
    parser.add_argument("--bootstrap", help="another model, to be scored beside it and for the held-out row")
    parser.add_argument("--heldout", type=Path, metavar="FILE.jsonl", default=HELD_OUT, help="documents never trained")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin, rows = Origin.now(), list[Row]()
    prompts = PROMPTS.read_text("utf-8").splitlines()[:: 5 if options.quick else 1]
    with LLM(options.model, threads=options.threads) as llm:
        name = llm.name
        sets, likeliest = scored(llm, prompts)
        rows += rows_of(name, [Scores.of(prompts, one) for one in sets], likeliest, len(prompts), 1.0)
        read = read_aloud(llm, prompts[:: len(prompts) // 5])
    said = dict(zip(prompts, (answer.text for answer in sets[0]), strict=True))
    rows[0] = replace(rows[0], details={**rows[0].details, "read": read, "answers": said})
    if options.bootstrap:
        count = 50 if options.quick else 400
        rows.append(held_out_row(name, options.model, options.bootstrap, options.heldout, count))
        with LLM(options.bootstrap, threads=options.threads) as llm:
            sets, likeliest = scored(llm, prompts)
            rows += rows_of("bootstrap", [Scores.of(prompts, one) for one in sets], likeliest, len(prompts), None)
    for question, (cold, warm) in read.items():
        print(f"> {question}\n  0.0: {cold}\n  {TEMPERATURE:g}: {warm}")
    print_table(rows, origin, f"An assistant worth talking to: {name}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
