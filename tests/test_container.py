"""The Containerfile's parts that can be tried without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tripool.cli.main import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Containerfile").read_text("utf-8").replace("\\\n", " ")
STEPS = [line.split(None, 1) for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def steps(name: str) -> list[str]:
    return [rest for step, rest in STEPS if step == name]


PAGE = (ROOT / "docs" / "install.md").read_text("utf-8").split("## As a container")[1]
COMMANDS = [" ".join(json.loads(steps("CMD")[0])), *re.findall(r" tripool ((?:serve|keys) .*?)(?:`|  |\n)", PAGE)]


def test_what_is_copied_is_enough_to_build_the_wheel(tmp_path):
    """Without a compiler, which takes seconds; tests/test_packages.py builds the kernels."""
    source = tmp_path / "source"
    source.mkdir()
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    no_weights = shutil.ignore_patterns(
        "*.safetensors", *(pattern.removeprefix("**/") for pattern in ignored if "*" in pattern)
    )
    for names, to in (copy.rsplit(None, 1) for copy in steps("COPY")):
        for name in names.split():
            assert name not in ignored
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / to, ignore=no_weights)
            else:
                shutil.copy(ROOT / name, source / to)
    code = "import build_backend; print(build_backend.build_wheel('..'))"
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    packed = set(zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist())
    wanted = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "tripool").rglob("*.py")}
    assert wanted - packed == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_it_runs_exists(command, capsys):
    """The default command, and those that the page about it shows."""
    verbs = [word for word in command.split() if word in ("serve", "keys", "add", "list")]
    with pytest.raises(SystemExit) as ended:
        main([*verbs, "--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert [option for option in re.findall(r"--[a-z-]+", command) if option not in shown] == []


def test_the_entry_is_the_packages_script():
    assert json.loads(steps("ENTRYPOINT")[0]) == list(PROJECT["project"]["scripts"])


def test_its_health_check_asks_for_a_route_that_needs_no_key():
    (check,) = steps("HEALTHCHECK")
    program, flag, code = json.loads(check[check.index("[") :])
    assert (program, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    route = re.search(r"http://127\.0\.0\.1:8000(/[\w/]+)", code)
    assert route
    page = (ROOT / "docs" / "http.md").read_text("utf-8")
    assert f"| `GET {route[1]}` |" in page
    assert re.search(rf"`{route[1]}`[^.]* are public\.", page)


def test_it_runs_unprivileged_and_keeps_its_state_in_the_volume():
    assert steps("USER")[-1] != "root"
    (volume,) = steps("VOLUME")
    assert [part.split("=")[1].startswith(f"{volume}/") for part in steps("ENV")[0].split()] == [True, True]
    assert PROJECT["project"]["requires-python"].removeprefix(">=") in steps("FROM")[-1]
