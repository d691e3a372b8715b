"""`tripool serve`: one model and the OpenAI surface, in one process or split into pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tripool.cli.options import KvGb, Load, MaxRunning, Model, Mtp, PrecisionOf, Threads
from tripool.config import EngineConfig, GatewayConfig
from tripool.engine.protocol import StepEngine

if TYPE_CHECKING:
    from tripool.text.files import TextFiles

_CLOSE_S = 10.0
_CACHE_GB = 0.25
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
        split: Annotated[bool, typer.Option("--split", help="Prefill and decode in processes of their own.")] = False,
        prefill: Annotated[int | None, typer.Option(min=1, max=256, help="Prefill workers; implies --split.")] = None,
        decode: Annotated[int | None, typer.Option(min=1, max=256, help="Decode workers; implies --split.")] = None,
        cache_gb: Annotated[
            float | None, typer.Option("--cache-gb", min=0, help="Memory of the cache pool; implies --split.")
        ] = None,
    ) -> None:
        """Serve MODEL over HTTP."""
        gateway = GatewayConfig(host=host, port=port)
        config = EngineConfig(kv_gb=kv_gb, max_running=max_running, mtp=mtp, precision=precision, threads=threads)
        if split or (prefill, decode, cache_gb) != (None, None, None):
            cache_gb = _CACHE_GB if cache_gb is None else cache_gb
            _serve_split(model, config, gateway, num_prefill=prefill or 1, num_decode=decode or 1, cache_gb=cache_gb)
        else:
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
                on_ready=lambda: typer.echo(_banner_of(url_of(listener), engine)),
                end_answers=lambda: thread.close(0),
            )
            server.run([listener])
        finally:
            thread.close(_CLOSE_S)


def _serve_split(
    model: str,
    config: EngineConfig,
    gateway: GatewayConfig,
    *,
    num_prefill: int,
    num_decode: int,
    cache_gb: float,
) -> None:
    from tripool.cli.split import serve_split
    from tripool.control.plan import Plan
    from tripool.gateway.server import listen, url_of

    def banner(plan: Plan) -> str:
        workers = f"{num_prefill} prefill and {num_decode} decode workers, cache {cache_gb:g} GB"
        return _banner(url_of(listener), plan.name, plan.text, workers)

    with listen(gateway.host, gateway.port) as listener:
        serve_split(
            model,
            config,
            listener,
            num_prefill=num_prefill,
            num_decode=num_decode,
            cache_gb=cache_gb,
            banner=banner,
        )


def _banner_of(url: str, engine: StepEngine) -> str:
    sizes = f"weights {engine.weight_bytes / 1e6:,.0f} MB, KV {engine.kv_bytes / 1e6:,.0f} MB"
    return _banner(url, engine.name, engine.text, f"{sizes}, context {engine.context_tokens:,} tokens")


def _banner(url: str, name: str, text: TextFiles, details: str) -> str:
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if text.chat_template is None:
        path, body = "completions", '{"prompt": "Once upon a time"}'
    return (
        f"Tripool serves {name} at {url}/v1 ({details})\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\nCtrl-C stops it."
    )
