"""What quantising to INT8 costs in quality and memory: against float32, technique by technique, and at 16 B.

    python bench/quantize.py [--quick] [--models tiny,smollm2] [--tiny FOLDER] [--keep SHARE] [--large FOLDER]
                             [--json FILE]

| rows         | ours                                 | peer         | text                                    |
|--------------|--------------------------------------|--------------|-----------------------------------------|
| served       | our 8-bit kernels on the INT8 folder | float32      | the model's own answers to 20 questions |
| layout       | integers, inputs rounded by token    | float32      | the same                                |
| served prose | our 8-bit kernels on the INT8 folder | float32      | this project's README and decisions     |
| layout prose | integers, inputs rounded by token    | float32      | the same                                |
| ablation     | KL with one technique, or all        | KL with none | both texts, layout arithmetic           |
| 16 B         | most memory of `tripool quantize`    | 6 GB         | none: without calibration data          |

Of an answer's window only the answer counts: the question and the template around it are read and not scored, or one
template would be scored twenty times.

`--tiny` names the bundled model's original in BF16; without it the bundled integers, multiplied out, are quantised
again, which loses little. `--large FOLDER` makes a random checkpoint shaped like DeepSeek-V2-Lite in there (47 GB with
its result), quantises and removes it. `--keep` measures the bars alone, with another share of growth by parts in floats
than the quantiser's own.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import REPO, Origin, Row, print_table, write_json
from tripool import LLM, SamplingParams
from tripool.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from tripool.checkpoints.write import SafetensorsWriter
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
PROSE = (REPO / "README.md", REPO / "docs" / "decisions.md")
CALIBRATION_TOKENS, WINDOW, ANSWER_TOKENS = 4096, 512, 160
PERPLEXITY_TARGET, AGREEMENT_TARGET = 1.01, 0.97
SIZE_TARGET = 0.61
LARGE_GB = 6.0
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
        prose_tokens = 512 if quick else 1536
        windows = [window for path in PROSE for window in self._windows(path, prose_tokens)]
        self.prose = Text(windows, [1] * len(windows))
        self._float = self._side(self.checkpoint, "float32")

    def _windows(self, path: Path | None, num_tokens: int) -> list[list[int]]:
        return read_windows(path, self._tokenizer, num_tokens=num_tokens, window=WINDOW)

    def _side(self, checkpoint: Checkpoint, arithmetic: str) -> Side:
        return Side(checkpoint, arithmetic, window=WINDOW, num_answers=len(QUESTIONS))

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
        found = compare(self._float, side, text.windows, starts=text.starts, num_answers=num_answers)
        tell(f"{self.name}: {arithmetic}: {found}")
        return found


def own_answers(model: str, questions: Sequence[str], threads: int) -> Text:
    """Prompt and answer of each question, as tokens: text of the kind that the model was made for."""
    with LLM(model, precision="float32", threads=threads) as llm:
        params = [SamplingParams(temperature=0.7, seed=i, max_tokens=ANSWER_TOKENS) for i in range(len(questions))]
        talks = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(talks, params)
        prompts = [llm.tokenizer.encode_chat(talk) for talk in talks]
    pairs = [(p, answer.choices[0].token_ids) for p, answer in zip(prompts, answers, strict=True)]
    long_enough = [(p, a) for p, a in pairs if a and len(p) + len(a) > PROMPT_TOKENS]
    return Text([[*p, *a][:WINDOW] for p, a in long_enough], [len(p) for p, _ in long_enough])


def quality_rows(bench: Bench, target: Path, said: dict[str, float], how: str = "") -> Iterator[Row]:
    for label, arithmetic, text in (
        ("served", "int8", bench.own),
        ("layout", "w8a8", bench.own),
        ("served prose", "int8", bench.prose),
        ("layout prose", "w8a8", bench.prose),
    ):
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
            note=f"{found.num_tokens} tokens",
        )


def model_rows(bench: Bench, quick: bool) -> Iterator[Row]:
    """All techniques first: if time runs out, the bars are there and some of the ablation is not."""
    text = bench.own + bench.prose
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
    yield size_row(bench, f"keep {keep}", said)
    yield from quality_rows(bench, folder, said, f" keep {keep}")


def size_row(bench: Bench, label: str, said: dict[str, float]) -> Row:
    """Linears alone: the embedding stays as it is, and is most of a small model and little of a large one."""
    infos = bench.checkpoint.infos().values()
    whole = 2 * sum(int(torch.Size(info.shape).numel()) for info in infos)
    linears = 2 * said["num_weights"]
    return Row(
        name=f"{bench.name} size of the linears: {label} / BF16",
        ours=(said["stored_bytes"] - (whole - linears)) / 1e6,
        peer=linears / 1e6,
        unit="MB",
        target=SIZE_TARGET,
        lower_is_better=True,
        note=f"the whole model is {said['stored_bytes'] / whole:.1%} of BF16",
    )


V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 102400,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def v2_lite_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    hidden, prefix = 2048, f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (16 * 192, hidden), "self_attn.kv_a_proj_with_mqa": (576, hidden),
        "self_attn.kv_a_layernorm": (512,), "self_attn.kv_b_proj": (16 * 256, 512),
        "self_attn.o_proj": (hidden, 16 * 128),
    }  # fmt: skip
    mlps = {"mlp": 10944} if layer == 0 else {"mlp.shared_experts": 2816}
    if layer:
        shapes["mlp.gate"] = (64, hidden)
        mlps |= {f"mlp.experts.{i}": 1408 for i in range(64)}
    for name, width in mlps.items():
        shapes |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden)}
        shapes[f"{name}.down_proj"] = (hidden, width)
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def write_large(folder: Path) -> int:
    """Random BF16 weights, a shard for each layer. One pool of random numbers, read from other places each time."""
    dice = torch.Generator().manual_seed(0)
    pool = torch.randn(2**28, generator=dice).mul_(0.02).bfloat16()
    weight_map, total = {}, 0
    rest = {"model.embed_tokens.weight": (102400, 2048), "lm_head.weight": (102400, 2048), "model.norm.weight": (2048,)}
    for i, shapes in enumerate([rest, *(v2_lite_shapes(layer) for layer in range(27))]):
        shard = f"model-{i + 1:05}-of-00028.safetensors"
        writer = SafetensorsWriter(folder / shard, {name: TensorInfo(shape, "BF16") for name, shape in shapes.items()})
        for name, shape in shapes.items():
            size = int(torch.Size(shape).numel())
            start = int(torch.randint(0, len(pool) - size, (1,), generator=dice))
            writer.put(name, pool[start : start + size].view(shape))
            total += size
        writer.finish()
        weight_map |= dict.fromkeys(shapes, shard)
        tell(f"16 B: shard {i + 1} of 28 written")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(V2_LITE))
    return total


def large_row(scratch: Path) -> Row:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source, target = Path(folder) / "v2-lite", Path(folder) / "int8"
        source.mkdir()
        num_weights = write_large(source)
        began_s = time.monotonic()
        command = [sys.executable, "-m", "tripool", "quantize", str(source), str(target), "--tokens", "0"]
        done = subprocess.run([*command, "--no-search"], stdout=subprocess.DEVNULL)
        most_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
        wall_s = time.monotonic() - began_s
        finished = done.returncode == 0 and (target / "config.json").exists()
        stored = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    return Row(
        name=f"16 B synthetic ({num_weights / 1e9:.1f} B weights): most memory of quantize",
        ours=most_gb if finished else None,
        peer=LARGE_GB,
        unit="GB resident",
        target=1.0,
        lower_is_better=True,
        note=f"plain rounding without data; {wall_s:.0f} s, {stored / 1e9:.1f} GB written" if finished else "it failed",
        details={"wall_s": wall_s, "stored_bytes": stored},
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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    origin, rows = Origin.now(), []
    # First: the most memory of any child so far is what is read, and this is to be the first child.
    if options.large:
        rows.append(large_row(options.large))
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
