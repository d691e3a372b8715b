"""What drafts by the model's own MTP layer are worth: decode speed with and without them, one request at a time.

    python bench/mtp.py [--quick] [--model tiny] [--threads N] [--json FILE]

Both engines live in one process and take turns over the same chat questions; their texts must be the same. Acceptance
is told beside the speed: how many of the verified drafts came true.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from harness import Origin, Row, print_table, write_json
from tripool import LLM, SamplingParams

QUESTIONS = (
    "Tell me a story about a fox.",
    "Why is the sky blue?",
    "Explain how bread is made.",
    "What should I pack for a trip to the sea?",
    "Who are you?",
    "Write a few sentences about rain.",
)
SPEED_UP = 1.2


def answer_all(llm: LLM, temperature: float, max_tokens: int) -> tuple[float, list[tuple[int, ...]], int, int]:
    """Tokens per second, the answers, drafts verified, drafts that came true."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=max_tokens, ignore_eos=True)
    answers, drafted, accepted = [], 0, 0
    started = time.perf_counter()
    for question in QUESTIONS:
        (answer,) = llm.chat([[{"role": "user", "content": question}]], params)
        answers.append(answer.token_ids)
        drafted += answer.usage.draft_tokens
        accepted += answer.usage.accepted_draft_tokens
    return sum(map(len, answers)) / (time.perf_counter() - started), answers, drafted, accepted


def compare(llms: dict[bool, LLM], temperature: float, max_tokens: int, repetitions: int) -> Row:
    speeds: dict[bool, list[float]] = {True: [], False: []}
    share = 0.0
    for llm in llms.values():
        answer_all(llm, temperature, 8)
    for repetition in range(repetitions):
        texts = {}
        for drafts in (True, False) if repetition % 2 else (False, True):
            speed, texts[drafts], drafted, accepted = answer_all(llms[drafts], temperature, max_tokens)
            speeds[drafts].append(speed)
            share = accepted / drafted if drafts and drafted else share
        assert texts[True] == texts[False], "the text depends on drafts"
    return Row(
        name=f"decode with drafts / without, temperature {temperature:g}",
        ours=statistics.median(speeds[True]),
        peer=statistics.median(speeds[False]),
        unit="tok/s",
        target=SPEED_UP,
        note=f"acceptance {share:.2f}, same text",
        details={"samples": {"with": speeds[True], "without": speeds[False]}, "acceptance": share},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: some seconds")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--precision", default="int8", choices=("int8", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin = Origin.now()
    llms = {
        drafts: LLM(options.model, threads=options.threads, mtp=drafts, precision=options.precision)
        for drafts in (True, False)
    }
    repetitions, max_tokens = (3, 100) if options.quick else (9, 200)
    rows = [compare(llms, temperature, max_tokens, repetitions) for temperature in (0.0, 0.7)]
    print_table(rows, origin, f"MTP drafts on {options.model}: {options.threads} threads, medians of {repetitions}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
