"""Puts each client into an environment of its own, `.venv-clients/NAME`: what it pins decides nothing else.

cd tests && python -m clients.table.install [NAME ...]
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

from clients.table.catalog import CLIENTS, VLLM_BENCH, Client

ROOT = Path(__file__).resolve().parents[3] / ".venv-clients"


def folder_of(client: Client) -> Path:
    return ROOT / client.environment


def is_installed(client: Client) -> bool:
    return (folder_of(client) / "installed").exists()


def install(client: Client) -> None:
    folder = folder_of(client)
    if client.language == "python":
        if not (folder / "bin" / "python").exists():
            venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
        if client is VLLM_BENCH:
            _install_vllm(folder)
        else:
            subprocess.run([*pip, "--quiet", "--no-compile", *client.packages], check=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"name": "client", "private": true, "type": "module"}\n')
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages], cwd=folder, check=True
        )
    (folder / "installed").touch()


def _install_vllm(folder: Path) -> None:
    """As the benchmarks do it for theirs."""
    spec = importlib.util.spec_from_file_location("peers", ROOT.parent / "bench" / "peers" / "install.py")
    assert spec is not None and spec.loader is not None
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    peers.PEERS_PYTHON = folder / "bin" / "python"
    peers.pip(peers.TORCH)
    peers.install_vllm()


def main() -> int:
    wanted = sys.argv[1:] or [client.name for client in CLIENTS]
    failed = []
    for client in CLIENTS:
        if client.name in wanted and not is_installed(client):
            print(f"installing {client.name}", flush=True)
            try:
                install(client)
            except subprocess.CalledProcessError as error:
                failed.append(f"{client.name}: {error}")
    print("\n".join(failed) or "all are installed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
