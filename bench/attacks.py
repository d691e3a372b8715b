"""What a tenant notices while others attack: its time to first token, quiet and under each attack, on real servers.

    python bench/attacks.py [--quick] [--json FILE] [--only ATTACK ...] [--mode one|split ...]

A server with API keys serves the bundled model, in one process and then split. The victim sends short chats at a
steady rate, each on a connection of its own, and its 95th percentile is measured in turns: quiet, attack, quiet,
attack. A chat that is refused or fails counts as the longest wait there is. Each row is the attack's percentile over
the quiet one.

Attackers have keys of their own, with the limits that the table names, or none where they need none. They run in a
process of their own at the lowest priority (nice 19), send bytes that were made beforehand, and throw away what comes
back unparsed, so that what is measured is what the server does with them and not the cores that they take for
themselves. After a refusal they wait for a moment: sending refusable requests as fast as a machine can is an attack on
its network stack that no server of one process can bear, and not what these rows are about.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from attack_clients import endless_header, half_open, slow_reader
from gateway import serving
from harness import Origin, Row, print_table, write_json
from tripool.tenants.key_store import KeyStore

TARGET = 1.5
RATE_PER_S = 6.0
LONGEST_S = 30.0
SETTLE_S = 1.0
DRAINED_WITHIN_S = 60.0
QUESTION = "There was a small fox who lived beside a pool, and one morning it found a letter. " * 3 + "What did it say?"
PAUSE_S = 0.05
"""Of an attacker after a refusal."""
SERVER = "import sys; from tripool.cli.main import main; main(sys.argv[1:])"
QUIET = ("--log-level", "error")
MODES: Mapping[str, tuple[str, ...]] = {"one": (), "split": ("--split",)}


# ---- attacks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    key: str


Attack = Callable[[Target, float], Awaitable[object]]


@dataclass(frozen=True)
class Attacker:
    about: str
    attack: Attack
    limits: Mapping[str, float] = field(default_factory=dict)


def bodies(path: str, target: Target, made: Iterator[Mapping[str, Any]]) -> Iterator[bytes]:
    for body in made:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {target.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
        yield head.encode() + raw


async def send_all(target: Target, requests: Iterator[bytes], connections: int) -> None:
    """One after the other on each connection, for as long as the process lives."""

    async def one() -> None:
        while True:
            began_s = time.monotonic()
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(target.host, target.port)
                try:
                    writer.write(next(requests))
                    while await reader.read(2**16):
                        pass
                finally:
                    writer.close()
            await asyncio.sleep(max(0.001, began_s + PAUSE_S - time.monotonic()))

    await asyncio.gather(*(one() for _ in range(connections)))


def repeated(path: str, *made: Mapping[str, Any], connections: int = 4) -> Attack:
    """The same few bodies again and again."""

    def attack(target: Target, seconds: float) -> Awaitable[object]:
        ready = list(bodies(path, target, iter(made)))
        endless = (ready[i % len(ready)] for i in range(10**9))
        return send_all(target, endless, connections)

    return attack


def patterns() -> Attack:
    def attack(target: Target, seconds: float) -> Awaitable[object]:
        salt = random.randrange(10**9)
        made = (
            {"prompt": "a", "max_tokens": 1, "guided_regex": f"(a|b)*a(a|b){{12}}{salt}x{number}"}
            for number in range(10**9)
        )
        return send_all(target, bodies("/v1/completions", target, made), 8)

    return attack


def long_prompts(count: int, tokens: int) -> dict[str, Any]:
    rng = random.Random(count)
    prompts = [[rng.randrange(300, 4000) for _ in range(tokens)] for _ in range(count)]
    return {"prompt": prompts, "max_tokens": 100, "ignore_eos": True}


PROPERTIES = {f"p{number}": {"type": "integer"} for number in range(505)}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 50}
ATTACKS: Mapping[str, Attacker] = {
    "endless header": Attacker("without a key", lambda t, s: endless_header(t.host, t.port, s)),
    "half-open": Attacker("500 connections, without a key", lambda t, s: half_open(t.host, t.port, 500, s)),
    "tokenize": Attacker(
        "8 at once, 60 kB and 3.9 MB of text in turn, --rpm 120",
        repeated("/tokenize", {"prompt": "lorem ipsum " * 5000}, {"prompt": "fox " * 975_000}, connections=8),
        {"rpm": 120},
    ),
    "trials": Attacker("8 at once, distinct patterns, --rpm 1", patterns(), {"rpm": 1}),
    "n 128": Attacker(
        "one request of 128 choices of 2,000 tokens",
        repeated(
            "/v1/completions", {"prompt": "Once", "n": 128, "max_tokens": 2000, "ignore_eos": True}, connections=1
        ),
    ),
    "64 prompts": Attacker("of 900 tokens each", repeated("/v1/completions", long_prompts(64, 900), connections=1)),
    "256 prompts": Attacker(
        "of 900 tokens each, --tpm 1000",
        repeated("/v1/completions", long_prompts(256, 900), connections=2),
        {"tpm": 1000},
    ),
    "slow readers": Attacker(
        "32 streams of which nothing is read", lambda t, s: slow_reader(t.host, t.port, t.key, 32, s)
    ),
    "extremes": Attacker(
        "top_p 1e-46, temperature 1e-38, 505 properties",
        repeated(
            "/v1/chat/completions",
            CHAT | {"top_p": 1e-46},
            CHAT | {"temperature": 1e-38, "guided_regex": "[a-z ]+"},
            CHAT | {"guided_json": {"type": "object", "properties": PROPERTIES}},
        ),
    ),
}


async def attack_for_ever(name: str, target: Target) -> None:
    print("begins", flush=True)
    while True:
        await ATTACKS[name].attack(target, LONGEST_S)


@contextmanager
def attacking(name: str, target: Target) -> Iterator[None]:
    command = [sys.executable, __file__, "--attack", name, target.host, str(target.port), target.key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(19)) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


# ---- the victim -----------------------------------------------------------------------------------------------------


class Victim:
    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key
        self._number = 0
        self.errors: dict[str, int] = {}

    async def ttfts_s(self, span_s: float) -> list[float]:
        """Of chats that begin during this time."""
        chats = []
        for _ in range(round(span_s * RATE_PER_S)):
            chats.append(asyncio.ensure_future(self._chat()))
            await asyncio.sleep(1 / RATE_PER_S)
        return await asyncio.gather(*chats)

    async def _chat(self) -> float:
        self._number += 1
        content = f"This is question number {self._number}. {QUESTION}"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": True, "ignore_eos": True}
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_S), self._answer(body) as (status, reader):
                if status != 200:
                    told = (await reader.read(500)).decode(errors="replace")
                    self._note(f"{status} {told.partition('message')[2][:80]}")
                    return LONGEST_S
                while line := await reader.readline():
                    if line.startswith(b"data:") and b"content" in line:
                        ttft_s = time.monotonic() - began_s
                        while await reader.read(2**16):
                            pass
                        return ttft_s
                self._note("ended without a token")
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._note(type(error).__name__)
        return LONGEST_S

    @asynccontextmanager
    async def _answer(self, body: Mapping[str, Any] | None, path: str = "/v1/chat/completions") -> AsyncIterator[Any]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            raw = b"" if body is None else json.dumps(body).encode()
            head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
            head += f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw)
            yield int((await reader.readline()).split()[1]), reader
        finally:
            writer.close()

    async def load(self) -> int:
        """Requests inside the server; needs an admin's key."""
        async with self._answer(None, "/load") as (_, reader):
            return int(json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["server_load"])

    def _note(self, error: str) -> None:
        self.errors[error] = self.errors.get(error, 0) + 1


async def drained(victim: Victim) -> None:
    deadline_s = time.monotonic() + DRAINED_WITHIN_S
    with suppress(OSError, ValueError, IndexError):
        while await victim.load() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)


# ---- rows -----------------------------------------------------------------------------------------------------------


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


async def measure(name: str, victim: Victim, target: Target, span_s: float, rounds: int) -> tuple[list[float], ...]:
    quiet: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        quiet += await victim.ttfts_s(span_s)
        with attacking(name, target):
            await asyncio.sleep(SETTLE_S)
            beside += await victim.ttfts_s(span_s)
        await drained(victim)
    return quiet, beside


def rows_of(mode: str, attacks: Sequence[str], span_s: float, rounds: int) -> list[Row]:
    rows = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "keys.db"
        with KeyStore(path, create=True) as key_store:
            names = {name: name.replace(" ", "-") for name in ATTACKS}
            keys = {n: key_store.add_key(names[n], now_s=time.time(), settings=ATTACKS[n].limits) for n in ATTACKS}
            own = key_store.add_key("victim", now_s=time.time(), admin=True)
        with serving(SERVER, "serve", "tiny", "--port", "0", "--keys", str(path), *QUIET, *MODES[mode]) as server:
            address = urlsplit(server.url)
            victim = Victim(address.hostname, address.port, own)
            asyncio.run(victim.ttfts_s(2.0))  # the first answers after a start are slower
            for name in attacks:
                victim.errors.clear()
                target = Target(address.hostname, address.port, keys[name])
                quiet, beside = asyncio.run(measure(name, victim, target, span_s, rounds))
                failed = f"; failed: {victim.errors}" if victim.errors else ""
                rows.append(
                    Row(
                        name=f"{mode}: {name}",
                        ours=1e3 * p95(beside),
                        peer=1e3 * p95(quiet),
                        unit="ms p95",
                        target=TARGET,
                        lower_is_better=True,
                        note=ATTACKS[name].about + failed,
                        details={"chats": len(beside), "quiet p50": 1e3 * _p50(quiet), "p50": 1e3 * _p50(beside)},
                    )
                )
                print(rows[-1], rows[-1].note, file=sys.stderr, flush=True)
    return rows


def _p50(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute and a half")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--attack", nargs=4, metavar=("NAME", "HOST", "PORT", "KEY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        name, host, port, key = options.attack
        asyncio.run(attack_for_ever(name, Target(host, int(port), key)))
        return 0
    origin = Origin.now()
    span_s, rounds = (1.5, 1) if options.quick else (6.0, 4)
    rows = [row for mode in options.mode for row in rows_of(mode, options.only, span_s, rounds)]
    print_table(rows, origin, "Time to first token of a tenant, quiet and while others attack")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
