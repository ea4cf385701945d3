"""Structural tags: free text with tags whose contents are constrained. Translates vLLM's two formats to Lark."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from quire.messages.errors import error_text

_TEXT = r"/(.|\n)*/"
_MAX_RULES = 4_000


def structural_tag(
    text: str, schema: Callable[[Any], dict[str, Any]], special_tokens: Mapping[str, int]
) -> tuple[str, bool]:
    """Translate a structural tag from JSON text to llguidance's language. Also returns whether it may be ambiguous.
    schema: rewrites a JSON schema for llguidance. special_tokens: ids by spelling; in a tag, the spelling means the
    token. Raises ValueError.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag is not valid JSON: {error_text(error)}") from error
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise ValueError("structural_tag must be a JSON object whose type is 'structural_tag'")
    if "structures" in tag:  # the older format
        tag = _newer(tag)
    grammar = _Lark(schema, special_tokens)
    try:
        start = grammar.expression(_object(tag, "format", ""))
    except RecursionError as error:
        raise ValueError("structural_tag is nested too deeply") from error
    lark = "\n".join([f"start: {start}", *grammar.rules])
    if not grammar.parts:
        return LLMatcher.grammar_from_lark(lark), grammar.is_free
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *grammar.parts]}), True


def _newer(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert a tag from the older format to the newer one."""
    tags = [
        {**item, "content": {"type": "json_schema", "json_schema": _field(item, "schema", f"structures[{index}]")}}
        for index, item in enumerate(_objects(tag, "structures", ""))
    ]
    return {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}


def as_lark(grammar: str) -> str:
    """Convert a grammar from Lark's or llama.cpp's syntax (GBNF) to Lark's. Raises ValueError."""
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises plain Exceptions
        raise ValueError(f"the grammar cannot be read: {error_text(error)}") from error


class _Lark:
    """Translates formats to expressions.

    rules: the rules used by the expressions. parts: additional grammars. is_free: whether a format can be part of an
    ambiguous grammar.
    """

    def __init__(self, schema: Callable[[Any], dict[str, Any]], special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.parts: list[dict[str, str]] = []
        self.is_free = False
        self._schema = schema
        self._special_tokens = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._specials = re.compile("(" + ("|".join(map(re.escape, names)) or "(?!)") + ")")

    def expression(self, item: dict[str, Any], path: str = "format") -> str:
        kind = _text(item, "type", path)
        if item.get("excludes"):
            raise ValueError(f"structural_tag: {path}.excludes is not supported")
        if kind not in _EXPRESSIONS:
            raise ValueError(f"structural_tag: {path}.type {kind!r:.80} is not supported")
        return _EXPRESSIONS[kind](self, item, path)

    # ---- expressions by type

    def _const_string(self, item: dict[str, Any], path: str) -> str:
        return self._literal(_text(item, "value", path))

    def _json_schema(self, item: dict[str, Any], path: str) -> str:
        return self._rule(f"%json {json.dumps(self._schema(_schema(item, path)))}")

    def _regex(self, item: dict[str, Any], path: str) -> str:
        return self._rule(f"/{regex_to_lark(_text(item, 'pattern', path), '')}/")

    def _grammar(self, item: dict[str, Any], path: str) -> str:
        grammar = as_lark(_text(item, "grammar", path))
        self.parts.append({"name": f"part{len(self.parts)}", "lark_grammar": grammar})
        return f"@{self.parts[-1]['name']}"

    def _any_text(self, item: dict[str, Any], path: str) -> str:
        return self._rule(_TEXT)

    def _joined(self, item: dict[str, Any], path: str, separator: str) -> str:
        self.is_free = True
        elements = enumerate(_objects(item, "elements", path))
        return self._rule(separator.join(self.expression(e, f"{path}.elements[{i}]") for i, e in elements))

    def _repeated(self, item: dict[str, Any], path: str, sign: str) -> str:
        self.is_free = True
        content = self.expression(_object(item, "content", path), f"{path}.content")
        return self._rule(f"({content}){sign}")

    def _tag(self, tag: dict[str, Any], path: str) -> str:
        return self._rule(f"{self._literal(_text(tag, 'begin', path))} {self._content(tag, path)}")

    def _literal(self, text: str) -> str:
        """Return an expression for exactly this text."""
        pieces = [piece for piece in self._specials.split(text) if piece]
        ids = self._special_tokens
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece) for piece in pieces) or '""'

    def _text_until(self, end: str) -> str:
        """Return a rule for any text up to the first `end`. The text contains no special tokens."""
        return self._rule(f"{_TEXT} {self._literal(end)}", "" if self._specials.match(end) else "[lazy]")

    def _content(self, tag: dict[str, Any], path: str) -> str:
        """Return an expression for the text after the beginning of a tag."""
        end = _text(tag, "end", path)
        content = _object(tag, "content", path)
        if content.get("type") == "any_text":  # up to the first end
            return self._text_until(end)
        return f"{self.expression(content, f'{path}.content')} {self._literal(end)}"

    def _triggered(self, item: dict[str, Any], path: str) -> str:
        choices = []
        tags = [(f"{path}.tags[{i}]", tag) for i, tag in enumerate(_objects(item, "tags", path))]
        begins = [_text(tag, "begin", place) for place, tag in tags]
        triggers = _list(item, "triggers", path)
        for trigger in triggers:
            if not isinstance(trigger, str):
                raise ValueError(f"structural_tag: {path}.triggers must be strings, got {trigger!r:.80}")
            found = [tag for tag, begin in zip(tags, begins, strict=True) if begin.startswith(trigger)]
            if not trigger or not found:
                raise ValueError(f"structural_tag: no tag begins with the trigger {trigger!r:.80}")
            rests = [self._literal(tag["begin"][len(trigger) :]) for _, tag in found]
            rest = [f"{text} {self._content(tag, place)}" for text, (place, tag) in zip(rests, found, strict=True)]
            opening = self._text_until(trigger)
            choices.append(f"{opening} ({' | '.join(rest)})")
        if not choices or not all(begin.startswith(tuple(triggers)) for begin in begins):
            raise ValueError("structural_tag: each tag must begin with one of the triggers")
        segment = self._rule(" | ".join(choices))
        text = self._rule(_TEXT)
        if item.get("stop_after_first"):
            return segment if item.get("at_least_one") else self._rule(f"{segment} | {text}")
        return self._rule(f"{segment}{'+' if item.get('at_least_one') else '*'} {text}")

    def _separated(self, item: dict[str, Any], path: str) -> str:
        tags = enumerate(_objects(item, "tags", path))
        tag = self._rule(" | ".join(self._tag(tag, f"{path}.tags[{i}]") for i, tag in tags))
        separator = self._literal(_text(item, "separator", path)) if not item.get("stop_after_first") else ""
        more = f" ({separator} {tag})*" if separator else ""
        return self._rule(f"{tag}{more}" if item.get("at_least_one") else f"({tag}{more})?")

    def _rule(self, expression: str, attributes: str = "") -> str:
        if len(self.rules) == _MAX_RULES:
            raise ValueError("structural_tag: there are too many tags")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name


_EXPRESSIONS: dict[str, Callable[[_Lark, dict[str, Any], str], str]] = {  # by type
    "const_string": _Lark._const_string,
    "json_schema": _Lark._json_schema,
    "regex": _Lark._regex,
    "grammar": _Lark._grammar,
    "any_text": _Lark._any_text,
    "sequence": partial(_Lark._joined, separator=" "),
    "or": partial(_Lark._joined, separator=" | "),
    "optional": partial(_Lark._repeated, sign="?"),
    "star": partial(_Lark._repeated, sign="*"),
    "plus": partial(_Lark._repeated, sign="+"),
    "tag": _Lark._tag,
    "triggered_tags": _Lark._triggered,
    "tags_with_separator": _Lark._separated,
}


# ---- fields, whose errors name them


def _field(item: dict[str, Any], name: str, path: str) -> Any:
    if name not in item:
        raise ValueError(f"structural_tag: {path or 'the tag'} has no field {name!r}")
    return item[name]


def _typed(item: dict[str, Any], name: str, path: str, kind: type, words: str) -> Any:
    value = _field(item, name, path)
    if not isinstance(value, kind):
        where = f"{path}.{name}" if path else name
        raise ValueError(f"structural_tag: {where} must be {words}, got {json.dumps(value):.80}")
    return value


def _text(item: dict[str, Any], name: str, path: str) -> str:
    return str(_typed(item, name, path, str, "a string"))


def _object(item: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = _typed(item, name, path, dict, "an object")
    return found


def _list(item: dict[str, Any], name: str, path: str) -> list[Any]:
    found: list[Any] = _typed(item, name, path, list, "a list")
    return found


def _objects(item: dict[str, Any], name: str, path: str) -> list[dict[str, Any]]:
    found = _list(item, name, path)
    for index, value in enumerate(found):
        if not isinstance(value, dict):
            where = f"{path}.{name}" if path else name
            raise ValueError(f"structural_tag: {where}[{index}] must be an object, got {json.dumps(value):.80}")
    return found


def _schema(item: dict[str, Any], path: str) -> Any:
    value = _field(item, "json_schema", path)
    if not isinstance(value, dict | bool):
        raise ValueError(f"structural_tag: {path}.json_schema must be a JSON schema, got {json.dumps(value):.80}")
    return value
