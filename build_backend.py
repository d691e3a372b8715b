"""setuptools, asking for one package more where the machine has no C compiler: `ziglang`, which is one.

Where that cannot be had either, nothing more is asked for: the package installs without its 8-bit kernels, and says so
when it runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (a build backend is whatever names this module has)

Settings = Mapping[str, object] | None

# Unlike the others, zig compiles for the very CPU it runs on unless it is told not to: `plain` would not be plain, and
# an image built here would die elsewhere. And it keeps debugging information unless it is told not to.
_ZIG = ["-m", "ziglang", "cc", "-mcpu=baseline", "-g0"]

_ASK = ["-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", "index", "versions", "ziglang"]


def compiler() -> list[str] | None:
    """The start of a command that compiles C for any CPU of this kind, or None."""
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name) and _compiles(name):
            return [name]
    return [sys.executable, *_ZIG] if importlib.util.find_spec("ziglang") else None


def _compiles(name: str) -> bool:
    """Some machines have a compiler and no C library to compile for."""
    trial = "#include <math.h>\n#include <pthread.h>\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [name, "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/trial.so", "-lm", "-lpthread"]
        return subprocess.run(command, input=trial, capture_output=True, text=True, check=False).returncode == 0


def _needed() -> list[str]:
    return ["ziglang"] if compiler() is None and _zig_can_be_had() else []


def _zig_can_be_had() -> bool:
    """False only if pip says that its index has none for this machine: asking for it would fail the whole install."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where pip is
    asked = subprocess.run([sys.executable, *_ASK], env=outside, capture_output=True, text=True, check=False)
    return "No matching distribution" not in asked.stderr


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_needed()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_needed()]
