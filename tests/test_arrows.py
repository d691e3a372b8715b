"""The architecture, held: which rooms may know which, what pure code may not touch, and how long things may get.

A room is a folder or a module directly under the package. Every import counts: at the top, inside a function, for type
checkers only, by `importlib.import_module("...")`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

import tripool

ROOT = Path(tripool.__file__).parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

PURE = (
    "core", "errors", "config", "messages", "sequence", "cache", "prefill", "decode", "engine.scheduler",
    "engine.fast_forward", "engine.batch_shares", "engine.time_shares", "engine.invariants", "engine.memory",
    "engine.background", "batch.types",
    "text", "grammar", "router", "simulate", "tenants", "planner", "page", "experts",
)  # fmt: skip
"""Run without torch: the planner and the simulator stand on these, and a gateway needs text and grammars."""
PURE += tuple(f"bench.{name}" for name in ("page", "prompts", "report", "samples", "summary", "trace", "workload"))
PURE += ("control.canary", "control.model_policy", "control.topology", "control.allocation")
PURE += tuple(f"control.{name}" for name in ("autoscaler", "demand", "forecast", "scaling"))
PURE += ("observe.checks", "observe.machine")
PURE += ("train.plan",)
PURE += ("hosts.traffic", "hosts.silence")
WORLDLY = {
    f"cache.{name}" for name in ("arena", "client", "copying", "weight_image", "weight_cache", "link", "member", "wire")
}
WORLDLY |= {"cache.disk_store", "cache.private_folder", "cache.shared_reads", "cache.disk_io", "cache.mooncake_store"}
WORLDLY |= {"cache.lanes"}
WORLDLY |= {"prefill.worker", "decode.worker", "planner.probe"}
WORLDLY |= {"tenants.key_store", "tenants.usage_log", "tenants.key_watcher"}
WORLDLY |= {"cache.host", "simulate"}
WORLDLY |= {f"simulate.{name}" for name in ("disk", "faults", "fleet", "member", "memory", "network", "process", "run")}
WORLDLY |= {"simulate.supernode", "simulate.takeover"}
WORLDLY |= {f"simulate.takeover.{name}" for name in ("coordinator", "gateway", "run", "world")}
WORLDLY |= {f"simulate.supernode.{name}" for name in ("faults", "fleet", "instances", "process", "report", "run")}
WORLDLY |= {f"experts.{name}" for name in ("exchange", "layout", "prompt_layout", "prompt_split", "slabs")}
WORLDLY |= {f"experts.{name}" for name in ("forward", "memory", "native_forward")}
"""The other halves of rooms that are split: they touch the world, and nothing pure may import them."""
TO_WORKERS = {"StartPrefill", "StartDecode", "Release", "Cancel", "Drain", "Welcome"}
POLICIES = tuple(name for name in PURE if name not in ("text", "grammar", "messages"))
"""Decide by their arguments alone: no clock, socket, thread, random state or environment inside."""
OUTSIDE_WORLD = {
    "asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip


def modules(root: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; the package itself is ""."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


def imports(root: Path, name: str, path: Path) -> Iterator[str]:
    """Absolute dotted names that this module imports, as far as the text says."""
    package = [root.name, *name.split(".")] if name else [root.name]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{parent}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def own_imports(root: Path, known: dict[str, Path], name: str) -> set[str]:
    """Modules of the package itself, without the package's name; a name that is no module belongs to its parent."""
    found = set()
    for target in imports(root, name, known[name]):
        parts = target.split(".")
        if parts[0] == root.name:
            inner = ".".join(parts[1:])
            while inner not in known:
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found


def room(name: str) -> str:
    return name.partition(".")[0]


def room_graph(root: Path) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    known = modules(root)
    for name in known:
        targets = graph.setdefault(room(name), set())
        targets.update(room(target) for target in own_imports(root, known, name))
        targets.discard(room(name))
    return graph


def mutual(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    return sorted((a, b) for a in graph for b in graph[a] if a < b and a in graph.get(b, ()))


def circles(graph: dict[str, set[str]]) -> set[str]:
    """What cannot be built bottom-up: peel off rooms that import nothing left, until nothing changes."""
    left = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in leaves:
            del left[name]
    return set(left)


def matching(names: tuple[str, ...], without: Collection[str] = WORLDLY) -> dict[str, Path]:
    inside = {n: p for n, p in modules(ROOT).items() if any(n == name or n.startswith(f"{name}.") for name in names)}
    return {name: path for name, path in inside.items() if name not in without}


def test_no_two_rooms_import_each_other() -> None:
    assert mutual(room_graph(ROOT)) == []


def test_no_longer_circles_either() -> None:
    assert circles(room_graph(ROOT)) == set()


def test_the_gateway_never_imports_the_engine() -> None:
    assert "engine" not in room_graph(ROOT)["gateway"]


def test_pure_rooms_import_only_pure_rooms() -> None:
    known, pure = modules(ROOT), matching(PURE)
    for name in pure:
        impure = own_imports(ROOT, known, name) - pure.keys()
        assert not impure, f"{name} imports {sorted(impure)}"


def test_pure_rooms_import_no_torch() -> None:
    for name, path in matching(PURE).items():
        assert "torch" not in {room(target) for target in imports(ROOT, name, path)}, name


def test_policies_import_neither_the_world_nor_other_peoples_packages() -> None:
    allowed = (sys.stdlib_module_names | {"tripool"}) - OUTSIDE_WORLD
    for name, path in matching(POLICIES).items():
        strangers = {room(target) for target in imports(ROOT, name, path)} - allowed
        if name == "errors":
            strangers -= {"pathlib"}  # names a file in a message; opens none
        if room(name) == "experts":
            strangers -= {"numpy", "msgspec"}  # arrays over layers and experts; a map crosses processes
        assert not strangers, f"{name} imports {sorted(strangers)}"


def test_the_simulation_handles_no_messages_of_a_worker() -> None:
    """The workers that run in virtual time are those that serve: nothing in the simulation takes a worker's messages.
    The checker only notes where the gateway has placed what; the supernode's fleet delivers no Welcome."""
    for name, path in matching(("simulate",), without=()).items():
        if name == "simulate.checker":
            continue
        handled = [
            node.cls.id
            for node in nodes(path)
            if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name) and node.cls.id in TO_WORKERS
        ]
        known = {target.rpartition(".")[2] for target in imports(ROOT, name, path)}
        if name == "simulate.supernode.fleet":
            known.discard("Welcome")
        assert not handled and not known & TO_WORKERS, f"{name} handles {sorted({*handled, *(known & TO_WORKERS)})}"


def test_there_is_one_world() -> None:
    """Fleets, networks, cost models and faults are its arguments: no other gateway is made in virtual time. Takeovers
    have a world of their own: over the same fleet several coordinators, of which one shall lead, and gateways."""
    worlds = ("TakeoverWorld", "World")
    made = ("AdmissionController", "Timeline", *worlds)
    found = {
        (name, node.func.id)
        for name, path in matching(("simulate",), without=()).items()
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in made
    }
    assert {name for name, call in found if call == "AdmissionController"} == {"simulate.world"}
    assert {name for name, call in found if call == "Timeline"} == {name for name, call in found if call in worlds}


def test_no_worker_knows_the_simulation() -> None:
    graph = room_graph(ROOT)
    for name in ("prefill", "decode", "fabric", "cache", "engine", "control", "gateway", "router"):
        assert "simulate" not in graph[name]


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked here")

sys.meta_path.insert(0, NoTorch())
"""


def run_without_torch(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_blocks() -> None:
    with pytest.raises(AssertionError, match="torch is blocked here"):
        run_without_torch("import tripool.engine.load")


def test_pure_rooms_run_without_torch() -> None:
    names = [f"tripool.{name}" for name in (*matching(PURE), "simulate")]
    run_without_torch("".join(f"import {name}\n" for name in ["tripool", *names]))


def test_help_and_gateway_need_no_torch() -> None:
    """Help in a moment, and a gateway on a machine that has no model."""
    output = run_without_torch("""
import tripool.gateway
from tripool.cli.main import main
sys.argv = ["tripool", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
""")
    assert "Usage" in output


def long_ones(root: Path, max_file: int, max_function: int) -> list[str]:
    found = []
    for name, path in modules(root).items():
        text = path.read_text("utf-8")
        if (lines := len(text.splitlines())) > max_file:
            found.append(f"{name or root.name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > max_function:
                    found.append(f"{name or root.name}.{node.name}: {lines} lines")
    return found


def test_no_file_and_no_function_is_too_long() -> None:
    assert long_ones(ROOT, MAX_FILE_LINES, MAX_FUNCTION_LINES) == []


# ---- the tests above, tested on a small package that breaks the rules --------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Path:
    root = tmp_path / "house"
    sources = {
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.attic import Box\n",
        "attic.py": "def open_box():\n    from house import cellar\n    return cellar\n\nclass Box: ...\n",
        "cellar/__init__.py": "from .wine import bottle\n",
        "cellar/wine.py": "from ..hall import door\nbottle = door\n",
        "cellar/deep/__init__.py": "from . import rock\n",
        "cellar/deep/rock.py": "import house.hall\nfrom ...attic import Box\n",
        "hall.py": "import importlib\nattic = importlib.import_module('house.attic')\ndoor = 1\n",
        "shed.py": "import torch.nn\nfrom house import Box, hall\n",
    }
    for name, source in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, "utf-8")
    return root


def test_every_kind_of_import_is_seen(house: Path) -> None:
    assert room_graph(house) == {
        "": {"attic"},
        "attic": {"cellar"},
        "cellar": {"hall", "attic"},
        "hall": {"attic"},
        "shed": {"", "hall"},
    }
    assert mutual(room_graph(house)) == [("attic", "cellar")]
    assert circles(room_graph(house)) == {"", "attic", "cellar", "hall", "shed"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == {"a", "b", "c"}
    assert "torch.nn" in set(imports(house, "shed", house / "shed.py"))


def test_length_is_seen(house: Path) -> None:
    (house / "tall.py").write_text("async def stairs():\n" + "    step = 1\n" * 10, "utf-8")
    assert long_ones(house, max_file=10, max_function=10) == ["tall: 11 lines", "tall.stairs: 11 lines"]
    assert long_ones(house, max_file=11, max_function=11) == []
