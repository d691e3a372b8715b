"""Compiles the 8-bit kernels once per instruction set while the package is installed; see pyproject.toml for the rest.

The compiler is the system's, or, where there is none, the one in the `ziglang` wheel (see `build_backend.py`). Where
neither works the package installs without these kernels, says so, and runs in float32.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from build_backend import compiler
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/tripool/kernels/native")
CACHE = Path("src/tripool/cache/native")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
VARIANTS = {"plain": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"avx2": AVX2, "avx512": [*AVX2, *AVX512, "-mprefer-vector-width=512"]}


class BuildKernels(build_ext):
    def get_ext_filename(self, name: str) -> str:
        """Plain shared libraries, not Python modules: no version of Python in their names."""
        return str(Path(*name.split(".")).with_suffix(".so"))

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = compiler()
        if command is None:
            print("tripool: no C compiler, so no 8-bit kernels; float32 works without", file=sys.stderr)
            return
        arguments = [*FLAGS, *extension.extra_compile_args, *extension.sources, "-o", str(target), "-lm", "-lpthread"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"tripool: {extension.name} was not compiled:\n{done.stderr}", file=sys.stderr)

    def copy_extensions_to_source(self) -> None:
        for extension in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(self.get_ext_fullname(extension.name))
            if built.exists():
                self.copy_file(str(built), str(Path("src") / self.get_ext_filename(extension.name)))


setup(
    ext_modules=[
        Extension(
            f"tripool.kernels.native._{name}",
            [str(SOURCES / "tripool.c")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            extra_compile_args=flags,
        )
        for name, flags in VARIANTS.items()
    ]
    + [Extension("tripool.cache.native._copy", [str(CACHE / "copy.c")], depends=[str(CACHE / "seats.h")])],
    cmdclass={"build_ext": BuildKernels},
)
