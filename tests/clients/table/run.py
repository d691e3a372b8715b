"""Runs the programs of clients against a scripted server and says what worked.

    cd tests
    python -m clients.table.install            # once: every client in an environment of its own
    python -m clients.table.run [NAME ...] [--split] [--record]

`--record` keeps the requests in tests/clients/recorded/, one file per client, for the replay in the test suite,
and what worked in docs/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tripool
from clients.scripted import Scripted, scripted_server
from clients.table import page
from clients.table.catalog import CLIENTS, Client
from clients.table.install import folder_of, is_installed
from clients.table.recorder import Recorder
from clients.table.replay import keep

HERE = Path(__file__).resolve().parent
WITHIN_S = 900.0
RECORDED = HERE.parent / "recorded"


@dataclass
class Row:
    client: Client
    version: str
    mode: str
    failures: dict[str, str | None] = field(default_factory=dict)
    """By step; None: it worked."""
    printed: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.failures) and not any(self.failures.values())


def run(client: Client, server: Scripted, mode: str) -> Row:
    row = Row(client, version_of(client), mode)
    with Recorder(server.url).running() as recorder:
        environment = os.environ | {
            "TRIPOOL_URL": recorder.url,
            "TRIPOOL_MODEL": server.model,
            "TRIPOOL_SCRIPT": str(server.path),
            "TRIPOOL_GRPC": server.grpc_address,
            "TRIPOOL_SOURCE": str(Path(tripool.__file__).parent),
            "PYTHONPATH": str(HERE / "programs"),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }
        try:
            ran = subprocess.run(
                command_of(client), cwd=folder_of(client), env=environment, capture_output=True, text=True,
                timeout=WITHIN_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            row.printed = ran.stdout + ran.stderr
        except subprocess.TimeoutExpired as error:
            row.printed = f"{(error.stdout or b'').decode()}\nnot done within {WITHIN_S:g} s"
        row.requests = recorder.requests
    program = (HERE / "programs" / client.program).read_text("utf-8")
    row.failures = dict.fromkeys(re.findall(r'\bstep\("([^"]+)"', program), "no result")
    for line in row.printed.splitlines():
        _, found, rest = line.partition("STEP {")  # a client may leave its own line open
        if found:
            step = json.loads("{" + rest)
            row.failures[step["step"]] = step["failure"]
    return row


def command_of(client: Client) -> list[str]:
    program = HERE / "programs" / client.program
    if client.language == "python":
        return [str(folder_of(client) / "bin" / "python"), str(program)]
    # Node looks for packages beside the program.
    for file in (HERE / "programs").glob("*.mjs"):
        shutil.copy(file, folder_of(client))
    return ["node", client.program]


def version_of(client: Client) -> str:
    package = next(name for name in client.packages if not name.startswith("torch"))
    folder = folder_of(client)
    if client.language == "node":
        return json.loads((folder / "node_modules" / package / "package.json").read_text("utf-8"))["version"]
    name = package.partition("[")[0]
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="what the programs print")
    given = parser.parse_args()
    with scripted_server(split=given.split, options=("--grpc-port", "0")) as server:
        return run_all(given, server)


def run_all(given: argparse.Namespace, server: Scripted) -> int:
    wrong = 0
    for client in CLIENTS:
        if given.names and client.name not in given.names:
            continue
        if not is_installed(client):
            print(f"{client.name:20} not installed")
            wrong += 1
            continue
        row = run(client, server, "split" if given.split else "colocated")
        failed = {step: failure for step, failure in row.failures.items() if failure}
        print(
            f"{client.name:20} {row.version:10} {'works' if row.ok else 'FAILS'} {len(row.failures)} steps {failed}",
            flush=True,
        )
        if not row.ok and (given.verbose or not row.failures):
            print(row.printed[-4000:])
        wrong += not row.ok
        if given.record:
            if row.ok and not given.split:  # what a client sends does not depend on the server
                keep(client.name, row.requests)
            page.keep(client.name, row.mode, row.version, row.failures)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
