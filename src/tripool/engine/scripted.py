"""Answers given by a file, for the fake engine: a client is then tested without depending on a model's skill.

The file holds a list of rules, such as

    [{"when": "", "answer": "Hello!"},
     {"when": "weather", "answer": "<tool_call>\\n{\\"name\\": \\"get\\", \\"arguments\\": {}}\\n</tool_call>"},
     {"when": "18 degrees", "answer": ["<think>\\nIt is mild.\\n</think>\\nMild.", "a second choice"]}]

The rule counts whose `when` occurs last in the rendered prompt, so a rule for a tool's result follows the one that
called the tool. Choice i gets the i-th text, over and over. A prompt that no rule fits gets the fake engine's words,
and so does what must follow an answer that may not end yet (`ignore_eos`, `min_tokens`).

Under a grammar a script is a wish like a model's: JSON in it is spelled with the spaces of that grammar, and where the
grammar forbids the script's next token, another is chosen. The answer depends on the file and the request alone, so any
worker can continue it. The file is read again when it has changed; change it between requests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tripool.core import Request, Structure
from tripool.engine.fake import FakeTokens
from tripool.errors import InvalidRequest
from tripool.grammar.tools import CLOSING, OPENING
from tripool.sequence import Guide, Sampled
from tripool.text import Tokenizer
from tripool.text.files import TextFiles

_CALL = re.compile(f"{OPENING}(.*?){CLOSING}", re.DOTALL)
_MAX_KNOWN = 1024


class Script:
    """The rules of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._rules: list[tuple[str, list[str]]] = []

    def answer(self, prompt: str, choice: int) -> str | None:
        self._read()
        found = [(prompt.rfind(when), number) for number, (when, _) in enumerate(self._rules) if when in prompt]
        if not found:
            return None
        # An empty `when` is found at the very end, and fits worst.
        _, number = max(found, key=lambda at: (bool(self._rules[at[1]][0]), *at))
        texts = self._rules[number][1]
        return texts[choice % len(texts)]

    def _read(self) -> None:
        try:
            stat = self._path.stat()
            version = stat.st_mtime_ns, stat.st_size
            if version == self._version:
                return
            rules = json.loads(self._path.read_text(encoding="utf-8"))
            self._rules = [(str(rule.get("when", "")), _texts(rule["answer"])) for rule in rules]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            hint = 'a list like [{"when": "text of the prompt", "answer": "text"}]'
            raise InvalidRequest(f"cannot use the script {self._path.name}: {error!r}", hint=hint) from error
        self._version = version


def _texts(answer: object) -> list[str]:
    texts = [text for text in (answer if isinstance(answer, list) else [answer]) if isinstance(text, str)]
    if not texts or (isinstance(answer, list) and len(texts) < len(answer)):
        raise ValueError("an answer is a text or a list of texts")
    return texts


class ScriptedTokens(FakeTokens):
    def __init__(self, text: TextFiles, script: Script) -> None:
        super().__init__(text)
        self._script, self._tokenizer = script, Tokenizer(text)
        self._known: dict[tuple[str, int], list[int]] = {}
        """Tokens of the open answers, by request and choice."""

    def choose(self, request: Request, digest: bytes, choice: int, index: int, guide: Guide | None) -> Sampled:
        ids = self._ids(request, choice, fresh=index == 0)
        chosen = super().choose(request, digest, choice, index, guide)
        if index < len(ids):
            wish = ids[index]
        elif index == len(ids) and ids and not request.params.ignore_eos:
            wish = min(request.end_ids, default=chosen.token_id)
        else:
            return chosen
        allowed = guide is None or bool(guide.mask()[wish])
        return self.sampled(request, digest, choice, index, wish) if allowed else chosen

    def _ids(self, request: Request, choice: int, *, fresh: bool) -> list[int]:
        key = request.id, choice
        if fresh or key not in self._known:
            prompt = self._tokenizer.decode(request.prompt_ids, skip_special=False)
            text = self._script.answer(prompt, choice)
            ids = [] if text is None else self._tokenizer.encode(spelled(text, request.params.structure), special=False)
            self._known[key] = ids
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return self._known[key]


def spelled(text: str, structure: Structure | None) -> str:
    """The same answer with the spaces that its grammar demands."""
    if structure is None:
        return text
    if structure.kind == "tool_calls":
        text = _CALL.sub(lambda call: f"{OPENING}\n{_json(call[1], ', ', ': ')}\n{CLOSING}", text)
    return text if structure.kind in ("regex", "ebnf", "choice") else _json(text, ",", ":")


def _json(text: str, item: str, key: str) -> str:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return json.dumps(value, ensure_ascii=False, separators=(item, key))
