"""Sandbox of chat templates: Jinja's sandbox with a budget. A template is untrusted code inside the server.

| a template could | prevented by |
|---|---|
| reach Python's own objects | Jinja's sandbox |
| use what was not considered | only filters, tests, methods and functions with a known cost exist |
| loop for ever: loops, macros, blocks, filters over lists | every pass costs steps, by the size of its code |
| make one huge value: `center`, `*`, `~`, `join`, `replace`, `%`, `round` | the size is computed before, and bounded |
| grow a value step by step, or nest one in itself | values are measured when compared, printed or joined |
| let Python do the work: searches, sorts, hashes, large numbers | charged by the worst case |
| let the compiler do the work: constants folded when it is loaded | no constant folding |

`text/budget.py` counts; `template_calls.py`, `template_filters.py` and `template_formats.py` define costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.nodes as nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tripool.text.budget import (
    BUDGET_NAME,
    CHARS_PER_STEP,
    MAX_CHARS,
    MAX_ITEMS,
    MAX_NUMBER_BITS,
    Budget,
    TooMuchWork,
    budget_of,
    check,
    length,
)
from tripool.text.template_calls import pay_call
from tripool.text.template_filters import guarded_filters, guarded_tests, is_in
from tripool.text.template_formats import pay_percent

_NODES_PER_STEP = 4
_SPEND, _WHOLE, _PART, _CONCAT, _IN = " spend", " whole", " part", " concat", " in"
_GLOBALS = ("dict", "namespace", "range")
"""Of Jinja's own. The others (`cycler`, `joiner`, `lipsum`) hold values unmeasured, or are random."""
_NUMBERS = (int, float, complex)
_JINJAS_OWN = ("_loop_vars", "_block_vars")
"""Arguments that compiled templates add for `Context.call`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """`compile_template` compiles a template, `names` makes the context of a rendering."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_shown, **options)
        self.globals = {name: self.globals[name] for name in _GLOBALS}

    def compile_template(self, source: str) -> jinja2.Template:
        """Call after all filters are registered."""
        self.filters = guarded_filters(self.filters)
        self.filters |= {_SPEND: _spend, _WHOLE: _whole, _PART: _part, _CONCAT: _concat, _IN: _in}
        self.tests = guarded_tests(self.tests)
        tree = _Metered().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def names(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], most_steps: float = float("inf")
    ) -> dict[str, Any]:
        return {**names, "messages": messages, BUDGET_NAME: Budget(messages, names.get("tools"), most_steps, self)}

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja would print nothing here and only raise on further use: a prompt with gaps."""
        raise SecurityError(f"'{attribute[:100]}' of a {type(obj).__name__} is out of bounds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "+" and type(left) is str and type(right) is str:
            budget.take(extra=len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            check(bits, MAX_NUMBER_BITS)
            budget.spend(1)
        elif operator == "%" and isinstance(left, str):
            budget.take(right, times=5 if hasattr(left, "__html__") else 1)  # it escapes the value
            pay_percent(budget, left, right)
        elif operator == "*":
            _pay_repeated(budget, left, right)
        elif operator == "+":
            budget.glance(left, right)
            check(sum(len(value) for value in (left, right) if isinstance(value, (list, tuple))), MAX_ITEMS)
            check(sum(len(value) for value in (left, right) if isinstance(value, str)), MAX_CHARS)
        elif not all(isinstance(value, (*_NUMBERS, jinja2.Undefined)) for value in (left, right)):
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            raise TypeError(f"unsupported operand types for {operator}: {kinds}")  # key views support some
        return budget.settle(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        own = {name: value for name, value in kwargs.items() if name not in _JINJAS_OWN} if kwargs else kwargs
        args = pay_call(budget, __obj, args, own)
        return budget.settle(super().call(__context, __obj, *args, **kwargs))


def _pay_repeated(budget: Budget, left: Any, right: Any) -> None:
    value, times = (left, right) if isinstance(right, int) else (right, left)
    if isinstance(times, int) and times > 0 and isinstance(value, (str, list, tuple)):
        check(len(value) * times, MAX_CHARS if isinstance(value, str) else MAX_ITEMS)
        budget.spend(1 + length(value) * times)


# ---- instrumentation of the template's code ------------------------------------------------------------------------


class _Metered(NodeTransformer):
    """Bodies that can run more than once charge for themselves; operators that inspect values measure them first."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        _pay(node.body)
        if node.test is not None:
            node.test = nodes.And(_spending(_weight([node.test])), node.test)
        return node

    def _visit_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        _pay(node.body)
        return cast(nodes.Node, node)

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        if any(operand.op in ("in", "notin") for operand in node.ops):
            if len(node.ops) > 1:
                raise jinja2.TemplateSyntaxError("'in' within a chain of comparisons", node.lineno)
            found = _wrapped(nodes.List([node.expr, node.ops[0].expr]), _IN)
            return found if node.ops[0].op == "in" else nodes.Not(found)
        node.expr = _wrapped(node.expr, _WHOLE)
        for operand in node.ops:
            operand.expr = _wrapped(operand.expr, _WHOLE)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise jinja2.TemplateSyntaxError("prompts are not escaped", node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _wrapped(nodes.List(node.nodes), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _wrapped(node, _PART) if node.ctx == "load" else node
        node.arg = _wrapped(node.arg, _WHOLE)  # a key is hashed
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _wrapped(node.key, _WHOLE)
        return node


def _wrapped(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else nodes.Filter(node, name, [], [], None, None)


def _spending(weight: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(weight), _SPEND, [], [], None, None)


def _pay(body: list[nodes.Node]) -> None:
    body.insert(0, nodes.ExprStmt(_spending(_weight(body))))


def _weight(body: list[Any]) -> int:
    """Cost of one pass through it; inner loops charge for themselves."""
    total, chars, open_ = 0, 0, list(body)
    while open_:
        node = open_.pop()
        total += 1
        chars += len(node.data) if isinstance(node, nodes.TemplateData) else 0
        inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
        open_.extend(inner)
    return 1 + total // _NODES_PER_STEP + chars // CHARS_PER_STEP


@pass_context
def _spend(context: Context, steps: int) -> bool:
    budget: Budget = context.parent[BUDGET_NAME]
    budget.left -= steps
    if budget.left < 0:
        raise TooMuchWork
    return True


@pass_context
def _whole(context: Context, value: Any) -> Any:
    """About to be compared or hashed, with all that it contains."""
    kind = type(value)
    if kind is not int and kind is not bool and kind is not Namespace:  # compared by identity
        budget: Budget = context.parent[BUDGET_NAME]
        budget.take(value)
    return value


@pass_context
def _part(context: Context, value: Any) -> Any:
    budget_of(context).spend(1 + length(value) / 32)
    return value


@pass_context
def _concat(context: Context, parts: list[Any]) -> Any:
    budget = budget_of(context)
    budget.take(*parts)
    return budget.settle("".join(map(str, parts)))


@pass_context
def _in(context: Context, pair: list[Any]) -> bool:
    return is_in(context, *pair)


@pass_context
def _shown(context: Context, value: Any) -> Any:
    """About to be printed."""
    budget: Budget = context.parent[BUDGET_NAME]
    budget.take(value)
    return value
