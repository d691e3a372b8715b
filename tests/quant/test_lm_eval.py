"""Scores of `tripool eval --tasks` are lm-eval's, question by question, with transformers as its backend: SmolLM2 from
one GGUF file, read by both, on tasks made here. lm-eval's environment is that of the clients, or LM_EVAL_PYTHON's.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clients.table.catalog import LM_EVAL
from clients.table.install import folder_of
from tripool.checkpoints import open_checkpoint
from tripool.quant import Score, Task, score
from tripool.quant.tasks import read_tasks

pytestmark = pytest.mark.prove

FACTS = (
    ("The capital of France is", "Paris", ("London", "a large city by the sea")),
    ("The opposite of hot is", "cold", ("warm", "something else entirely")),
    ("Two plus two equals", "four", ("five", "a very large number")),
    ("A baby dog is called a", "puppy", ("kitten", "calf")),
    ("The colour of fresh snow is", "white", ("black", "green and yellow")),
    ("Bees make", "honey", ("milk", "bread and butter")),
    ("The sun rises in the", "east", ("west", "middle of the night")),
    ("The first day after Monday is", "Tuesday", ("Sunday", "Friday")),
    ("Water freezes and becomes", "ice", ("steam", "wood or stone")),
    ("You see with your", "eyes", ("ears", "hands and feet")),
    ("The largest ocean is the", "Pacific", ("Atlantic", "Baltic")),
    ("Wine is made of", "grapes", ("apples", "corn and wheat")),
    ("Café is a word from", "French", ("Finnish", "Klingon")),
    ("H2O is", "water", ("salt", "gold")),
    ("A triangle has this many sides:", "three", ("two", "seventeen")),
    ("The moon goes around the", "Earth", ("Sun", "stars")),
)
STOPS = ["\n", "."]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """
output_type: generate_until
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
generation_kwargs: {until: STOPS, max_gen_toks: 12, do_sample: false}
filter_list:
- name: bare
  filter: [{function: regex, regex_pattern: '(?s)^\\s*(.*?)\\s*$'}, {function: take_first}]
""".replace("STOPS", json.dumps(STOPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    choose, write = [], []
    for number, (question, right, wrong) in enumerate(FACTS):
        choices = list(wrong)
        choices.insert(number % 3, right)
        choose.append({"question": question, "choices": choices, "answer": number % 3})
        write.append({"question": question, "answer": right})
    for name, lines, kind in (("choose", choose, CHOICE), ("write", write, WRITTEN)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
        (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data) + kind, "utf-8")
    for chat in (False, True):
        options = f"chat = {str(chat).lower()}\n"
        (folder / f"{chat}.toml").write_text(
            f'[[task]]\nname = "choose"\nfile = "choose.jsonl"\n{options}'
            f'[[task]]\nname = "write"\nfile = "write.jsonl"\nmax_tokens = 12\nstop = {json.dumps(STOPS)}\n{options}',
            "utf-8",
        )
    return folder


@pytest.fixture(scope="module")
def gguf() -> Path:
    with open_checkpoint("smollm2") as checkpoint:
        return checkpoint.path


Scores = tuple[dict[str, dict[str, float]], dict[str, list[dict[str, Any]]]]
SCRIPT = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

folder, gguf_folder, gguf_file, out = sys.argv[1:]
model = HFLM(pretrained=gguf_folder, gguf_file=gguf_file, dtype="float32", device="cpu", batch_size=1)
manager = TaskManager(include_path=folder, include_defaults=False)
for chat in (False, True):
    found = simple_evaluate(
        model=model, tasks=["choose", "write"], task_manager=manager, apply_chat_template=chat, log_samples=True
    )
    kept = {"results": found["results"], "samples": found["samples"]}
    with open(f"{out}/{chat}.json", "w", encoding="utf-8") as file:
        json.dump(kept, file, default=str)
"""


@pytest.fixture(scope="module")
def theirs(folder: Path, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Scores]:
    """Of both runs, by whether they were chats; one process, as loading takes longest."""
    python = Path(os.environ.get("LM_EVAL_PYTHON") or folder_of(LM_EVAL) / "bin" / "python")
    if not python.exists():
        pytest.skip("cd tests && python -m clients.table.install lm-eval")
    out = tmp_path_factory.mktemp("theirs")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub")}
    command = [str(python), "-c", SCRIPT, str(folder), str(gguf.parent), gguf.name, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = {}
    for chat in (False, True):
        said = json.loads((out / f"{chat}.json").read_text("utf-8"))
        samples = {name: sorted(lines, key=lambda line: int(line["doc_id"])) for name, lines in said["samples"].items()}
        found[chat] = said["results"], samples
    return found


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_scores_are_those_of_lm_eval(folder: Path, gguf: Path, theirs: dict[bool, Scores], chat: bool) -> None:
    tasks = read_tasks(folder / f"{chat}.toml")
    with open_checkpoint(gguf) as checkpoint:
        ours = {one.task: one for one in score(checkpoint, "float32", tasks)}
    results, samples = theirs[chat]
    for task in tasks:
        print(f"chat {chat}: {task.name}: {ours[task.name].figures}")
        _compare(task, ours[task.name], results[task.name], samples[task.name])
    assert 0 < ours["choose"].figures["acc"] < 1 or 0 < ours["choose"].figures["acc_norm"] < 1, "it tells models apart"


def _compare(task: Task, ours: Score, theirs: dict[str, float], samples: list[dict[str, Any]]) -> None:
    assert len(samples) == ours.num_questions == len(FACTS)
    for name in task.figures:
        filter_name = "none" if task.is_choice else "bare"
        assert ours.figures[name] == theirs[f"{name},{filter_name}"], name
        assert ours.errors[name] == pytest.approx(theirs[f"{name}_stderr,{filter_name}"], rel=1e-9), name
    for own, sample in zip(ours.samples, samples, strict=True):
        for name in task.figures:
            assert own[name] == sample[name], sample["doc"]
        if task.is_choice:
            likely = [float(value[0]) for value in sample["filtered_resps"]]
            assert own["log_likelihoods"] == pytest.approx(likely, rel=1e-3, abs=1e-3), sample["doc"]
        else:
            assert own["answer"].strip() == sample["filtered_resps"][0]
