"""lm-eval over completions: a task of choices, a perplexity and a generation, with data made here."""

import json
from pathlib import Path

from load import folder, run, tokenizer
from steps import HELLO, MODEL, URL, script, step

QUESTIONS = [{"question": f"What comes after {word}?", "choices": [word * 2, "more"]} for word in ("one", "two")]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n'
ROLLING = 'doc_to_target: "{{question}}"\nmetric_list: [{metric: byte_perplexity}]\n'
WHOLE = (
    'doc_to_target: "%s"\nmetric_list: [{metric: exact_match}]\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 40}\n'
)


def evaluated(kind: str, rest: str, model: str = MODEL) -> tuple[int, str, dict]:
    cwd = folder()
    data = cwd / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), "utf-8")
    (cwd / "task.yaml").write_text(TASK.format(name="made_here", data=data, kind=kind) + rest, "utf-8")
    address = f"base_url={URL}/v1/completions,model={model},tokenizer={tokenizer()},max_retries=1,max_length=512"
    status, printed = run(
        "lm_eval", "--model", "local-completions", "--model_args", f"{address},num_concurrent=2",
        "--include_path", cwd, "--tasks", "made_here", "--output_path", cwd / "made", cwd=cwd,
    )  # fmt: skip
    found: list[Path] = sorted((cwd / "made").rglob("results_*.json"))
    return status, printed, json.loads(found[0].read_text("utf-8"))["results"]["made_here"] if found else {}


@step("quick start")
def _() -> None:
    for kind, rest, metric in (
        ("multiple_choice", CHOICE, "acc,none"),
        ("loglikelihood_rolling", ROLLING, "byte_perplexity,none"),
    ):
        status, printed, results = evaluated(kind, rest)
        assert status == 0 and results[metric] >= 0, printed[-2000:]


@step("generation")
def _() -> None:
    script({"What comes": HELLO})
    status, printed, results = evaluated("generate_until", WHOLE % HELLO)
    assert status == 0 and results["exact_match,none"] == 1, printed[-2000:]


@step("error")
def _() -> None:
    status, printed, results = evaluated("multiple_choice", CHOICE, model="no")
    assert status != 0 and not results, printed[-2000:]
