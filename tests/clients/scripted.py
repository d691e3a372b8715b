"""A server whose answers are given by the test: the real gateway over the scripted engine, as a process of its own.

From Python, for tests:

    with scripted_server([{"when": "", "answer": "Hello!"}], split=False) as server:
        ask(server.url, model=server.model)
        server.script([{"when": "weather", "answer": call("get_weather", city="Bern")}])

By hand, or from another program (prints `serves fake at http://127.0.0.1:PORT/v1`, ends with SIGTERM):

    python tests/clients/scripted.py answers.json [--split] [--port 8000] [--context 1048576]

`tripool.engine.scripted` says what a script may hold: texts with `<think>` and `<tool_call>` included, and how one is
chosen by the prompt. Prompts are tokenised byte by byte, so the context is large.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 2**20
START_WITHIN_S, END_WITHIN_S = 120.0, 60.0
Rule = dict[str, Any]


def call(name: str, /, **arguments: Any) -> str:
    """The text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@dataclass(frozen=True)
class Scripted:
    url: str
    model: str
    path: Path
    grpc_address: str = ""

    def script(self, rules: Sequence[Rule]) -> None:
        """Replaces the rules, for requests that begin after this."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(list(rules)), encoding="utf-8")
        fresh.replace(self.path)


@contextmanager
def scripted_server(
    rules: Sequence[Rule] = (), *, split: bool = False, options: Sequence[str] = ()
) -> Iterator[Scripted]:
    """`options`: of the command line below."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        path.write_text(json.dumps(list(rules)), encoding="utf-8")
        command = [sys.executable, __file__, str(path), *(["--split"] if split else []), *options]
        # No key store of the person who runs this has a part in it.
        state = os.environ | {"XDG_STATE_HOME": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=state) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(START_WITHIN_S, process.kill)
            watchdog.start()
            try:
                line = process.stdout.readline()
                found = re.match(r"serves (\S+) at (\S+)/v1(?: and gRPC at (\S+))?", line)
                assert found, f"no server within {START_WITHIN_S:g} s: {line}"
                watchdog.cancel()
                yield Scripted(found[2], found[1], path, found[3] or "")
            finally:
                watchdog.cancel()
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(END_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


def main() -> None:
    from tripool.config import GatewayConfig
    from tripool.serving import build_colocated, build_split
    from tripool.serving.worker import load_pool_engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--split", action="store_true", help="gateway, prefill and decode worker as processes")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--grpc-port", type=int, help="also serve gRPC; 0: at any free port")
    parser.add_argument("--context", type=int, default=CONTEXT_TOKENS, help="tokens, which are bytes")
    given = parser.parse_args()
    # Room for a few of the longest prompts; a block of the fake engine takes 512 bytes.
    blocks = max(2048, 4 * given.context // 64)
    model = f"fake:context={given.context},blocks={blocks},step_tokens=65536,script={given.script.absolute()}"
    gateway = GatewayConfig(port=given.port, grpc_port=given.grpc_port)
    if given.split:
        server: Any = build_split([model], gateway=gateway)
    else:
        server = build_colocated(
            [model], gateway=gateway, load=lambda name, config: load_pool_engine(name, config, "decode")
        )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    with server:
        calls = "" if server.grpc_address is None else f" and gRPC at {server.grpc_address}"
        server.run(lambda: print(f"serves fake at {server.url}/v1{calls}", flush=True))


if __name__ == "__main__":
    main()
