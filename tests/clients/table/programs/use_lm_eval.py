"""lm-eval over completions: a task of choices, a perplexity and a generation, with data made here."""

import json
from pathlib import Path

from load import folder, run
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


def evaluated(tasks: dict[str, str], model: str = MODEL) -> tuple[int, str, dict]:
    """`tasks`: by their kind."""
    cwd = folder()
    data = cwd / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), "utf-8")
    for kind, rest in tasks.items():
        (cwd / f"{kind}.yaml").write_text(TASK.format(name=f"made_{kind}", data=data, kind=kind) + rest, "utf-8")
    address = f"base_url={URL}/v1/completions,model={model},max_retries=1,max_length=512"
    status, printed = run(
        "lm_eval", "--model", "local-completions", "--model_args", f"{address},num_concurrent=2",
        "--include_path", cwd, "--tasks", ",".join(f"made_{kind}" for kind in tasks),
        "--output_path", cwd / "made", cwd=cwd,
    )  # fmt: skip
    found: list[Path] = sorted((cwd / "made").rglob("results_*.json"))
    return status, printed, json.loads(found[0].read_text("utf-8"))["results"] if found else {}


@step("quick start")
def _() -> None:
    status, printed, results = evaluated({"multiple_choice": CHOICE, "loglikelihood_rolling": ROLLING})
    assert status == 0, printed[-2000:]
    assert results["made_multiple_choice"]["acc,none"] in (0, 0.5, 1)
    assert results["made_loglikelihood_rolling"]["byte_perplexity,none"] > 1


@step("generation")
def _() -> None:
    script({"What comes": HELLO})
    status, printed, results = evaluated({"generate_until": WHOLE % HELLO})
    assert status == 0 and results["made_generate_until"]["exact_match,none"] == 1, printed[-2000:]


@step("error")
def _() -> None:
    status, printed, results = evaluated({"multiple_choice": CHOICE}, model="no")
    assert status != 0 and not results, printed[-2000:]
