"""Templates in the styles of real models, rendered by us and by transformers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from tripool.errors import CheckpointCorrupt, InvalidRequest
from tripool.text import template as template_module
from tripool.text.template import Template

SOURCES = {
    path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & 'Zeit'",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SYSTEM = {"role": "system", "content": " Be brief. "}
HELLO = {"role": "user", "content": "  Hello, <b>world</b> 狐\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi!  "}
MORE = {"role": "user", "content": "And Paris?"}
RESULT = {"role": "tool", "content": '{"temp": "21 °C"}'}


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [HELLO],
    "system": [SYSTEM, HELLO],
    "turns": [HELLO, ANSWER, MORE],
    "system_turns": [SYSTEM, HELLO, ANSWER, MORE, {"role": "assistant", "content": "Wait"}],
    "tool_text": [SYSTEM, HELLO, call('{"place": "Paris"}'), RESULT, ANSWER, MORE],
    "tool_object": [HELLO, call({"place": "Zürich <&>"}), RESULT, RESULT],
    "reasoning": [HELLO, {**ANSWER, "content": "Hi", "reasoning_content": "\nlong thought\n"}],
}


def make(source: str, now: Callable[[], datetime] = datetime.now) -> Template:
    return Template(source, special_tokens=SPECIALS, now=now)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=LibraryTokenizer(models.BPE()), **SPECIALS)


CASES = [
    (name, case)
    for name in SOURCES
    for case in CONVERSATIONS
    # These pairs make the template itself fail, in transformers as here.
    if not (name == "strict" and case not in ("one", "turns"))
    and not (name == "chatml" and case.startswith("tool"))
    and not (name == "roles" and case == "tool_object")
    # Since 5.23 transformers drops a content of None, which this template, like DeepSeek's, looks for.
    and not (name == "roles" and case == "tool_text")
]


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"enable_thinking": False, "date_string": "today"}])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(
    reference: PreTrainedTokenizerFast, name: str, case: str, options: dict[str, Any], add_generation_prompt: bool
) -> None:
    conversation = CONVERSATIONS[case]
    expected = reference.apply_chat_template(
        conversation,
        chat_template=SOURCES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **options,
    )
    extra = {key: value for key, value in options.items() if key != "tools"}
    rendered = make(SOURCES[name]).render(
        conversation, add_generation_prompt=add_generation_prompt, tools=options.get("tools"), extra=extra
    )
    assert rendered == expected
    assert "Paris" in rendered or "world" in rendered


def test_a_content_of_none_reaches_the_template() -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    conversation = CONVERSATIONS["tool_text"]
    expected = environment.from_string(SOURCES["roles"]).render(messages=conversation, **SPECIALS)
    assert make(SOURCES["roles"]).render(conversation, add_generation_prompt=False) == expected
    assert "weather" in expected


@pytest.mark.parametrize("name", ["chatml", "headers", "thinking", "strict"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "  Once\n\n", "x"])
def test_continues_the_final_message_as_transformers_does(
    reference: PreTrainedTokenizerFast, name: str, content: str
) -> None:
    conversation = [HELLO, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        conversation, chat_template=SOURCES[name], tokenize=False, continue_final_message=True
    )
    rendered = make(SOURCES[name]).render(conversation, continue_final_message=True)
    assert rendered == expected
    assert rendered.endswith(content.strip() if name == "headers" else content)


def test_continuing_an_empty_message_keeps_its_header() -> None:
    rendered = make(SOURCES["headers"]).render(
        [HELLO, {"role": "assistant", "content": ""}], continue_final_message=True
    )
    assert rendered.endswith("assistant<|end_header_id|>\n\n")


def test_continuing_works_whatever_the_message_holds() -> None:
    content = "\ue000continue\ue000 and on"
    rendered = make(SOURCES["chatml"]).render(
        [HELLO, {"role": "assistant", "content": content}], continue_final_message=True
    )
    assert rendered.endswith(content)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    template = make("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template.render([HELLO, ANSWER], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="no text to continue"):
        template.render([HELLO, call("{}")], continue_final_message=True)


def test_documents_reach_the_template(reference: PreTrainedTokenizerFast) -> None:
    documents = [{"title": "Foxes", "text": "are red"}]
    expected = reference.apply_chat_template(
        [HELLO], chat_template=SOURCES["thinking"], tokenize=False, documents=documents, add_generation_prompt=True
    )
    assert make(SOURCES["thinking"]).render([HELLO], extra={"documents": documents}) == expected
    assert "[1] Foxes: are red" in expected


def test_an_empty_list_of_tools_is_no_tools() -> None:
    template = make(SOURCES["headers"])
    assert template.render([HELLO], tools=[]) == template.render([HELLO])


def test_text_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "fox"}]
    template = make(SOURCES["chatml"])
    joined = template.render([{"role": "user", "content": "Hello, fox"}])
    assert template.render([{"role": "user", "content": parts}]) == joined


def test_the_caller_keeps_its_messages() -> None:
    conversation = [dict(HELLO), {"role": "assistant", "content": "Once"}]
    before = [dict(message) for message in conversation]
    make(SOURCES["chatml"]).render(conversation, continue_final_message=True)
    assert conversation == before


def test_the_clock_is_the_one_handed_in() -> None:
    template = make("{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2031, 2, 3))
    assert template.render([HELLO]) == "03 February 2031"


def test_json_is_not_escaped_for_html() -> None:
    template = make(
        "{{ messages[0].content | tojson }}{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    assert template.render([{"role": "user", "content": "<é & '狐'>"}]) == "\"<é & '狐'>\"" + '{"a":[2],"b":1}'


def test_generation_blocks_have_their_own_scope(reference: PreTrainedTokenizerFast) -> None:
    source = "{% set x = 'out' %}{% generation %}{{ x }}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x }}"
    expected = reference.apply_chat_template([HELLO], chat_template=source, tokenize=False)
    assert make(source).render([HELLO]) == expected == "outinout"


def test_extra_names_override_special_tokens_but_not_arguments() -> None:
    template = make("{{ bos_token }}{{ mood }}")
    assert template.render([HELLO], extra={"bos_token": "<x>", "mood": "calm"}) == "<x>calm"
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequest, match=name):
            template.render([HELLO], extra={name: []})
    with pytest.raises(InvalidRequest, match="object, which is not JSON"):
        template.render([HELLO], extra={"mood": object()})


def test_the_templates_own_error_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate: user, assistant, user") as caught:
        make(SOURCES["strict"]).render([HELLO, MORE])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + messages[1].content }}",  # nothing there
        "{{ messages[0].content + 1 }}",
        "{{ '%d' % messages[0].content }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ [][1].x }}",
        "{{ messages[0].content | int + none }}",
    ],
)
def test_messages_that_a_template_cannot_handle_are_the_callers_mistake(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        make(source).render([HELLO])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ 'unclosed }}",
        "{{ x | no_such_filter }}",
        "{% generation %}never closed",
        "{% nonsense %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 'a' }}" * template_module.MAX_SOURCE_CHARS,
    ],
)
def test_templates_that_do_not_compile_are_corrupt_checkpoints(source: str) -> None:
    with pytest.raises(CheckpointCorrupt):
        make(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ (''|attr('__class__')).__name__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% set _ = messages.clear() %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * 'a' }}",
        "{{ [messages] * 10000000000 }}",
        "{{ 10 ** 10000000000 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="sandbox"):
        make(source).render([HELLO])


def test_ranges_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="Range too big"):
        make("{% for i in range(10000000) %}{% endfor %}").render([HELLO])


def test_arithmetic_within_bounds_works() -> None:
    assert (
        make("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 1.5 }}{{ -2 * 4 }}{{ 2 ** -1 }}").render([HELLO])
        == "ababab10244.5-80.5"
    )


def test_random_text_is_not_on_offer() -> None:
    with pytest.raises(InvalidRequest, match="lipsum"):
        make("{{ lipsum() }}").render([HELLO])


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARS", 1000)
    template = make("{% for i in range(11) %}{{ messages[0].content }}{% endfor %}")
    assert len(template.render([{"role": "user", "content": "x" * 90}])) == 990
    with pytest.raises(InvalidRequest, match="exceeds 1000 characters"):
        template.render([{"role": "user", "content": "x" * 91}])
