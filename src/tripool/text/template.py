"""A model's chat template: untrusted Jinja from the checkpoint, compiled once and rendered in a sandbox.

Names, filters and tags are those that templates on the Hugging Face hub rely on. `text/sandbox.py` isolates a template
from Python and bounds its work.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from tripool.core import Conversation
from tripool.errors import CheckpointCorrupt, InvalidRequest
from tripool.text.budget import TooMuchWork
from tripool.text.conversation import plain_data, plain_messages, plain_tools
from tripool.text.sandbox import Sandbox

MAX_SOURCE_CHARS = 2**16
"""Real templates are below 2**15. Twice as many characters take a second longer to compile."""
MAX_RENDERED_CHARS = 2**24
QUICK_STEPS, QUICK_CHARS = 10_000, 2**14
"""Limits on an event loop: about 20 milliseconds of rendering, and as long to encode the result."""
_MAX_ERROR_CHARS = 1000
"""Length of a template's own error message that is shown."""
_MAX_TIME_FORM_CHARS = 100

_OURS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Names that `extra` may not set: they are arguments of their own."""

# Raised by a template's operations when a message lacks an expected field or has one of another type.
_RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError
)  # fmt: skip


class NotQuick(Exception):
    """It takes longer than an event loop can wait; it may still fail otherwise."""


class Template:
    """Immutable. `special_tokens` are names the source may use; `now` is the clock behind `strftime_now`."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self._special_tokens = dict(special_tokens)
        self._sandbox, self._compiled = _compile(source, now)
        self.knows_tools = "tools" in source and "tool_calls" in source
        """Whether it renders tools and calls. A template without support ignores them silently."""
        self._is_quick = False

    @property
    def quick(self) -> Template:
        """The same template, which raises NotQuick instead of taking long."""
        twin = copy.copy(self)
        twin._is_quick = True
        return twin

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `extra` holds further names for the template, such as `documents` or `enable_thinking`.

        `continue_final_message` leaves the last message open for the model to continue; `add_generation_prompt` then
        has no effect.
        """
        messages = plain_messages(conversation)
        names = self._names(tools, extra or {})
        if not continue_final_message:
            return self._render(messages, {**names, "add_generation_prompt": add_generation_prompt})
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequest("the final message has no text to continue", param="messages")
        mark = _unused_mark(content)
        messages[-1]["content"] = content + mark
        return _cut_at_mark(self._render(messages, {**names, "add_generation_prompt": False}), content, mark)

    def _names(self, tools: object, extra: Mapping[str, Any]) -> dict[str, Any]:
        for name in extra:
            if not isinstance(name, str) or name in _OURS:
                raise InvalidRequest(f"template option {name!r} cannot be set", param="chat_template_kwargs")
        options = plain_data(extra, "chat_template_kwargs")
        return {**self._special_tokens, "documents": None, **options, "tools": plain_tools(tools)}

    def _render(self, messages: list[dict[str, Any]], names: dict[str, Any]) -> str:
        most_steps, most_chars = (QUICK_STEPS, QUICK_CHARS) if self._is_quick else (math.inf, MAX_RENDERED_CHARS)
        try:
            given = self._sandbox.names(messages, names, most_steps)
            return _joined(self._compiled.generate(given), most_chars)
        except _Refusal as error:
            hint = "the model's chat template refuses this conversation"
            raise InvalidRequest(str(error), hint=hint, param="messages") from error
        except TooMuchWork as error:
            if self._is_quick:
                raise NotQuick from error
            hint = "send a shorter conversation; if that does not help, do not trust this checkpoint"
            problem = "the model's chat template exceeds its budget for this conversation"
            raise InvalidRequest(problem, hint=hint, param="messages") from error
        except (jinja2.exceptions.SecurityError, RecursionError, MemoryError) as error:
            hint = "do not trust this checkpoint: chat templates only need to write text"
            raise CheckpointCorrupt(f"the chat template left its sandbox: {error}", hint=hint) from error
        except _TooLong as error:
            if self._is_quick:
                raise NotQuick from error
            problem = f"the prompt exceeds {MAX_RENDERED_CHARS} characters"
            raise InvalidRequest(problem, hint="send a shorter conversation", param="messages") from error
        except _RENDER_ERRORS as error:
            hint = "the model's chat template expects messages of another shape"
            problem = f"cannot render the conversation: {str(error)[:_MAX_ERROR_CHARS]}"
            raise InvalidRequest(problem, hint=hint, param="messages") from error


def _joined(parts: Iterator[str], most_chars: int) -> str:
    joined: list[str] = []
    num_chars = 0
    for part in parts:
        num_chars += len(part)
        if num_chars > most_chars:
            raise _TooLong
        joined.append(part)
    return "".join(joined)


def _unused_mark(content: str) -> str:
    # It ends in a space, so that a template that trims messages reveals it by trimming the mark.
    mark = "\ue000continue\ue000"
    while mark in content:
        mark = f"\ue000{mark}\ue000"
    return mark + " "


def _cut_at_mark(rendered: str, content: str, mark: str) -> str:
    at = rendered.rfind(mark.rstrip())
    if at < 0:
        hint = "this model's chat template drops or rewrites it"
        raise InvalidRequest("the final message cannot be continued", hint=hint, param="messages")
    if rendered.startswith(mark, at):
        return rendered[:at]
    # The template trims: the content's own trailing space would have been trimmed too without the mark after it.
    trimmed = content.rstrip()
    return rendered[:at].removesuffix(content[len(trimmed) :]) if trimmed else rendered[:at]


class _TooLong(Exception):
    """The prompt is too long."""


class _Refusal(jinja2.TemplateError):
    """Raised by the template itself."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the model's text for training; here its body is rendered like any other."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _compile(source: str, now: Callable[[], datetime]) -> tuple[Sandbox, jinja2.Template]:
    if len(source) > MAX_SOURCE_CHARS:
        raise CheckpointCorrupt(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: _time(form, now)
    try:
        return sandbox, sandbox.compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        hint = "compare the checkpoint's chat template with the published one"
        raise CheckpointCorrupt(f"line {error.lineno} of the chat template: {error.message}", hint=hint) from error
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:  # from Python's own compiler
        why = str(error) or type(error).__name__
        raise CheckpointCorrupt(f"the chat template cannot be compiled: {why}") from error


def _refuse(message: object) -> None:
    raise _Refusal(str(message)[:_MAX_ERROR_CHARS])


def _time(form: str, now: Callable[[], datetime]) -> str:
    if len(form) > _MAX_TIME_FORM_CHARS or re.search(r"%[^a-zA-Z%]*\d", form):
        raise jinja2.exceptions.SecurityError("a date in this format would be too long")  # some systems pad: %999999d
    return now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models are not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
