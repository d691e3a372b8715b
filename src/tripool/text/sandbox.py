"""Where chat templates run: Jinja's sandbox with a budget. A template is a stranger's program inside the server.

| a template could | and here |
|---|---|
| reach Python's own objects | Jinja's sandbox refuses |
| loop for ever: loops, macros, blocks, filters over lists | every pass costs steps, by how much code it runs |
| make one huge value: `center`, `*`, `~`, `join`, `replace`, `%`, `round` | the size is known, and refused, before |
| grow a value step by step, or nest one in itself | whatever is compared, printed or joined is measured |
| let the compiler do the work: constants folded when it is loaded | nothing is folded |

`text/budget.py` counts, `text/template_checks.py` knows how large results will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import jinja2
import jinja2.nodes as nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tripool.text.budget import MAX_CHARS, MAX_ITEMS, MAX_NUMBER_BITS, Budget, TooMuchWork, check, length
from tripool.text.template_checks import (
    FILTER_CHECKS,
    check_joined,
    check_percent,
    check_repeated,
    check_text_method,
    listed,
    num_chars,
    num_items,
)

_NODES_PER_STEP = 4
_BUDGET = " budget"
"""A name that no template can spell."""
_SPEND, _WHOLE, _PART, _CONCAT = " spend", " whole", " part", " concat"

_GONE_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""Slow, or not the same every time; no published template needs them."""
_CONSTANT = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
"""Filters that take no longer for a longer value."""
_SHALLOW = frozenset({"batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"})
"""Filters that do not look into the items of a list; what is called for each of them counts by itself."""
_COMPARING = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="}
)
_NUMBER_METHODS = frozenset({"bit_length", "is_integer"})


def _budget(context: Context) -> Budget:
    return cast(Budget, context.parent[_BUDGET])


class Sandbox(ImmutableSandboxedEnvironment):
    """`compile_template` makes what it runs, and `names` what a rendering is given."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_shown, **options)
        del self.globals["lipsum"]  # random text of any length
        for name in _GONE_FILTERS:
            del self.filters[name]

    def compile_template(self, source: str) -> jinja2.Template:
        """After all filters are there."""
        self.filters = {name: _guarded_filter(name, filter) for name, filter in self.filters.items()}
        self.filters |= {_SPEND: _spend, _WHOLE: _whole, _PART: _part, _CONCAT: _concat}
        self.tests = {name: _guarded_test(name, cast(Any, test)) for name, test in self.tests.items()}
        tree = _Metered().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def names(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> dict[str, Any]:
        return {**names, "messages": messages, _BUDGET: Budget(messages, names.get("tools"))}

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja would print nothing here and only raise on further use: a prompt with holes."""
        raise SecurityError(f"'{attribute[:100]}' of a {type(obj).__name__} is out of bounds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "+" and type(left) is str and type(right) is str:
            budget.take(extra=len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            check(bits, MAX_NUMBER_BITS)
            budget.spend(1)
        elif operator == "%" and isinstance(left, str):
            check_percent(budget, left, right)
        elif operator == "*":
            check_repeated(budget, left, right)
        else:
            budget.glance(left, right)
            check(num_items(left) + num_items(right), MAX_ITEMS)
            check(num_chars(left) + num_chars(right), MAX_CHARS)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.glance(*args, *kwargs.values())
        function = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        is_dict = function is dict or owner is dict
        if isinstance(owner, str):
            check_text_method(budget, owner, name, args, kwargs)
            if name == "join":
                args = (listed(args[0]), *args[1:]) if args else args
                check_joined(budget, owner, args[0] if args else ())
        elif isinstance(owner, (int, float)):
            if name not in _NUMBER_METHODS:
                raise SecurityError(f"'{name}' of a number is out of bounds")
        elif isinstance(owner, (list, tuple, dict, LoopContext)) or isinstance(function, FunctionType) or is_dict:
            inside = owner if isinstance(owner, (list, tuple)) else ()  # which `count` and `index` go through
            budget.take(inside, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)


# ---- what is written into the template's own code ------------------------------------------------------------------


class _Metered(NodeTransformer):
    """Bodies that can run more than once pay for themselves; operators that look into values measure them first."""

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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _wrapped(node.expr, _WHOLE)
        for operand in node.ops:
            operand.expr = _wrapped(operand.expr, _WHOLE)
        return node

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
    """What one pass through it costs; loops inside pay for themselves."""
    total, open_ = 0, list(body)
    while open_:
        node = open_.pop()
        total += 1
        inner = [node.iter] if isinstance(node, nodes.For) else node.iter_child_nodes()
        open_.extend(inner)
    return 1 + total // _NODES_PER_STEP


@pass_context
def _spend(context: Context, steps: int) -> bool:
    budget: Budget = context.parent[_BUDGET]
    budget.left -= steps
    if budget.left < 0:
        raise TooMuchWork
    return True


@pass_context
def _whole(context: Context, value: Any) -> Any:
    """About to be compared or hashed, with all that is in it."""
    kind = type(value)
    if kind is not int and kind is not bool and kind is not Namespace:  # of which only the identity is
        budget: Budget = context.parent[_BUDGET]
        budget.take(value)
    return value


@pass_context
def _part(context: Context, value: Any) -> Any:
    _budget(context).spend(1 + length(value) / 32)
    return value


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    budget = _budget(context)
    budget.take(*parts)
    return "".join(map(str, parts))


@pass_context
def _shown(context: Context, value: Any) -> Any:
    """About to be printed."""
    budget: Budget = context.parent[_BUDGET]
    budget.take(value)
    return value


# ---- filters, tests and methods ------------------------------------------------------------------------------------


def _guarded_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """With the context as its first argument, which also keeps it from being called when a template is compiled."""
    before, constant, shallow = FILTER_CHECKS.get(name), name in _CONSTANT, name in _SHALLOW

    @pass_context
    def guarded(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if isinstance(value, Namespace):
            raise SecurityError(f"a namespace has no '{name}'")
        if name in ("join", "list", "sum"):
            value = listed(value)
        if constant:
            budget.spend(1)
        elif shallow:
            budget.glance(value, *args, *kwargs.values())
        else:
            budget.take(value, *args, *kwargs.values())
        if before is not None:
            before(budget, value, *args, **kwargs)
        made = filter(*_leading(context, filter), value, *args, **kwargs)
        return _counted(budget, made) if isinstance(made, Iterator) else made

    return guarded


def _counted(budget: Budget, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend(1)
        yield item


def _guarded_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    comparing = name in _COMPARING

    @pass_context
    def guarded(context: Context, value: Any, *args: Any) -> Any:
        budget = _budget(context)
        if comparing:
            budget.take(value, *args)
        else:
            budget.spend(1)
        return test(*_leading(context, test), value, *args)

    return guarded


def _leading(context: Context, function: Any) -> tuple[Any, ...]:
    """What Jinja itself would have given the function first."""
    asked = getattr(function, "jinja_pass_arg", None)
    if asked is None:
        return ()
    return ({"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[asked.name],)
