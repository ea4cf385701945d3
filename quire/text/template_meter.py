"""Bounds for the chat templates of checkpoints: how much a rendering may create, and how long it may run.

A template is untrusted code. Here every operation that creates a value is charged for the value's size, in advance if
it could be large, and every loop and call checks the time. A rendering that exceeds its allowance, or that needs an
operation of unknown cost, raises BeyondMeterError. It then runs in a worker process instead (see chat_template.py),
where the system can stop it. So the allowance is small, and covers only the operations of real templates.

The bounds rest on three rules. An existing value has been charged, so any operation that only reads values ends soon. A
container is charged for all of its items, once per occurrence, since printing or comparing it takes that long. And the
number of operations between two charges is bounded, since only loops and calls repeat operations.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2.filters import do_mark_safe
from jinja2.runtime import Context
from jinja2.utils import Namespace, pass_context

ROOM = 16_000_000  # characters that a rendering may create
SECONDS = 0.1  # of processor time
NODE = 16  # cost of a container's item in addition to its own size
_CHECKS = 64  # charges between two checks of the time
_LONG = 50_000  # a charge after which the time is checked
_SHORT = 1_000  # maximum characters of a string to search for
_BITS = 4_096  # of an integer
_MARKUP: type = type(do_mark_safe(""))
METER = "#meter"  # its name in a context, which templates cannot use


class BeyondMeterError(Exception):
    """The rendering must be done in a process that can be stopped."""


class Meter:
    """The remaining allowance of a rendering."""

    def __init__(self, room: int = ROOM, seconds: float = SECONDS) -> None:
        self._room, self._checks, self._end = room, _CHECKS, time.thread_time() + seconds

    def charge(self, units: int) -> None:
        self._room -= units
        self._checks -= 1
        if self._room < 0:
            raise BeyondMeterError
        if self._checks < 0 or units > _LONG:
            self._checks = _CHECKS
            if time.thread_time() > self._end:
                raise BeyondMeterError

    def charge_value(self, value: Any) -> None:
        """Charge a value with all of its content."""
        if type(value) is str:
            self.charge(len(value))
        elif type(value) not in _PLAIN:
            self._charge_parts(value)

    def _charge_parts(self, value: Any) -> None:
        waiting = [value]
        left = self._room
        while waiting:
            value = waiting.pop()
            kind = type(value)
            left -= NODE
            if kind is str or kind is _MARKUP:
                left -= len(value)
            elif kind is dict:
                waiting += value.keys()
                waiting += value.values()
            elif kind is list or kind is tuple:
                waiting += value
            elif kind is not range and kind not in _PLAIN and not isinstance(value, jinja2.Undefined):
                raise BeyondMeterError  # an object whose text may contain others
            if left < NODE * len(waiting):
                raise BeyondMeterError
        self.charge(self._room - left)


_PLAIN = frozenset((int, float, bool, type(None)))


def meter_of(context: Context) -> Meter:
    meter: Meter = context.parent[METER]
    return meter


# ---- operators


def _add(meter: Meter, left: Any, right: Any) -> Any:
    kinds = type(left), type(right)
    if kinds == (str, str):
        meter.charge(len(left) + len(right))
    elif list in kinds or tuple in kinds:
        made = left + right
        meter.charge_value(made)
        return made
    elif not _are_numbers(left, right):
        _check_types(left, right)
    return left + right


def _multiply(meter: Meter, left: Any, right: Any) -> Any:
    if _are_numbers(left, right):
        _check_bits(left, right)
        return left * right
    text, count = (right, left) if isinstance(left, int) else (left, right)
    if type(text) in (str, list, tuple) and isinstance(count, int):
        meter.charge(len(text) * max(count, 0))
        made = left * right
        meter.charge_value(made)
        return made
    _check_types(left, right)
    return left * right


def _power(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _BITS:
        raise BeyondMeterError
    return left**right


def _modulo(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, str):  # a format may request any width
        raise BeyondMeterError
    return left % right


def _are_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float)


def _check_bits(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _BITS:
        raise BeyondMeterError


def _check_types(*values: Any) -> None:
    """Compute only operations on known types. Those on other types are errors, or have unknown costs."""
    known = (str, int, float, list, tuple, dict, type(None), jinja2.Undefined)
    if not all(isinstance(value, known) and type(value) is not _MARKUP for value in values):
        raise BeyondMeterError


OPERATORS: dict[str, Callable[[Meter, Any, Any], Any]] = {"+": _add, "*": _multiply, "**": _power, "%": _modulo}

# ---- calls

# Methods that take linear time, and whose result is at most a bounded multiple of the text.
_TEXT_METHODS = frozenset(
    """strip lstrip rstrip split rsplit splitlines startswith endswith lower upper title capitalize casefold swapcase
    find rfind index rindex count partition rpartition removeprefix removesuffix isdigit isalpha isalnum isspace isupper
    islower isnumeric isdecimal isidentifier istitle isascii""".split()
)
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    list: frozenset(("index", "count")),
    tuple: frozenset(("index", "count")),
    dict: frozenset(("get", "items", "keys", "values")),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
}


def _replace(meter: Meter, text: Any, old: Any, new: Any, count: Any = -1) -> str:
    if type(text) is not str or type(old) is not str or type(new) is not str or type(count) is not int:
        raise BeyondMeterError
    if len(old) > _SHORT:
        raise BeyondMeterError
    found = len(text) + 1 if not old else text.count(old)
    meter.charge(len(text) + found * len(new))
    return text.replace(old, new, count)


def _join(meter: Meter, separator: Any, items: Iterable[Any]) -> str:
    if type(separator) is not str:
        raise BeyondMeterError
    texts = _all(meter, items)
    meter.charge(len(separator) * len(texts))
    meter.charge_value(texts)
    return separator.join(texts)


def _all(meter: Meter, items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    if isinstance(items, Sized):
        meter.charge(NODE * len(items))
        return list(items)
    for item in items:
        meter.charge(NODE)
        found.append(item)
    return found


def call_method(meter: Meter, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner = method.__self__
    name = method.__name__
    if type(owner) is str and not kwargs and name in ("replace", "join"):
        return (_replace if name == "replace" else _join)(meter, owner, *args)
    if name not in _METHODS.get(type(owner), ()) or any(isinstance(a, str) and len(a) > _SHORT for a in args):
        raise BeyondMeterError
    result = method(*args, **kwargs)
    if type(result) in (str, list, tuple) and type(owner) is str:
        meter.charge_value(result)
    return result


# ---- parts of a template


@pass_context
def loop(context: Context, items: Any, text: int) -> Any:
    meter = meter_of(context)
    if isinstance(items, Sized):
        meter.charge(text * len(items))
        return items
    return _counted(meter, items, text) if isinstance(items, Iterator) else items


def _counted(meter: Meter, items: Iterator[Any], units: int) -> Iterator[Any]:
    for item in items:
        meter.charge(units)
        yield item


@pass_context
def _concat(context: Context, *values: Any) -> str:
    meter = meter_of(context)
    texts = [value if type(value) is str else _text(meter, value) for value in values]
    meter.charge(sum(map(len, texts)))
    return "".join(texts)


def _text(meter: Meter, value: Any) -> str:
    meter.charge_value(value)
    return str(value)


@pass_context
def _made(context: Context, value: Any) -> Any:
    meter_of(context).charge_value(value)
    return value


@pass_context
def _output(context: Context, value: Any) -> str:
    meter = meter_of(context)
    text = value if type(value) is str else _text(meter, value)
    meter.charge(NODE + len(text))
    return text


@pass_context
def assigned(context: Context, value: Any) -> Any:
    """A namespace within a namespace could contain itself many times over."""
    if isinstance(value, Namespace):
        raise BeyondMeterError
    return value


@pass_context
def _read(context: Context, value: Any) -> Any:
    meter_of(context).charge(1)
    return value


PARTS: dict[str, Callable[..., Any]] = {
    "#loop": loop,
    "#concat": _concat,
    "#made": _made,
    "#output": _output,
    "#assigned": assigned,
    "#read": _read,
}

# ---- filters


def _check_indent(meter: Meter, value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    size = len(width) if isinstance(width, str) else width
    if not isinstance(value, str) or not isinstance(size, int) or size > _SHORT:
        raise BeyondMeterError
    meter.charge(len(value) + (1 + value.count("\n")) * max(size, 0))


def _check_json(meter: Meter, value: Any, **options: Any) -> None:
    indent = options.get("indent")
    width = len(indent) if isinstance(indent, str) else indent or 0
    if not isinstance(width, int) or width > 16 or any(len(str(s)) > 16 for s in options.get("separators") or ()):
        raise BeyondMeterError
    meter.charge_value(value)


def _check_round(meter: Meter, value: Any, precision: Any = 0, method: str = "common") -> None:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise BeyondMeterError


def _check_strip(meter: Meter, value: Any, chars: Any = None) -> None:
    if type(value) is not str and not isinstance(value, jinja2.Undefined):
        meter.charge_value(value)
    if isinstance(chars, str) and len(chars) > _SHORT:
        raise BeyondMeterError


def _check_value(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """Charge for converting a value to text, comparing or copying it."""
    if not isinstance(value, Iterator):
        meter.charge_value(value)


def _check_nothing(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    meter.charge(NODE)


# Charges before a filter runs. Its result is charged afterwards.
FILTERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(
        """length count first last default d int float abs map select reject selectattr rejectattr items attr safe
        """.split(),
        _check_nothing,
    ),
    **dict.fromkeys(
        """upper lower capitalize title string list dictsort sort unique reverse min max e escape forceescape
        """.split(),
        _check_value,
    ),
    "trim": _check_strip,
    "indent": _check_indent,
    "tojson": _check_json,
    "round": _check_round,
    "replace": _check_nothing,
    "join": _check_nothing,
}


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the filter with charges. All filters take the context, so none is evaluated when a template is compiled."""
    check = FILTERS[name]
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        check(meter, value, *args, **kwargs)
        if name == "replace":
            if type(value) is str and not kwargs and len(args) == 2:
                return _replace(meter, value, *args)
            raise BeyondMeterError
        if name == "join" and not isinstance(value, str):
            value = _all(meter, value)
            separator = args[0] if args else kwargs.get("d", "")
            meter.charge(len(value) * len(separator) if isinstance(separator, str) else ROOM)
            meter.charge_value(value)
        elif isinstance(value, Iterator) and name not in ("default", "d"):
            value = _counted(meter, value, NODE)
        if passes:
            holder = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
            args = (value, *args)
            value = holder[passes]
        result = function(value, *args, **kwargs)
        if isinstance(result, Iterator):
            return _counted(meter, result, NODE)
        if isinstance(result, int) and result.bit_length() > _BITS:
            raise BeyondMeterError
        if name not in _GIVES_A_PART:
            meter.charge_value(result)
        return result

    return pass_context(metered)


_GIVES_A_PART = frozenset(("first", "last", "default", "d", "attr", "min", "max"))  # return a part of an existing value
