"""Puts guidellm into an environment of its own, `.venv-guidellm`: what it pins must not decide what Tripool runs on.

python tests/clients/install.py
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-guidellm"
# torch is named because guidellm asks for any version, and newer builds pull gigabytes of CUDA libraries.
PACKAGES = ("torch==2.13.0", "guidellm==0.8.1")


def main() -> None:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)


if __name__ == "__main__":
    main()
