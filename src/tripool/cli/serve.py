"""`tripool serve`: one model, one process, the OpenAI surface."""

from __future__ import annotations

from typing import Annotated

import typer

from tripool.cli.options import KvGb, Load, MaxRunning, Model, Mtp, PrecisionOf, Threads
from tripool.config import EngineConfig, GatewayConfig
from tripool.engine.protocol import StepEngine

_CLOSE_S = 10.0
_ENGINE, _GATEWAY = EngineConfig(), GatewayConfig()


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    def serve(
        model: Model = "tiny",
        host: Annotated[str, typer.Option(help="Address to listen on.")] = _GATEWAY.host,
        port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = _GATEWAY.port,
        kv_gb: KvGb = None,
        max_running: MaxRunning = _ENGINE.max_running,
        mtp: Mtp = _ENGINE.mtp,
        precision: PrecisionOf = _ENGINE.precision,
        threads: Threads = None,
    ) -> None:
        """Serve MODEL over HTTP."""
        gateway = GatewayConfig(host=host, port=port)
        config = EngineConfig(kv_gb=kv_gb, max_running=max_running, mtp=mtp, precision=precision, threads=threads)
        _serve(load, model, config, gateway)


def _serve(load: Load, model: str, config: EngineConfig, gateway: GatewayConfig) -> None:
    # Here, so that `tripool --help` does not import a web server.
    from tripool.engine.thread import EngineThread
    from tripool.gateway import create_app
    from tripool.gateway.server import Server, listen, url_of
    from tripool.text import Tokenizer

    with listen(gateway.host, gateway.port) as listener:
        engine = load(model, config)
        thread = EngineThread(engine)
        try:
            application = create_app(thread, Tokenizer(engine.text), engine.name, gateway)
            server = Server(
                application,
                on_ready=lambda: typer.echo(_banner(url_of(listener), engine)),
                end_answers=lambda: thread.close(0),
            )
            server.run([listener])
        finally:
            thread.close(_CLOSE_S)


def _banner(url: str, engine: StepEngine) -> str:
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if engine.text.chat_template is None:
        path, body = "completions", '{"prompt": "Once upon a time"}'
    sizes = f"weights {engine.weight_bytes / 1e6:,.0f} MB, KV {engine.kv_bytes / 1e6:,.0f} MB"
    return (
        f"Tripool serves {engine.name} at {url}/v1 ({sizes}, context {engine.context_tokens:,} tokens)\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\nCtrl-C stops it."
    )
