"""`python -m tripool.quant`: the command for machines that have torch and little else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tripool.checkpoints import open_checkpoint

SOURCE = Path(__file__).parents[2] / "src"
SERVER_PACKAGES = ("starlette", "uvicorn", "typer", "rich", "zmq", "msgspec", "xxhash")


def quant(*args: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = before + "import sys\nfrom tripool.quant.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.prove
def test_the_command_needs_none_of_the_server_s_packages(tmp_path: Path) -> None:
    absent = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in SERVER_PACKAGES)
    done = quant("tiny", str(tmp_path / "out"), "--keep", "0", "--vocabulary", "--tokens", "0", before=absent)
    assert done.returncode == 0, done.stderr
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert "quantization_config" in checkpoint.config


def test_what_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    done = quant(str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
