"""setuptools, asking for one package more where the machine has no C compiler: `ziglang`, which is one."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (a build backend is whatever names this module has)

Settings = Mapping[str, object] | None


def compiler() -> list[str] | None:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def _needed() -> list[str]:
    return [] if compiler() else ["ziglang"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_needed()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_needed()]
