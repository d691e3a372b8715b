"""After a host's death: how long answers pause; how soon a worker of another host serves; two hosts beside one.

    python bench/hosts_faults.py                     hosts are network namespaces: needs root, `ip` and `tc`
    python bench/hosts_faults.py --quick             fewer repetitions
    python bench/hosts_faults.py --only death        or ranks, start, split

Death: A has gateway and prefill, B, C and D decode, and any two of them have slots for all answers, so that one is a
spare: a worker that has joined needs no other form of it. "Killed": all processes of B end, and its system says so to
the others. "Vanished": its network is cut first, so that nobody hears of it. The fake engine takes 20 ms for a step.
Ranks: the bundled model, an instance of four ranks on A and B, of which B vanishes.
Start: from the command on another host, which has no copy of the model, to the first token that it decodes.
Split: SmolLM2, 32 requests at once, one thread for each of the two workers, which share one host or have two.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import REPO, Origin, Row, print_table, take_turns, write_json

sys.path[0] = str(REPO / "tests")  # not this folder: `hosts` is also a benchmark here

from hosts.fleet import Fleet, fleet
from hosts.joining import join_line, joined
from hosts.namespaces import network
from hosts.test_expert_namespaces import Spread, spread
from split.serving import split_server
from split.streams import Asked, Clients, Outcome, make_bodies
from tripool.checkpoints.names import BUNDLED

MODEL, STEP_S = "fake:step_ms=20,blocks=2048", 0.02
NUM_STREAMS, SLOTS = 24, 12
BEFORE_S, AFTER_S, WINDOW_S = 2.0, 7.0, 0.5
DEATH = (("longest pause on living hosts", 0.5), ("its own answers go on", 3.0), ("full rate, with a spare", 5.0))
AT_ONCE = 32
WORDS = "The sea was calm and the harbour slept while lamps went out one by one along the quay. " * 5


class Timed(Clients):
    """Knows when each of an answer's tokens came, and the request's id."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        super().__init__(url, [Asked(body, leaves=True) for body in bodies])
        self.times: dict[int, list[float]] = {id(outcome): [] for outcome in self.outcomes}
        self.ids: dict[int, str] = {}

    def _take(self, chunk: dict[str, Any], outcome: Outcome) -> None:
        super()._take(chunk, outcome)
        self.ids[id(outcome)] = chunk.get("id", "")
        self.times[id(outcome)] += [time.monotonic()] * len(chunk.get("choices", []))


# ---- a host's death -------------------------------------------------------------------------------------------------


def decoding_at(three: Fleet | Spread, request_id: str) -> str:
    facts = three.server.http.get(f"/v1/requests/{request_id}/explain").raise_for_status().text
    return facts.partition("decoding at ")[2].partition('"')[0]


async def one_death(
    three: Fleet | Spread, seed: int, *, vanished: bool, num_streams: int = NUM_STREAMS, num_tokens: int = 2000
) -> tuple[float, float, float]:
    """Longest pause of others' answers, of the dead host's from its death on, and time to the rate before."""
    bodies = make_bodies(num_streams, prompt_tokens=300, answer_tokens=4000, seed=seed)
    for body in bodies:
        body |= {"n": 1, "max_tokens": num_tokens}
    clients = Timed(three.server.url, bodies)
    running = asyncio.ensure_future(clients.run())
    while not all(len(times) > 3 for times in clients.times.values()):
        await asyncio.sleep(0.05)
    await asyncio.sleep(BEFORE_S)
    name = three.hosts["b"].said[-1].split()[1]
    dead = set()
    for key, request_id in clients.ids.items():
        if (await asyncio.to_thread(decoding_at, three, request_id)).startswith(name):
            dead.add(key)
    assert 0 < len(dead) < num_streams, "every host has some"
    died_s = time.monotonic()
    if vanished:
        await asyncio.to_thread(three.net.cut, "b")
    await asyncio.to_thread(three.kill, "b")
    await asyncio.sleep(AFTER_S)
    clients.leave.set()
    await running
    errors = [outcome.error for outcome in clients.outcomes if outcome.error]
    assert not errors, errors
    shown = {key: until_after(times, died_s, num_tokens) for key, times in clients.times.items()}
    others = max(longest_pause(times) for key, times in shown.items() if key not in dead)
    its = max(pause_end(shown[key], died_s) for key in dead)
    return others, its, max(its, full_rate_s(list(clients.times.values()), died_s))


def until_after(times: list[float], died_s: float, num_tokens: int) -> list[float]:
    """When tokens came after the death, up to the end of the answer or of what is looked at."""
    ended = len(times) >= num_tokens
    assert not ended or times[-1] > died_s, "the answer had ended before the host died"
    return [at for at in times if at >= died_s - 0.1] + ([] if ended else [died_s + AFTER_S])


def longest_pause(times: list[float]) -> float:
    return max(b - a for a, b in pairwise(times))


def pause_end(times: list[float], died_s: float) -> float:
    """When an answer went on: the end of its longest pause."""
    _, end = max((b - a, b) for a, b in pairwise(times))
    return end - died_s


def full_rate_s(streams: list[list[float]], died_s: float) -> float:
    """After which time a window has as many tokens as those before; all answers have gone on then."""
    every = sorted(at for times in streams for at in times)

    def rate(start_s: float, seconds: float) -> float:
        return sum(start_s <= at < start_s + seconds for at in every) / seconds

    before = rate(died_s - BEFORE_S, BEFORE_S)
    for step in range(int((AFTER_S - WINDOW_S) / STEP_S)):
        if rate(died_s + step * STEP_S, WINDOW_S) >= 0.95 * before:
            return step * STEP_S
    return AFTER_S


def death_rows(repetitions: int) -> list[Row]:
    rows = []
    with fleet(MODEL, "--max-running", str(SLOTS)) as three:
        for name in "bcd":
            three.join(name)
        three.wait(4)
        for vanished in (False, True):
            found = []
            for repetition in range(repetitions):
                found.append(asyncio.run(one_death(three, repetition, vanished=vanished)))
                three.net.restore("b")
                three.server.wait_idle(3)
                three.join("b")
                three.wait(4)
            how = "vanished" if vanished else "killed"
            for (about, bar), values in zip(DEATH, zip(*found, strict=True), strict=True):
                rows.append(bar_row(f"host {how}: {about}", list(values), bar, max(values)))
    return rows


def rank_row(repetitions: int) -> Row:
    """An instance of four ranks on two hosts, of which one vanishes: the experts of its ranks are the others' then."""
    pauses = []
    with spread(4, "b") as two:
        for repetition in range(repetitions):
            pauses.append(asyncio.run(one_death(two, repetition, vanished=True, num_streams=12, num_tokens=1500))[0])
            two.net.restore("b")
            two.server.wait_idle(3)
            two.join()
            two.server.wait(two.all_there)
    return bar_row("host with ranks vanished: longest pause on living hosts", pauses, 0.5, max(pauses))


def bar_row(name: str, values: list[float], bar: float, ours: float) -> Row:
    note = f"peer: the bar; {len(values)} runs, median {statistics.median(values):.2f}, worst {max(values):.2f}"
    return Row(name=name, ours=ours, peer=bar, unit="s", target=1.0, lower_is_better=True, note=note)


# ---- how soon a worker serves ---------------------------------------------------------------------------------------


def start_row(model: str, name: str, bar: float, repetitions: int) -> Row:
    took_s = []
    with network() as net, tempfile.TemporaryDirectory() as kept:
        address = net.address("a")
        options = ("--listen", f"{address}:9100", "--host", address, "--open", "--threads", "1")
        with split_server(model, decode=0, options=options, prefix=net.prefix("a")) as server:
            for repetition in range(repetitions):
                prefix = (*net.prefix("b"), "env", f"XDG_CACHE_HOME={kept}/{repetition}")
                arguments = [*join_line(server), "--role", "decode", "--threads", "1"]
                began_s = time.monotonic()
                with joined(arguments, prefix=prefix, wait=False) as host:
                    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                    server.http.post("/v1/completions", json=body).raise_for_status()
                    took_s.append(time.monotonic() - began_s)
                    assert any(line.startswith("fetch:") for line in host.said), host.said
                server.wait(lambda pools: len(pools["workers"]) == 1)
    return bar_row(f"a worker of another host serves {name}", took_s, bar, statistics.median(took_s))


def start_rows(repetitions: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "model"  # under another name than the bundled one: it must be fetched
        shutil.copytree(BUNDLED["tiny"], tiny)
        rows = [start_row(str(tiny), "the bundled model", 6.0, repetitions)]
    return [*rows, start_row("smollm2", "SmolLM2", 15.0, repetitions)]


# ---- two hosts beside one -------------------------------------------------------------------------------------------


def tokens_per_s(url: str, repetition: int, num_tokens: int) -> float:
    same = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [{"prompt": f"{number} {repetition}. {WORDS}", **same} for number in range(AT_ONCE)]
    began_s = time.monotonic()
    outcomes = asyncio.run(Clients(url, [Asked(body) for body in bodies]).run())
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    return sum(len(tokens) for one in outcomes for tokens in one.tokens.values()) / (time.monotonic() - began_s)


def split_row(repetitions: int, num_tokens: int) -> Row:
    with ExitStack() as stack:
        net = stack.enter_context(network())
        a, b = net.address("a"), net.address("b")
        same = ("--open", "--threads", "1", "--max-running", str(AT_ONCE))
        one = split_server("smollm2", options=(*same, "--host", b), prefix=net.prefix("b"))
        url = stack.enter_context(one).url
        options = ("--listen", f"{a}:9100", "--host", a, *same)
        two = stack.enter_context(split_server("smollm2", decode=0, options=options, prefix=net.prefix("a")))
        worker = [*join_line(two), "--role", "decode", "--threads", "1"]
        stack.enter_context(joined(worker, prefix=net.prefix("b")))
        two.wait(lambda pools: len(pools["workers"]) == 2)
        sides: dict[str, Callable[[int], float]] = {
            "one": lambda repetition: tokens_per_s(url, repetition, num_tokens),
            "two": lambda repetition: tokens_per_s(two.url, repetition, num_tokens),
        }
        for warm_up in sides.values():
            warm_up(-1)
        found = take_turns(sides, repetitions)
    return Row(
        name="SmolLM2, 32 at once, split over two hosts", ours=found.median("two"), peer=found.median("one"),
        unit="tokens/s", target=0.9, note=f"peer: split on one host; medians of {repetitions}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", choices=("death", "ranks", "start", "split"))
    options = parser.parse_args()
    origin, rows = Origin.now(), []
    if options.only in (None, "death"):
        rows += death_rows(1 if options.quick else 3)
    if options.only in (None, "ranks"):
        rows.append(rank_row(1 if options.quick else 3))
    if options.only in (None, "start"):
        rows += start_rows(1 if options.quick else 3)
    if options.only in (None, "split"):
        rows.append(split_row(2, 32) if options.quick else split_row(3, 64))
    print_table(rows, origin, "Hosts that die, start and share")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
