"""What quantising to INT8 costs in quality and memory: against float32, technique by technique, and at 16 B.

    python bench/quantize.py [--quick] [--models tiny,smollm2] [--tiny FOLDER] [--keep SHARE] [--large FOLDER]
                             [--json FILE]

| rows         | ours                                 | peer         | text                                    |
|--------------|--------------------------------------|--------------|-----------------------------------------|
| served       | our 8-bit kernels on the INT8 folder | float32      | the model's own answers to 20 questions |
| layout       | integers, inputs rounded by token    | float32      | the same                                |
| … greedy     | both                                 | float32      | its own greedy answers to 36 questions  |
| served prose | our 8-bit kernels on the INT8 folder | float32      | this project's README and decisions     |
| layout prose | integers, inputs rounded by token    | float32      | the same                                |
| bf16         | transformers computing in bfloat16   | float32      | each of the three; nothing is quantised |
| ablation     | KL with one technique, or all        | KL with none | both texts, layout arithmetic           |
| 16 B         | most memory of `tripool quantize`    | 6 GB         | none, and what is built in              |

Own answers are drawn at temperature 0.7. Greedy ones are float32's likeliest tokens, so the next-token agreement there
is the share of float32's greedy decisions that are also ours, each after what float32 wrote. Small models soon repeat
themselves when greedy, and a loop is easily agreed with: each greedy answer ends where the first run of six tokens
comes again.

Of an answer's window only the answer counts: the question and the template around it are read and not scored, or one
template would be scored twenty times.

`--tiny` names the bundled model's original in BF16; without it the bundled integers, multiplied out, are quantised
again, which loses little. `--large FOLDER` makes a random checkpoint shaped like DeepSeek-V2-Lite in there (47 GB with
its result), quantises it without data and with everything, and removes it. `--keep` measures the bars alone, with
another share of growth by parts in floats than the quantiser's own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import REPO, Origin, Row, print_table, write_json
from quantize_large import NUM_LAYERS, large_rows
from tripool import LLM, SamplingParams
from tripool.checkpoints import Checkpoint, open_checkpoint
from tripool.kernels.cpu8.library import set_threads
from tripool.quant import PLAIN, Comparison, Side, Techniques, compare, quantize, read_windows
from tripool.quant.evaluate import PROMPT_TOKENS
from tripool.text import Tokenizer

QUESTIONS = (
    "Tell me a story about a fox.", "What is the capital of France?", "Why is the sky blue?", "Hello! Who are you?",
    "Write a short poem about rain.", "List three fruits.", "Explain how a bicycle stays upright.", "What is 2 + 2?",
    "Give me some advice for sleeping better.", "Describe a sunny day at the beach.", "What do bees do in winter?",
    "How do I make soup from vegetables?", "Name two planets and say how they differ.", "How was paper made long ago?",
    "My dog is afraid of thunder. What can I do?", "Write one sentence with the word 'lantern'.",
    "Is a tomato a fruit or a vegetable?", "Say something kind to a tired teacher.",
    "What should I see in an old town near the sea?", "Explain what a prime number is, with an example.",
)  # fmt: skip
MORE_QUESTIONS = (
    "How does a refrigerator keep food cold?", "Write a letter to a friend who has moved away.",
    "What is the difference between weather and climate?", "Give me three ideas for a rainy afternoon.",
    "Why do leaves change colour in autumn?", "How do I remove a coffee stain from a shirt?",
    "Tell me about the history of the telephone.", "What makes bread rise?", "Describe a busy market in the morning.",
    "How do whales breathe?", "Explain what a loop is in a computer program.", "Why is it important to drink water?",
    "What should I pack for a week in the mountains?", "How can I learn to play the guitar?",
    "Write a short dialogue between a cat and a mouse.", "What is a budget, and why would I need one?",
)  # fmt: skip
PROSE = (REPO / "README.md", REPO / "docs" / "decisions.md")
CALIBRATION_TOKENS, WINDOW, ANSWER_TOKENS = 4096, 512, 160
RUN_TOKENS = 6
"""A run of this many tokens that comes again is a loop."""
PERPLEXITY_TARGET, AGREEMENT_TARGET = 1.01, 0.97
SCALES_SHARE = 0.01
"""Of BF16's bytes: what scales may add to the integers and the parts in floats."""
NONE = {"suppress": False, "search": False, "compensate": False, "keep": 0.0}
ABLATION = {
    "all": Techniques(),
    "outlier suppression": Techniques(**NONE | {"suppress": True}),
    "scale search": Techniques(**NONE | {"search": True}),
    "error compensation": Techniques(**NONE | {"compensate": True}),
    "mixed precision": Techniques(**NONE | {"keep": Techniques().keep}),
}


@dataclass(frozen=True)
class Text:
    windows: list[list[int]]
    starts: list[int]
    """Of each window, the first token that counts."""
    note: str = ""

    def __add__(self, other: Text) -> Text:
        return Text(self.windows + other.windows, self.starts + other.starts)


class Bench:
    """One model: its float side, its texts, and a folder for what is made of it."""

    def __init__(self, name: str, model: str, scratch: Path, *, quick: bool, threads: int) -> None:
        self.name, self._scratch = name, scratch
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self._tokenizer = Tokenizer(self.checkpoint.text)
        self._calibration = self._windows(None, CALIBRATION_TOKENS)
        self.own = own_answers(model, QUESTIONS[: 6 if quick else None], threads)
        greedy = QUESTIONS[:6] if quick else QUESTIONS + MORE_QUESTIONS
        self.greedy = own_answers(model, greedy, threads, greedy=True)
        prose_tokens = 512 if quick else 1536
        windows = [window for path in PROSE for window in self._windows(path, prose_tokens)]
        self.prose = Text(windows, [1] * len(windows))
        self.float_side = self._side(self.checkpoint, "float32")

    def _windows(self, path: Path | None, num_tokens: int) -> list[list[int]]:
        return read_windows(path, self._tokenizer, num_tokens=num_tokens, window=WINDOW)

    def _side(self, checkpoint: Checkpoint, arithmetic: str) -> Side:
        return Side(checkpoint, arithmetic, window=WINDOW, num_answers=len(QUESTIONS))

    def texts(self) -> list[tuple[str, Text]]:
        return [("", self.own), (" greedy", self.greedy), (" prose", self.prose)]

    def quantize(self, label: str, techniques: Techniques) -> tuple[Path, dict[str, float]]:
        target = self._scratch / f"{self.name} {label}"
        began_s = time.process_time()
        done = quantize(self.checkpoint, target, techniques=techniques, windows=self._calibration)
        errors = [one["output_error"] for one in done.linears]
        said = {"cpu_s": time.process_time() - began_s, "mean_output_error": sum(errors) / len(errors)}
        said["num_weights"] = sum(one["num_weights"] for one in done.linears)
        said |= {"kept": len(done.kept), "stored_bytes": sum(f.stat().st_size for f in target.glob("*.safetensors"))}
        tell(f"{self.name}: {label}: {said}")
        return target, said

    def compare(self, target: Path, arithmetic: str, text: Text, *, num_answers: int = 0) -> Comparison:
        with open_checkpoint(target) as checkpoint:
            side = self._side(checkpoint, arithmetic)
        found = compare(self.float_side, side, text.windows, starts=text.starts, num_answers=num_answers)
        tell(f"{self.name}: {arithmetic}: {found}")
        return found


def own_answers(model: str, questions: Sequence[str], threads: int, *, greedy: bool = False) -> Text:
    """Prompt and answer of each question, as tokens: text of the kind that the model was made for."""
    temperature = 0.0 if greedy else 0.7
    with LLM(model, precision="float32", threads=threads) as llm:
        seeds = range(len(questions))
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=ANSWER_TOKENS) for i in seeds]
        talks = [[{"role": "user", "content": question}] for question in questions]
        answers = [answer.choices[0].token_ids for answer in llm.chat(talks, params)]
        prompts = [llm.tokenizer.encode_chat(talk) for talk in talks]
    repeated = sum(map(num_repeated, answers)) / max(sum(len(a) - RUN_TOKENS + 1 for a in answers), 1)
    if greedy:
        answers = [before_loop(answer) for answer in answers]
    pairs = list(zip(prompts, answers, strict=True))
    long_enough = [(p, a) for p, a in pairs if a and len(p) + len(a) > PROMPT_TOKENS]
    note = f"{repeated:.1%} of runs of {RUN_TOKENS} were repeated{', and are cut away' if greedy else ''}"
    return Text([[*p, *a][:WINDOW] for p, a in long_enough], [len(p) for p, _ in long_enough], note)


def repeats(answer: Sequence[int]) -> Iterator[int]:
    """Where a run of tokens begins that was there before."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(answer) - RUN_TOKENS + 1):
        run = tuple(answer[start : start + RUN_TOKENS])
        if run in seen:
            yield start
        seen.add(run)


def num_repeated(answer: Sequence[int]) -> int:
    return sum(1 for _ in repeats(answer))


def before_loop(answer: Sequence[int]) -> Sequence[int]:
    return answer[: next(repeats(answer), len(answer))]


class BfloatSide:
    """transformers, computing in bfloat16: what is lost where nothing is quantised."""

    def __init__(self, checkpoint: Checkpoint, vocab: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.vocab = vocab
        if checkpoint.path.is_dir():
            self._model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16)
            return
        config = AutoConfig.for_model(**checkpoint.config)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        weights = {name: torch.empty(info.shape) for name, info in checkpoint.infos().items()}
        for name, values in weights.items():
            checkpoint.read(name, values)
        self._model.load_state_dict(weights, strict=checkpoint.config.get("tie_word_embeddings") is False)

    def logits(self, window: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self._model(torch.tensor([window])).logits[0].float()
        return found

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """As `Side.greedy`; one at a time, because padding would change sums."""
        return [self._go_on(list(prompt), count) for prompt in prompts]

    def _go_on(self, tokens: list[int], count: int) -> list[int]:
        answer, said = [], self._model(torch.tensor([tokens]), use_cache=True)
        while True:
            answer.append(int(said.logits[0, -1].argmax()))
            if len(answer) == count:
                return answer
            said = self._model(torch.tensor([answer[-1:]]), past_key_values=said.past_key_values, use_cache=True)


def bfloat_rows(bench: Bench) -> Iterator[Row]:
    """No target: it is what 16 bits give, beside which 97 % is to be read."""
    side = BfloatSide(bench.checkpoint, bench.float_side.vocab)
    for label, text in bench.texts():
        found = compare(bench.float_side, side, text.windows, starts=text.starts, num_answers=len(QUESTIONS))
        tell(f"{bench.name}: bf16 {label}: {found}")
        yield Row(
            name=f"{bench.name} bf16{label}: next token as float32's",
            ours=found.next_token_agreement,
            peer=1.0,
            unit="share of tokens",
            target=None,
            note=f"nothing quantised; KL {found.mean_kl:.2g} nats, perplexity {found.perplexity_change:+.2%}, "
            f"greedy {found.greedy_agreement:.1%} before the first difference",
            details=found.as_dict(),
        )


def quality_rows(bench: Bench, target: Path, said: dict[str, float], how: str = "") -> Iterator[Row]:
    both = (("served", "int8"), ("layout", "w8a8"))
    for label, arithmetic, text in [(f"{a}{b}", how, text) for b, text in bench.texts() for a, how in both]:
        found = bench.compare(target, arithmetic, text, num_answers=len(QUESTIONS))
        details = found.as_dict() | {"quantiser": said, "arithmetic": arithmetic}
        note = f"KL {found.mean_kl:.2g} nats, greedy {found.greedy_agreement:.1%} before the first difference"
        yield Row(
            name=f"{bench.name}{how} {label}: perplexity / float32",
            ours=found.perplexity_b,
            peer=found.perplexity_a,
            unit="perplexity",
            target=PERPLEXITY_TARGET,
            lower_is_better=True,
            note=note,
            details=details,
        )
        yield Row(
            name=f"{bench.name}{how} {label}: next token as float32's",
            ours=found.next_token_agreement,
            peer=1.0,
            unit="share of tokens",
            target=AGREEMENT_TARGET,
            note=", ".join(filter(None, (f"{found.num_tokens} tokens", text.note))),
        )


def model_rows(bench: Bench, quick: bool) -> Iterator[Row]:
    """All techniques first: if time runs out, the bars are there and some of the ablation is not."""
    text = bench.own + bench.prose
    if not quick and "quantization_config" not in bench.checkpoint.config:  # of floats: tiny only with `--tiny`
        yield from bfloat_rows(bench)
    folder, said = bench.quantize("none", PLAIN)
    plain = bench.compare(folder, "w8a8", text)
    yield size_row(bench, "plain rounding", said)
    shutil.rmtree(folder)
    for label, techniques in ABLATION.items():
        if quick and label != "all":
            continue
        folder, said = bench.quantize(label, techniques)
        found = bench.compare(folder, "w8a8", text)
        change = f"perplexity {plain.perplexity_change:+.3%} → {found.perplexity_change:+.3%}"
        agreement = f"same token {plain.next_token_agreement:.2%} → {found.next_token_agreement:.2%}"
        yield Row(
            name=f"{bench.name} ablation: {label} / plain rounding",
            ours=found.mean_kl,
            peer=plain.mean_kl,
            unit="nats KL",
            target=None,
            lower_is_better=True,
            note=f"{change}, {agreement}",
            details={"with": found.as_dict(), "without": plain.as_dict(), "quantiser": said},
        )
        if label == "all":
            yield size_row(bench, "all", said)
            yield from quality_rows(bench, folder, said)
        shutil.rmtree(folder)


def kept_rows(bench: Bench, keep: float) -> Iterator[Row]:
    folder, said = bench.quantize(f"keep {keep}", Techniques(keep=keep))
    yield size_row(bench, f"keep {keep}", said, keep)
    yield from quality_rows(bench, folder, said, f" keep {keep}")


def size_row(bench: Bench, label: str, said: dict[str, float], keep: float = Techniques().keep) -> Row:
    """Linears alone: the embedding stays as it is, and is most of a small model and little of a large one."""
    infos = bench.checkpoint.infos().values()
    whole = 2 * sum(int(torch.Size(info.shape).numel()) for info in infos)
    linears = 2 * said["num_weights"]
    return Row(
        name=f"{bench.name} size of the linears: {label} / BF16",
        ours=(said["stored_bytes"] - (whole - linears)) / 1e6,
        peer=linears / 1e6,
        unit="MB",
        target=(1 + keep) / 2 + SCALES_SHARE,
        lower_is_better=True,
        note=f"the whole model is {said['stored_bytes'] / whole:.1%} of BF16",
    )


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all techniques against none, on little text")
    parser.add_argument("--models", help="default tiny,smollm2; tiny alone with --quick")
    parser.add_argument("--tiny", default="tiny", metavar="FOLDER", help="the bundled model's original")
    parser.add_argument("--keep", type=float, metavar="SHARE", help="the bars alone, with this growth allowed")
    parser.add_argument("--large", type=Path, metavar="FOLDER", help="also the 16 B checkpoint, made in this folder")
    parser.add_argument(
        "--large-layers",
        type=int,
        default=NUM_LAYERS,
        help="of it, for a quicker look: one layer is in memory at a time",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    origin, rows = Origin.now(), []
    if options.large:
        for row in large_rows(options.large, num_layers=options.large_layers):
            rows.append(row)
            tell(f"  {row}")
            if options.json:
                write_json(rows, origin, options.json)
    default = "tiny" if options.quick else "tiny,smollm2"
    names = [name for name in (default if options.models is None else options.models).split(",") if name]
    for name in names:
        set_threads(options.threads)
        with tempfile.TemporaryDirectory() as scratch:
            model = options.tiny if name == "tiny" else name
            bench = Bench(name, model, Path(scratch), quick=options.quick, threads=options.threads)
            rows_of_model = model_rows(bench, options.quick) if options.keep is None else kept_rows(bench, options.keep)
            for row in rows_of_model:
                rows.append(row)
                tell(f"  {row}")
                if options.json:  # a long run that is stopped leaves what it had
                    write_json(rows, origin, options.json)
            bench.checkpoint.close()
    print_table(rows, origin, f"Quantising to INT8: {options.threads} thread(s)")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if rows and all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
