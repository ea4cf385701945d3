"""Compiles templates for a sandbox in which their operations are charged, see template_meter.py."""

from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text.template_meter import (
    FILTERS,
    METER,
    NODE,
    OPERATORS,
    PARTS,
    BeyondMeterError,
    Meter,
    assigned,
    call_method,
    loop,
    meter_of,
    metered_filter,
)

# Limits of a template that is compiled here: its characters, and the sum of the depths of all nodes. A compiler visits
# a node as many times as there are nodes that contain it.
MOST_SOURCE = 64 << 10
MOST_DEPTHS = 300_000


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Raises BeyondMeterError, and whatever the template raises."""
    return template.render({**variables, METER: Meter()})


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are compiled with charges. known: functions that templates may call, whose cost is at
    most proportional to their arguments' size."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, known: Iterable[Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        self._known = {*known, self.globals["range"]}
        self._texts: dict[str, int] = {}  # characters of plain text by macro, for one template
        self.filters = {name: metered_filter(name, f) for name, f in self.filters.items() if name in FILTERS}
        self.filters |= PARTS

    def replace_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = metered_filter(name, function)

    def metered(self, source: str) -> jinja2.Template:
        """Raises jinja2's errors, and BeyondMeterError for a template with parts whose cost is unknown."""
        if len(source) > MOST_SOURCE:
            raise BeyondMeterError
        tree = self.parse(source)
        _check_depths(tree)
        for kind in (nodes.ScopedEvalContextModifier, nodes.EvalContextModifier):
            if tree.find(kind) is not None:
                raise BeyondMeterError
        if any(found.name not in self.filters for found in tree.find_all(nodes.Filter)):
            raise BeyondMeterError
        self._texts = {"": _text_size(tree)}
        for macro in tree.find_all((nodes.Macro, nodes.CallBlock)):
            name = macro.name if isinstance(macro, nodes.Macro) else "caller"
            self._texts[name] = max(self._texts.get(name, 0), _text_size(macro))
        tree = _Charges().visit(tree)
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return OPERATORS[operator](meter_of(context), left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        meter = meter_of(__context)
        kind = type(__obj)
        meter.charge(NODE)
        if kind is BuiltinMethodType and __self.is_safe_callable(__obj):
            return call_method(meter, __obj, args, kwargs)
        if kind is Macro:
            meter.charge(__self._texts.get(__obj.name, __self._texts[""]))
        elif kind is LoopContext and len(args) == 1:
            args = (loop(__context, args[0], __self._texts[""]),)
        elif __obj is Namespace:
            for value in (*args, *kwargs.values()):
                assigned(__context, value)
        elif kind is BlockReference:
            meter.charge(__self._texts[""])
        elif not (callable(__obj) and _hashable(__obj) and __obj in __self._known):
            if isinstance(__obj, jinja2.Undefined) or not callable(__obj):
                return super().call(__context, __obj, *args, **kwargs)  # an error
            raise BeyondMeterError
        return super().call(__context, __obj, *args, **kwargs)


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


# ---- parts of a template


def _check_depths(tree: nodes.Template) -> None:
    waiting: list[tuple[nodes.Node, int]] = [(tree, 1)]
    left = MOST_DEPTHS
    while waiting:
        node, depth = waiting.pop()
        left -= depth
        if left < 0:
            raise BeyondMeterError
        waiting += [(child, depth + 1) for child in node.iter_child_nodes()]


def _text_size(node: nodes.Node) -> int:
    """Count the characters of plain text in a part of a template."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


class _Charges(NodeTransformer):
    """Wraps the parts of a template that create or repeat values into filters that charge for them."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _wrapped("#loop", cast(nodes.Expr, node.iter), nodes.Const(NODE + _text_size(node)))
            case nodes.Output():
                node.nodes = [n if isinstance(n, _FIXED) else _wrapped("#output", n) for n in node.nodes]
            case nodes.Assign(target=nodes.NSRef()):
                node.node = _wrapped("#assigned", cast(nodes.Expr, node.node))
            case nodes.Concat():
                return _wrapped("#concat", *node.nodes)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
                return _wrapped("#made", node)
            case nodes.Compare() if not _is_quick(node):
                return _wrapped("#read", node)
            case nodes.Test() if node.name not in _QUICK_TESTS:
                return _wrapped("#read", node)
        return node


def _is_quick(node: nodes.Compare) -> bool:
    """Whether it is a comparison with a constant, which takes little time since the constant is short."""
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    is_constant = any(isinstance(operand, nodes.Const) for operand in operands)
    return is_constant and len(operands) == 2 and node.ops[0].op not in ("in", "notin")


_FIXED = (nodes.TemplateData, nodes.Const)
_QUICK_TESTS = frozenset(
    """defined undefined none boolean true false integer float number string mapping iterable sequence callable odd
    even""".split()
)


def _wrapped(name: str, node: nodes.Expr, *arguments: nodes.Expr) -> nodes.Filter:
    wrapped = nodes.Filter(node, name, list(arguments), [], None, None)
    wrapped.set_lineno(node.lineno)
    return wrapped
