"""Reads prompt files of `tripool generate`: plain lines, or JSON lines with their own options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.core import Request, SamplingParams
from tripool.errors import InvalidRequest
from tripool.gateway.body import decode_json
from tripool.gateway.json_types import INTEGER, MESSAGES, OBJECT, PROMPT
from tripool.gateway.options import SAMPLING, Fields
from tripool.llm import LLM

_FIELDS = Fields(
    known={**SAMPLING, "prompt": PROMPT, "messages": MESSAGES, "logprobs": INTEGER, "structure": OBJECT}, required=()
)


class BadPrompts(InvalidRequest, code="bad_prompts"):
    """A prompts file is not valid; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    number: int
    fields: Mapping[str, Any]
    """`prompt` or `messages`, and the line's own sampling options."""


def read_prompts(path: Path) -> list[PromptLine]:
    """Every line that is not blank; `.jsonl` holds one JSON object per line, any other name plain text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadPrompts(f"cannot read {path}: {error.strerror}", hint="give a .txt or .jsonl file") from error
    read = _json_line if path.suffix == ".jsonl" else _text_line
    lines: list[PromptLine] = []
    for number, raw in enumerate(content.split(b"\n"), 1):
        if raw.strip():
            with _naming(path, number):
                lines.append(PromptLine(number, read(raw)))
    if not lines:
        raise BadPrompts(f"{path} holds no prompts", hint="write one per line")
    return lines


def to_requests(path: Path, lines: list[PromptLine], llm: LLM, defaults: Mapping[str, Any]) -> Iterator[Request]:
    """Tokenised, with each line's options over the command line's."""
    for line in lines:
        fields, request_id = dict(line.fields), f"line {line.number}"
        prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
        with _naming(path, line.number):
            params = SamplingParams.from_options({**defaults, **fields})
            if messages is not None:
                yield llm.chat_request(messages, params, id=request_id)
            else:
                yield llm.request(prompt or "", params, id=request_id)


def _json_line(raw: bytes) -> dict[str, Any]:
    fields = _FIELDS.checked(decode_json(raw))
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequest("needs either 'prompt' or 'messages'")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token_id, int) for token_id in prompt):
        raise InvalidRequest("holds several prompts", hint="write one per line")
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    return fields


def _text_line(raw: bytes) -> dict[str, Any]:
    try:
        return {"prompt": raw.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"is not UTF-8: {error.reason}") from error


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise BadPrompts(f"{path}, line {number}: {error.message}", hint=error.hint, param=error.param) from error
