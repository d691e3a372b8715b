"""Compiles the kernels once per instruction set while the package is built; see pyproject.toml for the rest.

The compiler is the system's, or, where there is none, the one in the `ziglang` wheel (see `build_backend.py`). Where
neither works the package installs without these kernels, says so, and runs in float32.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

from build_backend import compiler

SOURCES = Path("src/tripool/kernels/native")
CACHE = Path("src/tripool/cache/native")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
VARIANTS = {"plain": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"avx2": AVX2, "avx512": [*AVX2, *AVX512, "-mprefer-vector-width=512"]}


class BuildKernels(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True

    def get_ext_filename(self, name: str) -> str:
        """Plain shared libraries, not Python modules: no version of Python in their names."""
        return str(Path(*name.split(".")).with_suffix(".so"))

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # an older source's, which must not be packed if this one fails to compile
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
            linked = Path("src") / self.get_ext_filename(extension.name)
            linked.unlink(missing_ok=True)  # as above; and a process that has it open keeps the file it opened
            if built.exists():
                self.copy_file(str(built), str(linked))


class KernelWheel(bdist_wheel):
    """The kernels are loaded by ctypes, so they bind a wheel to a kind of machine but to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        kernels = sorted(Path(self.bdist_dir).rglob("*.so"))
        if not kernels:
            return "py3", "none", "any"
        return "py3", "none", _with_c_library(super().get_tag()[2], kernels)


def _with_c_library(tag: str, libraries: list[Path]) -> str:
    """linux_x86_64 -> manylinux_2_17_x86_64, by the newest of glibc's symbol versions that the libraries ask for.

    A library names every version it needs in its string table. One that names none was linked to another C library, and
    one that names a feature of the loader (GLIBC_ABI_...) needs more than a version says: their tag stays as it is.
    """
    named = {name for path in libraries for name in re.findall(rb"GLIBC_(ABI|2\.\d+)", path.read_bytes())}
    system, _, machine = tag.partition("_")
    if system != "linux" or not named or b"ABI" in named:
        return tag
    return f"manylinux_2_{max(17, *(int(name[2:]) for name in named))}_{machine}"


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
    + [
        Extension(
            "tripool.experts.native._forward",
            ["src/tripool/experts/native/forward.c"],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
        )
    ]
    + [Extension("tripool.cache.native._copy", [str(CACHE / "copy.c")], depends=[str(CACHE / "shared_reads.h")])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
)
