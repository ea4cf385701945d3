"""Structural tags: free text in which tags may occur, whose contents are constrained. vLLM's two formats, as Lark."""

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from quire.messages.errors import error_text

_TEXT = r"/(.|\n)*/"
_MAX_RULES = 1_000


def structural_tag(text: str, schema: Callable[[Any], dict[str, Any]]) -> str:
    """A structural tag, given as JSON text, in llguidance's language. Raises ValueError.

    schema: rewrites a JSON schema for llguidance.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag is not valid JSON: {error_text(error)}") from error
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise ValueError("structural_tag must be a JSON object whose type is 'structural_tag'")
    if "structures" in tag:  # the older format
        tags = [{**t, "content": {"type": "json_schema", "json_schema": t["schema"]}} for t in tag["structures"]]
        tag = {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
    grammar = _Lark(schema)
    try:
        start = grammar.expression(tag["format"])
    except (KeyError, TypeError, AttributeError) as error:
        message = f"structural_tag has a field that is missing or of the wrong type: {error_text(error)}"
        raise ValueError(message) from error
    lark = "\n".join([f"start: {start}", *grammar.rules])
    if not grammar.parts:
        return LLMatcher.grammar_from_lark(lark)
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *grammar.parts]})


def as_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, from one in Lark's or in llama.cpp's (GBNF). Raises ValueError."""
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises Exception itself
        raise ValueError(f"the grammar cannot be read: {error_text(error)}") from error


class _Lark:
    """Translates formats to expressions. rules: the rules that they use; parts: grammars beside this one."""

    def __init__(self, schema: Callable[[Any], dict[str, Any]]) -> None:
        self.rules: list[str] = []
        self.parts: list[dict[str, str]] = []
        self._schema = schema

    def expression(self, item: dict[str, Any]) -> str:
        kind = item["type"]
        if item.get("excludes"):
            raise ValueError("structural_tag: excludes is not supported")
        if kind == "const_string":
            return json.dumps(item["value"])
        if kind == "json_schema":
            return self._rule(f"%json {json.dumps(self._schema(item['json_schema']))}")
        if kind == "regex":
            return self._rule(f"/{regex_to_lark(item['pattern'], '')}/")
        if kind == "grammar":
            self.parts.append({"name": f"part{len(self.parts)}", "lark_grammar": as_lark(item["grammar"])})
            return f"@{self.parts[-1]['name']}"
        if kind == "any_text":
            return self._rule(_TEXT)
        if kind in ("sequence", "or"):
            separator = " " if kind == "sequence" else " | "
            return self._rule(separator.join(map(self.expression, item["elements"])))
        if kind in ("optional", "star", "plus"):
            return self._rule(
                f"({self.expression(item['content'])}){ {'optional': '?', 'star': '*', 'plus': '+'}[kind] }"
            )
        if kind == "tag":
            return self._rule(f"{json.dumps(item['begin'])} {self._content(item)}")
        if kind == "triggered_tags":
            return self._triggered(item)
        if kind == "tags_with_separator":
            return self._separated(item)
        raise ValueError(f"structural_tag: the type {kind!r} is not supported")

    def _content(self, tag: dict[str, Any]) -> str:
        """What follows the beginning of a tag."""
        if not isinstance(tag["end"], str):
            raise ValueError("structural_tag: end must be a string")
        end = json.dumps(tag["end"])
        if tag["content"]["type"] == "any_text":  # up to the first end
            return self._rule(f"{_TEXT} {end}", "[lazy]")
        return f"{self.expression(tag['content'])} {end}"

    def _triggered(self, item: dict[str, Any]) -> str:
        choices = []
        for trigger in item["triggers"]:
            tags = [tag for tag in item["tags"] if tag["begin"].startswith(trigger)]
            if not trigger or not tags:
                raise ValueError(f"structural_tag: no tag begins with the trigger {trigger!r}")
            rest = [f"{json.dumps(tag['begin'][len(trigger) :])} {self._content(tag)}" for tag in tags]
            opening = self._rule(f"{_TEXT} {json.dumps(trigger)}", "[lazy]")
            choices.append(f"{opening} ({' | '.join(rest)})")
        if not all(any(tag["begin"].startswith(trigger) for trigger in item["triggers"]) for tag in item["tags"]):
            raise ValueError("structural_tag: each tag must begin with one of the triggers")
        segment, text = self._rule(" | ".join(choices)), self._rule(_TEXT)
        if item.get("stop_after_first"):
            return segment if item.get("at_least_one") else self._rule(f"{segment} | {text}")
        return self._rule(f"{segment}{'+' if item.get('at_least_one') else '*'} {text}")

    def _separated(self, item: dict[str, Any]) -> str:
        tag = self._rule(" | ".join(self.expression({"type": "tag", **tag}) for tag in item["tags"]))
        more = "" if item.get("stop_after_first") else f" ({json.dumps(item['separator'])} {tag})*"
        return self._rule(f"{tag}{more}" if item.get("at_least_one") else f"({tag}{more})?")

    def _rule(self, expression: str, attributes: str = "") -> str:
        if len(self.rules) == _MAX_RULES:
            raise ValueError("structural_tag: there are too many tags")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name
