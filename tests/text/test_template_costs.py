"""What a template's operations cost: as much as Python takes for them, so that the budget bounds time and memory.

Inputs are such that each of the sources below took minutes, or gigabytes, where it was paid for by its length alone.
"""

from __future__ import annotations

import random
import resource
import tracemalloc
from datetime import datetime

import pytest

from tripool.errors import CheckpointCorrupt, InvalidRequest, TripoolError
from tripool.text import budget as budget_module
from tripool.text import template as template_module
from tripool.text.template import NotQuick, Template

HELLO = {"role": "user", "content": "Hello"}
REFUSED = r"sandbox|exceeds its budget|cannot render|cannot be compiled|line 1 of"


def doubled(text: str, times: int, name: str = "a") -> str:
    return f"{{% set {name} = '{text}' %}}" + f"{{% set {name} = {name} ~ {name} %}}" * times


def several(table: str) -> list[str]:
    return [one.strip() for line in table.strip().splitlines() for one in line.split(";;")]


COLLIDING = f"range(0, {2**61 - 1} * 90000, {2**61 - 1})"
"""All of them have the hash 0."""
DEEP = "{% set ns = namespace(x=('a',), y=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}" + (
    "{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
)

ATTACKS = {
    # Formats as Python reads them, not as they look.
    "percent without an end": doubled("%(", 19) + "{{ a % () }}",
    "percent filter without an end": doubled("%(", 19) + "{{ a|format }}",
    "percent with nested parentheses": "{{ ('%(a(b)c)999999999d' % {'a(b)c': 1})|length }}",
    "percent filter with nested parentheses": "{{ '%(a(b)c)999999999d'|format(**{'a(b)c': 1})|length }}",
    "percent beyond all memory": "{{ '%(a(b)c)99999999999d' % {'a(b)c': 1} }}",
    "a remainder that is a format": "{{ '%999999999d' is odd }}",
    "a division that is a format": "{{ '%999999999d' is divisibleby(7) }}",
    "fields of fields": "{% set x = '{0" + ".real" * 9000 + "}' %}{{ (x * 3000).format(1) }}",
    "what a loop remembers": "{% for i in ['a' * 1000000, 1] %}{% if loop.last %}"
    "{{ ('{0.previtem}' * 9000).format(loop) }}{% endif %}{% endfor %}",
    # Text that grows by more than it says.
    "tabs": doubled("\\t", 12) + "{% set ns = namespace(l=[]) %}{% for i in range(3000) %}"
    "{% set ns.l = ns.l + [a.expandtabs(4000)] %}{% endfor %}",
    "lines that end otherwise": "{{ ('\\r' * 1000000)|indent('x' * 100000)|length }}",
    "text between tags": "{% set x %}{% for i in range(99999) %}" + "a" * 60_000 + "{% endfor %}{% endset %}",
    "JSON, deep and indented": "{% set v = range(60000)|list %}"
    + "{% set v = [v] %}" * 95
    + "{{ v|tojson(indent=64) }}",
    "rounded text": "{{ 'a'|round(10, 'ceil') }}",
    "a rounded list": "{{ [1]|round(10, 'floor') }}",
    "joined attributes": "{% for i in ['a' * 1000000, 1] %}{% if loop.last %}"
    "{{ ([loop] * 9000)|join(attribute='previtem') }}{% endif %}{% endfor %}",
    # Searches that compare each with each.
    "rfind": doubled("a", 20) + doubled("a", 19, "b") + "{{ a.rfind('a' ~ 'b' ~ b) }}",
    "rindex": doubled("a", 20) + doubled("a", 19, "b") + "{{ a.rindex('a' ~ 'b' ~ b) }}",
    "rsplit": doubled("a", 20) + doubled("a", 19, "b") + "{{ a.rsplit('a' ~ 'b' ~ b) }}",
    "rpartition": doubled("a", 20) + doubled("a", 19, "b") + "{{ a.rpartition('a' ~ 'b' ~ b) }}",
    "short searches": doubled("a", 11) + doubled("a", 10, "b") + "{% set p = 'a' ~ 'b' ~ b %}"
    "{% for i in range(99999) %}{% set x = p in a %}{% set x = a.find(p) %}{% endfor %}",
    "strip": doubled("\u4e00", 19) + doubled("\u4e01", 19, "b") + "{{ a.strip(b ~ '\u4e00')|length }}",
    "trim": doubled("\u4e00", 19) + doubled("\u4e01", 19, "b") + "{{ a|trim(b ~ '\u4e00')|length }}",
    "many prefixes": doubled("a", 20) + "{{ a.startswith((a ~ 'b',) * 90000) }}" * 40,
    # Numbers.
    "a number of a million digits": doubled("f", 20) + "{% set x = a|int(base=16) %}{{ x // (x // 3) }}",
    "a number from bytes": "{% set x = (1).from_bytes([255] * 90000, 'big') %}{{ x // (x // 3) }}",
    "numbers that grow by subtraction": "{% set ns = namespace(x=2 ** 1000) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x * ns.x - ns.x // 3 %}{% endfor %}",
    "keys with one hash": f"{{{{ {COLLIDING}|unique|list|length }}}}",
    "a dict with one hash": f"{{{{ dict.fromkeys({COLLIDING})|length }}}}",
    # Lists.
    "long attributes": "{{ range(90000)|map(attribute='real" + ".real" * 9000 + "')|list|length }}",
    **{
        f"long attributes of {use}": "{{ range(90000)|" + use.replace("@", "'real" + ".real" * 9000 + "'") + "|list }}"
        for use in several(
            """sort(attribute=@) ;; groupby(@) ;; sum(attribute=@) ;; join(attribute=@) ;; unique(attribute=@)
            selectattr(@) ;; rejectattr(@, 'odd') ;; min(attribute=@) ;; max(attribute=@)"""
        )
    },
    "differences of keys": "{% set d = dict.fromkeys(range(90000)) %}{% for i in range(99999) %}"
    "{% set x = d.keys() - d.keys() %}{% endfor %}",
    "counting in ranges": "{% for i in range(99999) %}{% set x = range(99999).count('a') %}{% endfor %}",
    "tables of letters": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}"
    "{% set y = x.maketrans(x, x) %}{% endfor %}",
    "hidden in a generator, unique": DEEP + "{{ [ns.x, ns.y]|map('default')|unique|list }}",
    "hidden in a generator, in": DEEP + "{{ ns.x in [ns.y]|map('default') }}",
    "hidden in a generator, dict": DEEP + "{{ dict([(ns.x, 1)]|map('default')) }}",
    "hidden in a generator, fromkeys": DEEP + "{{ dict.fromkeys([ns.x]|map('default')) }}",
    "hidden in a generator, namespace": DEEP + "{{ namespace([(ns.x, 1)]|map('default')) }}",
    "hidden in a generator, sort": DEEP + "{{ [ns.x, ns.y]|map('default')|sort }}",
    "written for a test": DEEP + "{{ ns.x is lower }}",
    # What Python's compiler does not take.
    "branches": "{%if a%}" + "{%elif a%}" * 6000 + "{%endif%}",
    "escaping": "{% autoescape true %}" + doubled("<", 19) + "{{ a }}{% endautoescape %}",
    # Errors of the filters' own.
    "an assertion": "{{ 'a'|truncate(1) }}",
}


def make(source: str) -> Template:
    return Template(source, special_tokens={}, now=datetime.now)


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_what_takes_long_is_refused_at_once(source: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointCorrupt, InvalidRequest), match=REFUSED):
        make(source).render([HELLO])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 < 200 * 2**20


def test_the_same_operations_work_within_bounds() -> None:
    source = """
    {{- '%(a)5d|%-4s|%%' % {'a': 3} if false else '%5d|%-4s|%%' % (3, 'b') }} {{ '%s %.2f'|format('x', 1.5) }}
    {{- ' a\\tb'.expandtabs(4) }} {{ 'abcabc'.rfind('bc') }} {{ 'a,b,c'.rsplit(',', 1) }} {{ 'xxaxx'.strip('x') }}
    {{- '  b '|trim }} {{ 'ff'|int(base=16) // 4 - 1 }} {{ 7 / 2 }} {{ [3, 1]|sort }} {{ 'a'.startswith(('b', 'a')) }}
    {{- messages|map(attribute='role')|join(',') }} {{ ['b', 'a', 'B']|unique|list }} {{ {'a': [1]}|tojson(indent=2) }}
    {{- 'x' in 'xyz' }} {{ 3 not in [1, 2] }} {{ 'role' in messages[0] }} {{ 5 is odd }} {{ 'a' is lower }}
    {{- '{:>4}|{a}|{0[0]}'.format([1], a=2) if false else '{:>4}|{a}'.format(1, a=2) }} {{ 2.567|round(1) }}
    {{- dict(a=1).items()|list }} {{ range(3)|sum }} {{ 'a b c'.title() }} {{ 'a\\nb'|indent(2) }}"""
    said = make(source).render([HELLO])
    assert said == (
        "    3|b   |% x 1.50 a  b 4 ['a,b', 'c'] ab 62 3.5 [1, 3] Trueuser ['b', 'a'] "
        '{\n  "a": [\n    1\n  ]\n}True True True True True   1|2 2.6'
        "[('a', 1)] 3 A B C a\n  b"
    )


def test_on_an_event_loop_a_template_has_less_time() -> None:
    slow = make("{% for i in range(30000) %}{% endfor %}{{ messages[0].content }}")
    long = make("{{ 'a' * 100000 }}")
    assert slow.render([HELLO]) == "Hello"
    assert len(long.render([HELLO])) == 100_000
    for template in (slow, long):
        with pytest.raises(NotQuick):
            template.quick.render([HELLO])
    assert make("{{ messages[0].content }}").quick.render([HELLO]) == "Hello"
    with pytest.raises(CheckpointCorrupt):  # what is refused anyway is refused there too
        make("{{ 'a'|center(3000000000) }}").quick.render([HELLO])


# ---- any operations in any order -----------------------------------------------------------------------------------

TEXTS = several("""
    ns.a ~ ns.a ;; ns.a + ns.b ;; ns.a * ns.n ;; ns.b ;; ns.a.upper() ;; ns.a|title ;; ns.a|e ;; ns.a|safe
    'ß\\t' ~ ns.a ;; ns.a.replace(ns.b, ns.a) ;; ns.a|replace('', ns.b) ;; ns.a.center(ns.n) ;; ns.a|center(ns.n)
    ns.a.expandtabs(ns.n) ;; ns.a|indent(ns.n) ;; ns.a|indent(ns.b) ;; ns.a.join(ns.l|map('string'))
    ns.l|join(ns.a) ;; ns.l|tojson(indent=9) ;; ns.l|string ;; ns.l|tojson ;; ns.a.strip(ns.b) ;; ns.a|trim(ns.b)
    ('%s' * 9) % (ns.a,) ;; '%(a)99s%(a)s' % {'a': ns.a} ;; ns.a % ns.l ;; ('{0}' * 9).format(ns.a)
    ('{0:99}{0!r}').format(ns.a) ;; ns.a.format(*ns.l) ;; ns.a[::-1] ;; ns.a[1:] ;; ns.a|urlencode
    ns.a|truncate(99) ;; ns.n|string ;; ns.a|reverse ;; ns.a|tojson(ensure_ascii=true) ;; ns.l|first|string
    '\\r\\x00\\u2028' ~ ns.a ;; '%(' ~ ns.a ;; '{}' ~ ns.a ;; ns.a.zfill(ns.n) ;; ns.a|wordcount|string
    ns.a|upper|lower
""")
LISTS = several("""
    ns.l + ns.l ;; ns.l * ns.n ;; [ns.l, ns.l] ;; [ns.a, ns.b] ;; ns.a.split() ;; ns.a.split(ns.b)
    ns.a.rsplit(ns.b) ;; ns.a|list ;; ns.l|sort ;; ns.l|unique|list ;; ns.l|map('string')|list
    ns.l|batch(3, ns.a)|list ;; ns.a.splitlines() ;; ns.l|slice(ns.n, 1)|list ;; range(ns.n)|list
    ns.l|groupby('0') ;; ns.l|map(attribute='0.0')|list ;; ns.l|reverse|list ;; ns.l|select('in', ns.l)|list
    dict.fromkeys(ns.l).items()|list ;; {ns.a: ns.l}.values()|list ;; ns.a.partition(ns.b)|list
    ns.l|sort(attribute='0') ;; ns.l[:ns.n] ;; [1, 2.5, none] ;; (ns.a, ns.n)|list ;; ns.l|selectattr('0')|list
""")
NUMBERS = several("""
    ns.a|length ;; ns.n * ns.n ;; ns.n ** ns.n ;; ns.n - 1 ;; ns.n // 3 ;; ns.l|length ;; ns.a.rfind(ns.b)
    ns.a.count(ns.b) ;; ns.a|int(base=16) ;; ns.n + 99 ;; ns.l|sum ;; range(ns.n)|sum ;; ns.l.count(ns.a)
    (ns.a in ns.b)|int ;; ns.n|round(2)|int ;; (ns.l == ns.l)|int ;; ns.n % 1000 ;; 2 ;; (ns.n is odd)|int
    (ns.a is upper)|int ;; ns.a.find(ns.b) ;; (ns.a < ns.b)|int
""")


def any_template(seed: int) -> str:
    chosen = random.Random(seed)
    kinds = (("a", TEXTS), ("b", TEXTS), ("l", LISTS), ("n", NUMBERS))
    body = ""
    for _ in range(chosen.randrange(2, 9)):
        name, known = chosen.choice(kinds)
        body += f"{{% set ns.{name} = {chosen.choice(known)} %}}"
    begin, end = "{% set ns = namespace(a='a b', b='b', l=[1, 'x'], n=3) %}", "{{ ns.a }}{{ ns.l }}{{ ns.n }}"
    times = chosen.choice((1, 9, 99, 9999))
    return f"{begin}{{% for i in range({times}) %}}{body}{{% endfor %}}{end}"


@pytest.mark.parametrize("seed", range(8))
def test_any_operations_in_any_order_stay_within_their_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small budgets, so that memory beyond them shows."""
    monkeypatch.setattr(budget_module, "_STEPS", 4_000)
    ends: dict[bool, int] = {True: 0, False: 0}
    for number in range(seed * 40, seed * 40 + 40):
        template = make(any_template(number))
        tracemalloc.start()
        try:
            said = template.render([HELLO])
            assert len(said) <= template_module.MAX_RENDERED_CHARS
            ends[True] += 1
        except TripoolError:
            ends[False] += 1
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak_bytes < 2**24, any_template(number)
    assert ends[True]
    assert ends[False]
