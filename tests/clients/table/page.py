"""docs/clients.md: what each client was seen to do, from `seen.json`, which `clients.table.run` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clients.table.catalog import CLIENTS

SEEN = Path(__file__).with_name("seen.json")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "clients.md"
_HEAD = """# Clients

Programs that nobody here wrote, each installed in an environment of its own and run against the scripted server
(`tests/clients/scripted.py`: the real gateway, answers given by the test), through its own quick start, a stream,
tools, structured output, an error and a second turn, as far as it has them:

    cd tests
    ../.venv/bin/python -m clients.table.install
    ../.venv/bin/python -m clients.table.run [--split] --record

Requests that they sent are in `tests/clients/recorded/`, without their authors' prose; `make test` replays them. This
page is written by the last command.

| client | version | talks to | colocated | split |
|---|---|---|---|---|
"""
REFUSALS = {
    (404, "model_not_found"): 'a model that the server does not have: the step "error" of every client.',
    (400, "invalid_request"): "`max_tokens: 0` to Messages, also an error step: there is nothing to answer.",
}
"""Of recorded requests, by status and code. vLLM refuses all of them too: `tests/clients/test_vllm.py`."""
_TAIL = """
Recorded requests that are refused, by status and code (`tests/clients/test_recorded.py` fails on any other):

{refusals}
vLLM 0.32.0 with a model of text refuses all of these too: nothing is refused here that vLLM serves
(`tests/clients/test_vllm.py` sends it the recorded requests).

Refused whoever asks, by name and with a reason ([http.md](http.md)):

- Images, audio and files in a message: the models are text models.
- `background`, `conversation` and `prompt` of Responses: nothing runs or is kept without its client.
- A continued `thread` of Messages, with the code that makes Anthropic's clients send the whole conversation.
- A schema with parts that no grammar can promise, where it is a promise (`strict: true`, a required call). Elsewhere
  the parts are checked after the answer.
- Fields that nobody sends by itself and that the server does not know: a typing error should not pass silently.

Conditions:

- Vercel's AI SDK refers to earlier items of `/v1/responses` by id. A gateway knows the items of the last hour; with
  `--response-store-mb 0`, a second turn needs `providerOptions: {{openai: {{store: false}}}}`.
- lm-eval's scores equal those of its transformers backend (`tests/clients/test_lm_eval.py`). It takes the tokenizer of
  this server by itself, and then the end token as the first one of a rolling perplexity where the model's first token
  has the id 0; for such models, as the bundled one, give it `tokenizer_backend=huggingface`.
- A grammar keeps the order of a schema's properties: a model whose arguments come in another order is led to this one.
- Load generators count tokens with a tokenizer of their own; the scripted server's tokens are bytes.
"""


def keep(name: str, mode: str, version: str, failures: dict[str, str | None]) -> None:
    seen = read()
    seen.setdefault(name, {})[mode] = {"version": version, "failures": failures}
    SEEN.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n", "utf-8")
    PAGE.write_text(page(seen), "utf-8")


def read() -> dict[str, Any]:
    return json.loads(SEEN.read_text("utf-8")) if SEEN.exists() else {}


def page(seen: dict[str, Any]) -> str:
    rows = []
    for client in CLIENTS:
        modes = seen.get(client.name, {})
        version = next((mode["version"] for mode in modes.values()), "")
        cells = [_cell(modes.get(mode)) for mode in ("colocated", "split")]
        rows.append(f"| {client.name} | {version} | {client.surface} | {' | '.join(cells)} |\n")
    refusals = "".join(f"- {status} `{code}`: {why}\n" for (status, code), why in REFUSALS.items())
    return _HEAD + "".join(rows) + _TAIL.format(refusals=refusals)


def _cell(mode: dict[str, Any] | None) -> str:
    if mode is None:
        return "not run"
    worked = [step for step, failure in mode["failures"].items() if failure is None]
    failed = [step for step, failure in mode["failures"].items() if failure is not None]
    return f"{len(worked)} {'step works' if len(worked) == 1 else 'steps work'}" + (
        f"; fails: {', '.join(failed)}" if failed else ""
    )
