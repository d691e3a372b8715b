"""The command line: sample for so many minutes, write documents as they come, say what came of it.

python -m tiny.distil --teacher FILE [PART ...] --out FOLDER --minutes 9 --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO

import torch

from tiny.distil.clean import Copies
from tiny.distil.flow import Document
from tiny.distil.sampler import Sampler, Tally, penalised_tokens
from tiny.distil.teacher import Sampling, Teacher
from tiny.distil.weights import load_weights, open_parts
from tiny.distil.workers import open_workers
from tripool.text import Tokenizer

SHARD_DOCUMENTS = 50_000
TELL_EVERY_S = 15.0
SAMPLES_PER_KIND = 2
SAMPLE_CHARACTERS = 420
COPIES = {
    **dict.fromkeys(("greeting", "thanks", "goodbye", "small_talk", "identity"), 40),
    **dict.fromkeys(("fact", "words", "arithmetic"), 25),
}
"""How often the same words may come: short answers need their weight."""
BY_ANSWER = frozenset(("explain", "brief", "how_to", "list", "advice", "chat"))
"""Kinds that are the same if their answers are: the teacher is asked one question in many dresses."""


@dataclass
class Corpus:
    """JSONL shards in a folder, and what was written there."""

    folder: Path
    copies: Copies = field(default_factory=lambda: Copies(COPIES))
    kinds: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    samples: defaultdict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    _file: TextIO | None = None
    _rng: Random = field(default_factory=lambda: Random(0))

    @property
    def documents(self) -> int:
        return self.kinds.total()

    def write(self, documents: Sequence[Document]) -> None:
        for document in documents:
            kind, messages = document["kind"], document["messages"]
            roles = ("assistant",) if kind in BY_ANSWER else ("system", "user", "assistant")
            if not self.copies.is_new(kind, (m["content"] for m in messages if m["role"] in roles)):
                self.repeated[kind] += 1
                continue
            if self.documents % SHARD_DOCUMENTS == 0:
                self.close()
                name = f"part-{self.documents // SHARD_DOCUMENTS:03}.jsonl"
                self._file = (self.folder / name).open("w", encoding="utf-8")
            assert self._file is not None
            self._file.write(json.dumps(document, ensure_ascii=False) + "\n")
            self.kinds[kind] += 1
            self.cut += document["cut"]
            self._remember(kind, document)
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remember(self, kind: str, document: Document) -> None:
        """A fair sample of what was written: every document has the same chance to be shown."""
        shown, place = self.samples[kind], self._rng.randrange(self.kinds[kind])
        if len(shown) < SAMPLES_PER_KIND:
            shown.append(document)
        elif place < SAMPLES_PER_KIND:
            shown[place] = document


def summary(corpus: Corpus, tally: Tally, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    reasons: dict[str, dict[str, int]] = defaultdict(dict)
    for (kind, reason), count in sorted(tally.reasons.items()):
        reasons[kind][reason] = count
    return {
        "seconds": round(seconds, 1),
        "documents": corpus.documents,
        "documents_by_kind": dict(corpus.kinds.most_common()),
        "cut_documents": corpus.cut,
        "repeated_documents": dict(corpus.repeated.most_common()),
        "answers": tally.answers,
        "cut_answers": tally.cut,
        "teacher_tokens": tally.tokens,
        "tokens_per_s": round(tally.tokens / seconds, 1),
        "device_waited_s": round(tally.waited_s, 1),
        "too_long": tally.too_long,
        "idle_slots_per_round": round(tally.idle_slots / max(1, tally.rounds), 1),
        "answers_by_kind": reasons,
        "seed": options.seed,
        "batch": options.batch,
        "temperature_scale": options.heat,
        "penalty": options.penalty,
        "min_p": options.min_p,
    }


def tell_samples(samples: Mapping[str, list[Document]]) -> None:
    for kind in sorted(samples):
        for document in samples[kind]:
            said = "\n".join(f"  {m['role'][0].upper()}: {m['content']}" for m in document["messages"])
            more = " ..." if len(said) > SAMPLE_CHARACTERS else ""
            print(f"[{kind}]{' cut' if document['cut'] else ''}\n{said[:SAMPLE_CHARACTERS]}{more}")


def tell_progress(corpus: Corpus, tally: Tally, since_s: float, left_s: float) -> None:
    kept = sum(count for (_, reason), count in tally.reasons.items() if reason == "kept")
    judged = max(1, tally.reasons.total())
    idle = tally.idle_slots / max(1, tally.rounds)
    print(
        f"{corpus.documents:,} documents · {tally.tokens / max(since_s, 1e-9):,.0f} teacher tokens/s"
        f" · {kept / judged:.0%} of answers kept · {tally.cut / max(1, tally.answers):.0%} cut"
        f" · {idle:.0f} idle slots · host waits {tally.waited_s / max(since_s, 1e-9):.0%}"
        f" · {max(0.0, left_s):.0f} s left",
        flush=True,
    )


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tiny.distil", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--teacher", type=Path, nargs="+", required=True, metavar="PATH", help="a checkpoint, or its parts"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=1.0, help="from start to end, loading included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="default: 4096 on CUDA, 8 on a CPU")
    parser.add_argument("--places", type=int, default=640, help="tokens of a row: prompt and answer")
    parser.add_argument("--steps", type=int, default=16, help="steps between looks at what has ended")
    parser.add_argument("--workers", type=int, help="processes for text; default: the cores but two, none on a CPU")
    parser.add_argument("--penalty", type=float, default=1.18)
    parser.add_argument("--min-p", type=float, default=0.1)
    parser.add_argument("--heat", type=float, default=1.0, help="factor on every temperature")
    parser.add_argument("--plain", action="store_true", help="no Triton kernels on CUDA")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    options.batch = options.batch or (4096 if cuda else 8)
    if options.workers is None:
        options.workers = max(1, len(os.sched_getaffinity(0)) - 2) if cuda else 0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    started_s = time.monotonic()
    ends_s = started_s + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    cuda = options.device == "cuda"
    with open_parts(options.teacher) as checkpoint:
        files = checkpoint.text
        workers = open_workers(files, options.workers)
        dtype = torch.bfloat16 if cuda else torch.float32
        weights = load_weights(checkpoint, device=options.device, dtype=dtype, places=options.places)
    sampling = Sampling(
        penalty=options.penalty,
        min_p=options.min_p,
        end_ids=files.end_ids,
        penalised=penalised_tokens(Tokenizer(files), weights.arch.vocab),
        seed=options.seed,
        heat=options.heat,
    )
    fast = cuda and not options.plain
    teacher = Teacher(weights, sampling, rows=options.batch, places=options.places, steps=options.steps, fast=fast)
    print(
        f"teacher ready after {time.monotonic() - started_s:.0f} s: {options.batch} rows on {options.device}",
        flush=True,
    )
    corpus, sampler = Corpus(options.out), Sampler(teacher, workers, seed=options.seed)
    sampling_s = told_s = time.monotonic()
    with workers:
        for documents in sampler.documents(go_on=lambda: time.monotonic() < ends_s - 2.0):
            corpus.write(documents)
            if (now_s := time.monotonic()) > told_s + TELL_EVERY_S:
                tell_progress(corpus, sampler.tally, now_s - sampling_s, ends_s - now_s)
                told_s = now_s
    corpus.close()
    seconds = time.monotonic() - sampling_s
    told = summary(corpus, sampler.tally, seconds, options)
    (options.out / "summary.json").write_text(json.dumps(told, indent=1) + "\n")
    tell_samples(corpus.samples)
    tell_progress(corpus, sampler.tally, seconds, 0.0)
    dropped = Counter(reason for (_, reason), n in sampler.tally.reasons.items() for _ in range(n))
    print("answers: " + ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()))
    print(f"documents: {', '.join(f'{count} {kind}' for kind, count in corpus.kinds.most_common())}")
    return 0
