"""lm-eval's loglikelihood and perplexity tasks over HTTP equal those of its own transformers backend.

The model is small and random, with the bundled model's tokenizer; the tasks and their data are made here.

A rolling perplexity begins with a token before the text. lm-eval takes the tokenizer of a server that has
`/tokenizer_info` by itself, and then `bos_token_id or eos_token_id`: where the first id is 0, as in the bundled model,
that is the end token, while its transformers backend takes the first one. So its default is compared with another
first token, and the bundled one with `tokenizer_backend=huggingface`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import tripool
from clients.conftest import Served, installed, serving
from clients.table.catalog import LM_EVAL
from clients.table.install import folder_of

pytestmark = pytest.mark.prove

QUESTIONS = [
    {"question": f"What comes after {word}?", "choices": [word * 2, f"{word} and more", "nothing"], "gold": number % 3}
    for number, word in enumerate(["one", "two", "three", "a cat", "the rain", "bread", "Monday", "red"])
]
CHOICE = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PERPLEXITY = """
task: text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
"""


@pytest.fixture(scope="module", params=["<|system|>", "<|begin|>"])
def first_token(request: pytest.FixtureRequest) -> str:
    token: str = request.param
    return token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, first_token: str) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    bundled = Path(tripool.__file__).parent / "checkpoints" / "bundled" / "tiny"
    vocab = json.loads((bundled / "config.json").read_text("utf-8"))["vocab_size"]
    set_seed(7)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    shutil.copy(bundled / "tokenizer.json", folder)
    about = json.loads((bundled / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"bos_token": first_token}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def scored(checkpoint: Path) -> Iterator[Served]:
    yield from serving(str(checkpoint), "--precision", "float32")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), "utf-8")
    for name, text in (("choose", CHOICE), ("text", PERPLEXITY)):
        (folder / f"{name}.yaml").write_text(text.format(data=data), "utf-8")
    return folder


def test_scores_equal_those_of_transformers(
    checkpoint: Path, first_token: str, scored: Served, tasks: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    program = installed(folder_of(LM_EVAL) / "bin" / "lm_eval", "cd tests && python -m clients.table.install lm-eval")
    backend = ",tokenizer_backend=huggingface" if first_token == "<|begin|>" else ""
    results = []
    for name, model, arguments in (
        ("ours", "local-completions", _over_http(scored, checkpoint) + backend),
        ("theirs", "hf", f"pretrained={checkpoint},dtype=float32"),
    ):
        run(
            program, "--model", model, "--model_args", arguments, "--include_path", tasks, "--tasks", "choose,text",
            "--output_path", tmp_path / name, "--log_samples", "--batch_size", "1", folder=tmp_path,
        )  # fmt: skip
        results.append(_samples(tmp_path / name))
    ours, theirs = results
    assert len(ours) == len(theirs) == 2 * len(QUESTIONS)
    for key, scores in theirs.items():
        assert ours[key] == pytest.approx(scores, rel=1e-3, abs=1e-3), key


def _over_http(scored: Served, checkpoint: Path) -> str:
    address = f"base_url={scored.url}/v1/completions,model={scored.model}"
    return f"{address},tokenizer={checkpoint},num_concurrent=4,max_retries=1,tokenized_requests=True,max_length=512"


def _samples(folder: Path) -> dict[tuple[str, int], list[float]]:
    """Log-likelihoods of every question, by task and number."""
    found = {}
    for path in folder.rglob("samples_*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            sample = json.loads(line)
            values = [value[0] if isinstance(value, list) else value for value in sample["filtered_resps"]]
            found[path.name.split("_")[1], sample["doc_id"]] = [float(value) for value in values]
    return found
