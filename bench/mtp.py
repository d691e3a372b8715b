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
from tripool.answer import Generation

QUESTIONS = (
    "Tell me a story about a fox.",
    "Why is the sky blue?",
    "Explain how bread is made.",
    "What should I pack for a trip to the sea?",
    "Who are you?",
    "Write a few sentences about rain.",
)
SPEED_UP, MAX_TOKENS = 1.2, 300


def answer(llm: LLM, question: str, temperature: float, seed: int) -> tuple[float, Generation]:
    """Tokens per second after the first one, and the answer, which ends where the model ends it: what it would say
    beyond that was never trained, and drafts of it say nothing about drafts."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=MAX_TOKENS)
    stream = llm.stream_chat([{"role": "user", "content": question}], params)
    next(stream)
    began_s = time.perf_counter()
    for _ in stream:
        pass
    took_s = time.perf_counter() - began_s
    assert stream.generation is not None
    return (len(stream.generation.token_ids) - 1) / took_s, stream.generation


def compare(llms: dict[bool, LLM], temperature: float, repetitions: int) -> Row:
    """Question by question in turns, because a shared machine's speed changes from second to second."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    drafted = accepted = 0
    for llm in llms.values():
        answer(llm, QUESTIONS[0], temperature, 0)
    for turn in range(repetitions * len(QUESTIONS)):
        texts = {}
        for drafts in (True, False) if turn % 2 else (False, True):
            speed, said = answer(llms[drafts], QUESTIONS[turn // 2 % len(QUESTIONS)], temperature, turn)
            speeds[drafts].append(speed)
            texts[drafts] = said.token_ids
            drafted += said.usage.draft_tokens
            accepted += said.usage.accepted_draft_tokens
        assert texts[True] == texts[False], "the text depends on drafts"
    share = accepted / drafted if drafted else 0.0
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
    repetitions = 6 if options.quick else 40
    rows = [compare(llms, temperature, repetitions) for temperature in (0.0, 0.7)]
    answers = repetitions * len(QUESTIONS)
    print_table(rows, origin, f"MTP drafts on {options.model}: {options.threads} threads, medians of {answers}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
