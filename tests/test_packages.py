"""The package as others get it: a source archive that builds, a wheel that serves where there is no compiler.

In the suite the kernels are compiled without optimisation, and the environment borrows the dependencies of the one that
runs the tests, because both take minutes otherwise. `make prove` does the same with neither shortcut.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import tripool

ROOT = Path(__file__).parent.parent
DEADLINE_S = 120.0
NAME = f"tripool-{tripool.__version__}"
BUILT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")


def run(*command: object, cwd: Path = ROOT, path: str = os.defpath, timeout_s: float = DEADLINE_S) -> str:
    """The command's last line. `path`: where it finds other programs."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PATH": path},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout.splitlines() or [""])[-1]


def build(kind: str, source: Path, out: Path, path: str, timeout_s: float = DEADLINE_S) -> Path:
    """As pip and others do it: the backend that pyproject.toml names is called in the source's folder."""
    code = f"import sys, build_backend; print(build_backend.build_{kind}(sys.argv[1]))"
    return out / run(sys.executable, "-c", code, out, cwd=source, path=path, timeout_s=timeout_s)


def sources() -> set[str]:
    """The package's files in the repository, C and Python and data."""
    ignored = {"__pycache__", ".so", ".pyc"}
    files = (path for path in (ROOT / "src" / "tripool").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if not {*path.parts, path.suffix} & ignored}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is built in the repository itself."""
    folder = tmp_path_factory.mktemp("tree") / "tripool"
    for part in ("src", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=BUILT)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def path_with_cc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH whose `cc` is the machine's compiler without optimisation."""
    code = "import shlex, build_backend as b; print(shlex.join(b.compiler() or []))"
    command = shlex.split(run(sys.executable, "-c", code, path=os.environ["PATH"]))
    real = shutil.which(command[0]) if command else None
    if real is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("cc")
    (folder / "cc").write_text(f'#!/bin/sh\nexec {shlex.join([real, *command[1:]])} "$@" -O0\n')
    (folder / "cc").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def archive(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"), os.environ["PATH"])


@pytest.fixture(scope="module")
def wheel(archive: Path, path_with_cc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive alone: what an install of the archive does."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return build("wheel", folder / NAME, folder, path_with_cc)


def served_answer(environment: Path, folder: Path) -> str:
    """Of `tripool serve`, in a place where there is nothing but it: no compiler, no repository."""
    command = [environment / "bin" / "tripool", "serve", "--port", "0", "--log-level", "warning"]
    alone = os.environ | {"PATH": str(environment / "bin")}
    with (
        (folder / "stderr").open("w+") as stderr,
        subprocess.Popen(command, cwd=folder, env=alone, stdout=subprocess.PIPE, stderr=stderr, text=True) as server,
    ):
        watchdog = threading.Timer(DEADLINE_S, server.kill)  # so that no read below can last for ever
        watchdog.start()
        try:
            assert server.stdout is not None
            banner = "".join(iter(server.stdout.readline, "Ctrl-C stops it.\n"))
            url = re.search(r"curl (http\S+)", banner)
            assert url, (folder / "stderr").read_text()
            body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
            answer = httpx.post(url[1], json=body, timeout=DEADLINE_S).json()
        finally:
            watchdog.cancel()
            server.terminate()
    assert (folder / "stderr").read_text() == ""  # it would say so if it computed in float32, for want of kernels
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_source_archive_has_what_a_build_needs(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        names = {member.name.removeprefix(f"{NAME}/") for member in packed.getmembers() if member.isfile()}
    needed = {"pyproject.toml", "setup.py", "build_backend.py", "README.md", "LICENSE", *sources()}
    assert needed - names == set()
    beside = {name.split("/")[0] for name in names - needed}
    assert beside <= {"src", "docs", "CHANGELOG.md", "CONTRIBUTING.md", "PKG-INFO", "MANIFEST.in", "setup.cfg"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_a_wheel_is_for_a_kind_of_machine_and_for_every_python(wheel: Path) -> None:
    tag = re.fullmatch(rf"{NAME}-py3-none-(?:manylinux_2_(\d+)_\w+|linux_\w+|macosx_\w+)\.whl", wheel.name)
    assert tag, wheel.name
    if tag[1]:
        own = os.confstr("CS_GNU_LIBC_VERSION") or ""
        assert 17 <= int(tag[1]) <= int(own.split(".")[-1]), "compiled here, so it cannot need more than is here"
    names = {f"src/{name}" for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in sources() if not name.endswith((".c", ".h"))} - names == set()
    kernels = {Path(name).stem for name in names if name.endswith(".so")}
    assert {"_plain", "_copy", "_forward"} <= kernels <= {"_plain", "_avx2", "_avx512", "_copy", "_forward"}
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_an_installed_wheel_serves_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    run(*pip, "--no-compile", wheel, path=os.environ["PATH"])
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    borrowed = [entry for entry in sys.path if entry.endswith("-packages")]
    Path(run(python, "-c", code, cwd=tmp_path), "borrowed.pth").write_text("\n".join(borrowed))
    code = "import tripool; print(tripool.__file__)"
    assert Path(run(python, "-c", code, cwd=tmp_path)).is_relative_to(environment)
    assert served_answer(environment, tmp_path)


def test_a_wheel_without_kernels_is_for_every_machine(tree: Path, tmp_path: Path) -> None:
    """Also where an earlier build left its own kernels: they are of other sources."""
    source = tmp_path / "source"
    shutil.copytree(tree, source, ignore=shutil.ignore_patterns("*.safetensors"))
    (source / "src/tripool/kernels/native/_plain.so").write_bytes(b"an older one")
    out = build("wheel", source, tmp_path, str(tmp_path / "nothing"))
    assert out.name == f"{NAME}-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(out).namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def real_packages(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    out = tmp_path_factory.mktemp("real")
    yield {kind: build(kind, tree, out, os.environ["PATH"], timeout_s=900) for kind in ("sdist", "wheel")}
    shutil.rmtree(out)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_empty_environment_serves(kind: str, real_packages: dict[str, Path], tmp_path: Path) -> None:
    """With its dependencies from the package index; a compiler is there for the source archive only."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    path = os.environ["PATH"] if kind == "sdist" else str(environment / "bin")
    pip = (environment / "bin" / "python", "-m", "pip", "install", "--quiet")
    run(*pip, real_packages[kind], cwd=tmp_path, path=path, timeout_s=1800)
    assert served_answer(environment, tmp_path)
    shutil.rmtree(environment)  # a gigabyte
