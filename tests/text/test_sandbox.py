"""A chat template is a stranger's program: whatever it tries ends soon, takes little memory, and is refused by name."""

from __future__ import annotations

import resource
import threading
from datetime import datetime
from typing import Any

import pytest

from tripool.errors import CheckpointCorrupt, InvalidRequest
from tripool.text.template import Template

HELLO = {"role": "user", "content": "Hello"}
MOST_BYTES = 300 * 2**20

GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}%s"

ATTACKS = {
    # One operation with a huge result, most of them of constants, which Jinja computes when it compiles.
    "center": "{{ 'a'.center(3000000000) }}",
    "center filter": "{{ 'a'|center(3000000000) }}",
    "center in a branch": "{% if false %}{{ 'a'|center(3000000000) }}{% endif %}{{ 'a'|center(3000000000) }}",
    "center assigned": "{% set x = 'a'|center(3000000000) %}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "expandtabs": "{{ '\\t\\t\\t'.expandtabs(1000000000) }}",
    "times": "{{ 'a' * 3000000000 }}",
    "times of a list": "{{ ([0] * 3000000000)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (3000000000, 1) }}",
    "percent precision": "{{ '%.3000000000f' % 1.5 }}",
    "format filter": "{{ '%3000000000d'|format(1) }}",
    "format": "{{ '{:3000000000}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=3000000000) }}",
    "format_map": "{{ '{a:3000000000}'.format_map({'a': 1}) }}",
    "indent": "{{ 'a\\nb'|indent(3000000000) }}",
    "indent by text": "{% set x = 'a' * 1000000 %}{{ ('\\n' * 1000000)|indent(x) }}",
    "tojson indent": "{{ [1]|tojson(indent=3000000000) }}",
    "tojson separators": "{{ ([1] * 100000)|tojson(separators=('a' * 100000, '')) }}",
    "batch": "{{ [1]|batch(3000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(3000000000)|list }}",
    "round": "{{ 5|round(-3000000000) }}",
    "round up": "{{ 5|round(3000000000, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "encode": "{{ ('a' * 1000000).encode() }}",
    "strftime": "{{ strftime_now('%3000000000d') }}",
    "strftime flags": "{{ strftime_now('%_-3000000000d') }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 1000000 %}{{ x|replace('a', x) }}",
    "replace nothing": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "join": "{% set x = 'a' * 1000000 %}{{ ([x] * 100000)|join }}",
    "join by text": "{% set x = 'a' * 1000000 %}{{ x.join(range(100000)|map('string')) }}",
    "join method": "{% set x = 'a' * 1000000 %}{{ ''.join([x] * 100000) }}",
    "sum of lists": "{{ ([[1] * 1000] * 100000)|sum(start=[])|length }}",
    "many parts": "{% set x = 'a' * 1000000 %}{{ " + " ~ ".join(["x"] * 3000) + " }}",
    "many fields": "{% set x = 'a' * 1000000 %}{{ ('{0}' * 5000).format(x) }}",
    "many percents": "{% set x = 'a' * 1000000 %}{{ ('%(a)s' * 5000) % {'a': x} }}",
    "a list as text": "{% set x = 'a' * 1000000 %}{{ [x] * 100000 }}",
    "a list in text": "{% set x = 'a' * 1000000 %}{{ '' ~ [x] * 100000 }}",
    "refused with it": "{% set x = 'a' * 1000000 %}{{ raise_exception([x] * 100000) }}",
    # Values that grow by themselves.
    "doubled": GROW % ("'a'", "ns.x ~ ns.x", "{{ ns.x }}"),
    "added": GROW % ("'a'", "ns.x + ns.x", "{{ ns.x }}"),
    "joined twice": GROW % ("'a'", "[ns.x, ns.x]|join", ""),
    "formatted twice": GROW % ("'a'", "'%s%s' % (ns.x, ns.x)", ""),
    "list added": GROW % ("[1]", "ns.x + ns.x", ""),
    "block": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "squared": GROW % ("3", "ns.x * ns.x", ""),
    "nested printed": GROW % ("['a']", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested as text": GROW % ("['a']", "[ns.x, ns.x]", "{{ ns.x|string }}"),
    "nested as JSON": GROW % ("['a']", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "nested refused": GROW % ("['a']", "[ns.x, ns.x]", "{{ raise_exception(ns.x) }}"),
    "nested key": GROW % ("('a',)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
    "nested looked up": GROW % ("('a',)", "(ns.x, ns.x)", "{{ {}[ns.x] }}"),
    "nested get": GROW % ("('a',)", "(ns.x, ns.x)", "{{ {}.get(ns.x) }}"),
    "nested unique": GROW % ("('a',)", "(ns.x, ns.x)", "{{ [ns.x]|unique|list }}"),
    "nested compared": "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ %s }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "a namespace printed": "{% set ns = namespace() %}{% set ns.x = 'a' * 1000000 %}{{ ns }}",
    "a namespace that grows in a list": "{% set ns = namespace(x='') %}{% set l = [ns] * 100000 %}{{ l == 1 }}"
    "{% set ns.x = 'a' * 1000000 %}{{ l }}",
    # Work without end.
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "long loop bodies": "{% for i in range(99999) %}" + "{{ i }}" * 5_000 + "{% endfor %}",
    "loops over texts": "{% set x = 'a' * 100000 %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "blocks": "{% block a %}{% if messages %}{{ self.a() }}{{ self.a() }}{% endif %}{% endblock %}",
    "recursive loops": "{% for x in [messages] recursive %}{{ loop([messages]) }}{{ loop([messages]) }}{% endfor %}",
    "callers": "{% macro m(n) %}{% for i in range(99999) %}{{ caller(i) }}{% endfor %}{% endmacro %}"
    "{% call(i) m(1) %}{% for j in range(99999) %}{% endfor %}{% endcall %}",
    "filters over ranges": "{% for i in range(99999) %}{{ range(99999)|max }}{% endfor %}",
    "sums of ranges": "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "lazy filters": "{% for i in range(99999) %}{% set x = range(99999)|map(attribute='x')|list %}{% endfor %}",
    "lazy and dropped": "{% for i in range(99999) %}{% set x = range(99999)|selectattr('x')|first %}{% endfor %}",
    "selects": "{% for i in range(99999) %}{% set x = range(99999)|select('odd')|list %}{% endfor %}",
    "looking in ranges": "{% for i in range(99999) %}{% set x = 'a' in range(99999) %}{% endfor %}",
    "looking in lists": "{% set l = [1] * 99999 %}{% for i in range(99999) %}{% set x = 'a' in l %}{% endfor %}",
    "looking in values": "{% set d = dict.fromkeys(range(99999), 1) %}"
    "{% for i in range(99999) %}{% set x = 'a' in d.values() %}{% endfor %}",
    "counting": "{% set l = [1] * 99999 %}{% for i in range(99999) %}{% set x = l.count(2) %}{% endfor %}",
    "slices": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "texts compared": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x ~ i == x ~ i %}{% endfor %}",
    "upper": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
    "sorts": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set x = l|sort %}{% endfor %}",
    "copies of arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}{% set l = [1] * 99999 %}"
    "{% for i in range(99999) %}{{ m(*l) }}{% endfor %}",
    "lists of characters": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x|list %}{% endfor %}",
    "splits": "{% set x = 'a ' * 1000000 %}{% for i in range(99999) %}{% set y = x.split() %}{% endfor %}",
}
del ATTACKS["nested compared"]
for _name, _use in {"==": "ns.x == ns.y", "in": "ns.x in [ns.y]", "is": "ns.x is eq(ns.y)", "<": "ns.x < ns.y"}.items():
    ATTACKS[f"nested compared with {_name}"] = (
        "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ " + _use + " }}"
    )
for _name, _use in {
    "index": "[ns.x].index(ns.y)",
    "sort": "[ns.x, ns.y]|sort",
    "select": "[ns.x]|select('eq', ns.y)|list",
}.items():
    ATTACKS[f"nested compared by {_name}"] = (
        "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ " + _use + " }}"
    )


def make(source: str) -> Template:
    return Template(source, special_tokens={}, now=datetime.now)


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_no_template_takes_much_time_or_memory(source: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointCorrupt, InvalidRequest), match=r"sandbox|exceeds its budget|too long|Range too big"):
        make(source).render([HELLO])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 < MOST_BYTES


def test_what_a_refusal_says_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as refused:
        make("{{ raise_exception('x' * 1000000) }}").render([HELLO])
    assert len(str(refused.value)) < 2000


def test_ordinary_work_is_within_its_budget() -> None:
    """As templates do it that look at all messages for each of them, and at every word of a long one."""
    source = """
    {%- for m in messages %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
        {%- set last = (messages | length) - 1 == loop.index0 %}
        {%- if '</think>' in m.content %}
            {%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- else %}{%- set text = m.content | trim %}{%- endif %}
        {{- '<|' ~ m['role'] ~ '|>' + text.replace('a', 'b') + ('%s' % (loop.index,)) }}
        {{- '{} {:>5}'.format('x', 1) }}{{ later | length }}{{ last }}
        {{- text | string | upper | indent(2) | center(10) | length }}
    {%- endfor %}"""
    template = make(source)
    turns: list[dict[str, Any]] = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"a {i}"} for i in range(300)
    ]
    assert template.render(turns).count("<|user|>") == 150
    long = [{"role": "user", "content": "<think>no</think>" + "a word " * 500_000}]
    assert len(template.render(long)) > 3_000_000


def test_renderings_at_once_have_budgets_of_their_own() -> None:
    template = make(
        "{% for i in range(20000) %}{% for m in messages %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    said: list[str] = []
    threads = [threading.Thread(target=lambda: said.append(template.render([HELLO]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["Hello"] * 8
