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
_TAIL = """
Kept refusals and conditions:

- Vercel's AI SDK refers to earlier items of `/v1/responses` by id. A server stores no responses unless it is started
  with `--response-store-mb`; without it, a second turn needs `providerOptions: {openai: {store: false}}`, as above.
- lm-eval's scores over `echo` and `logprobs` are compared with those of its transformers backend by
  `tests/clients/test_lm_eval.py`: multiple choice is equal, the rolling perplexity is not yet.
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
    return _HEAD + "".join(rows) + _TAIL


def _cell(mode: dict[str, Any] | None) -> str:
    if mode is None:
        return "not run"
    worked = [step for step, failure in mode["failures"].items() if failure is None]
    failed = [step for step, failure in mode["failures"].items() if failure is not None]
    return f"{len(worked)} steps work" + (f"; fails: {', '.join(failed)}" if failed else "")
