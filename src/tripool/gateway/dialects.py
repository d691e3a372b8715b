"""The formatter of a job's answer: one per API, chosen by the job alone."""

from __future__ import annotations

from collections.abc import Sequence

from tripool.answer import Answer
from tripool.gateway.anthropic.respond import AnthropicFormatter
from tripool.gateway.job import Job
from tripool.gateway.ollama.respond import OllamaFormatter
from tripool.gateway.respond import Formatter, OpenAIFormatter
from tripool.gateway.responses.open import response_formatter
from tripool.gateway.responses.store import ResponseStore
from tripool.text import Tokenizer


def formatter_of(
    job: Job, tokenizer: Tokenizer, answers: Sequence[Answer], store: ResponseStore, *, model: str, created_s: int
) -> Formatter:
    if job.shown is not None:
        return response_formatter(job, job.shown, tokenizer, store, model=model, created_s=created_s)
    if job.api == "messages":
        return AnthropicFormatter(job, model=model)
    if job.api in ("ollama_chat", "ollama_generate"):
        return OllamaFormatter(job, model=model, created_s=created_s)
    if job.api == "grpc":
        from tripool.gateway.grpc.respond import GrpcFormatter  # here: its packages may be missing

        return GrpcFormatter(job)
    return OpenAIFormatter(job, tokenizer, answers, model=model, created_s=created_s)
