"""Renders chat messages to a prompt with a checkpoint's Jinja template, in the dialect of transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.messages.errors import error_text
from quire.platform.untrusted.limits import MIB, LimitExceededError, Limits
from quire.platform.untrusted.pool import shared_pool
from quire.text import metered_template
from quire.text.template_meter import BeyondMeterError

_JOB = "quire.text.chat_template:render_job"
# Limits of a rendering in a worker process.
_LIMITS = Limits(cpu_seconds=2.0, memory_bytes=512 * MIB, total_seconds=10.0, result_bytes=64 * MIB)
_FAILED = "the chat template failed: "
_LONGEST_FORMAT, _LONGEST_ERROR = 200, 10_000  # characters
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_NOTHING_TO_CONTINUE = "continue_final_message is set, but the last message has no text to go on with"
# The types of content parts that are text, and for each the field that holds the text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# Reserved names of template variables: the arguments with which chats are rendered.
RESERVED = frozenset(
    """messages template chat_template tools documents add_generation_prompt continue_final_message content_format
    tokenize""".split()
)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class ChatTemplateError(ValueError):
    """The template refused the messages, or is itself invalid. The message contains the reason."""


def render(template: str, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Return the prompt for a chat. Raises ChatTemplateError. The arguments are those of `render_here`."""
    return ChatRendering(template, messages, arguments).run()


class ChatRendering(NamedTuple):
    """A chat to be rendered. Usual templates take microseconds, and are rendered here. Slower ones, and templates from
    requests, run in a worker process.

    arguments: those of `render_here`.
    """

    template: str
    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]

    def here(self) -> str | None:
        """Return the prompt; None if it takes more than a moment. Raises ChatTemplateError."""
        return render_here(self.template, self.messages, **self.arguments)

    def run(self) -> str:
        """Return the prompt. Waits for a worker process, if one is needed. Raises ChatTemplateError or BusyError."""
        prompt = self.here()
        if prompt is None:
            with _explained():
                prompt = _unwrapped(shared_pool().run(_JOB, *self._job, limits=_LIMITS))
        return prompt

    async def run_apart(self) -> str:
        """Like `run`, but always in a worker process."""
        with _explained():
            return _unwrapped(await shared_pool().run_async(_JOB, *self._job, limits=_LIMITS))

    @property
    def _job(self) -> tuple[Any, ...]:
        messages = [dict(m) if isinstance(m, Mapping) else m for m in self.messages]
        return self.template, messages, dict(self.arguments)


def render_here(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    content_format: str = "auto",
    is_bounded: bool = True,
    **variables: Any,
) -> str | None:
    """Return the prompt for a chat; None if the rendering would take too long here. Raises ChatTemplateError.

    continue_final_message: the prompt ends within the last message, and the model continues that message.
    content_format: the form of a message's content for the template: "string", a list of parts ("openai"), or the form
        that the template expects ("auto").
    is_bounded: False in a process that can be stopped, where no bounds apply.
    variables: variables of the template: special tokens (bos_token="<s>") and switches (enable_thinking=False).
    """
    if not messages:
        raise ChatTemplateError("messages is empty: a chat has at least one message")
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "add_generation_prompt and continue_final_message exclude each other: one begins a new "
            "message, the other goes on with the last"
        )
    compiled = _compile(template) if is_bounded else _compile_unbounded(template)
    if compiled is None:
        return None
    if content_format != "auto":
        as_string = content_format == "string"
        compiled = compiled._replace(takes_strings=as_string, takes_lists=not as_string)
    chat = [_prepare(message, f"messages[{i}]", compiled) for i, message in enumerate(_objects(messages, "messages"))]
    if continue_final_message and messages[-1].get("content") is None:
        raise ChatTemplateError(_NOTHING_TO_CONTINUE)
    final = _tag(chat[-1]) if continue_final_message else ""
    values = {"messages": chat, "tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
    values = {**variables, **values}
    try:
        prompt = metered_template.render(compiled.template, values) if is_bounded else compiled.template.render(values)
    except BeyondMeterError:
        return None
    except Exception as error:  # the template is untrusted code, and may raise anything: None + "", 1 / 0, ...
        raise ChatTemplateError(f"{_FAILED}{error or type(error).__name__}") from error
    return _cut_at_tag(prompt, final) if continue_final_message else prompt


def render_job(template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> tuple[str | None, str]:
    """Called in a worker process. Return the prompt and "", or None and the template's error. Raises
    ChatTemplateError."""
    try:
        prompt = render_here(template, messages, **{**arguments, "is_bounded": False})
    except ChatTemplateError as error:
        if error.__cause__ is None or not error_text(error).startswith(_FAILED):
            raise
        return None, error_text(error).removeprefix(_FAILED)[:_LONGEST_ERROR]
    return prompt, ""


class _RaisedByTemplateError(Exception):
    """Replaces an exception in a worker process, with its text."""


def _unwrapped(result: tuple[str | None, str]) -> str:
    prompt, error = result
    if prompt is None:
        raise ChatTemplateError(f"{_FAILED}{error}") from _RaisedByTemplateError(error)
    return prompt


@contextmanager
def _explained() -> Iterator[None]:
    """Convert a job's errors to ChatTemplateError, except BusyError and WorkerError."""
    try:
        yield
    except ChatTemplateError:
        raise
    except LimitExceededError as error:
        raise ChatTemplateError(f"the chat template takes too much: {error_text(error)}") from None
    except (TypeError, OverflowError) as error:  # an argument cannot be sent, such as an integer of 65 bits
        raise ChatTemplateError(f"the chat template cannot be rendered: {error_text(error)}") from error
    except ValueError as error:
        raise ChatTemplateError(error_text(error)) from error


class _Compiled(NamedTuple):
    """A template, and the forms of message content that it accepts."""

    template: jinja2.Template
    takes_strings: bool
    takes_lists: bool


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment(kind: type[ImmutableSandboxedEnvironment], *known: Any) -> Any:
    environment = kind(*known, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@lru_cache(maxsize=64)
def _compile(template: str) -> _Compiled | None:
    """Compile a template with bounded rendering. Returns None if its cost is unknown."""
    environment = _environment(metered_template.MeteredEnvironment, (_raise_exception, _strftime_now))
    environment.replace_filter("tojson", _tojson)
    try:
        metered = environment.metered(template)
        return _Compiled(metered, *_content_forms(environment.parse(template)))
    except BeyondMeterError:
        return None
    except Exception as error:  # Python's compiler has its own limits
        raise ChatTemplateError(f"the chat template is not valid: {error_text(error)}") from error


@lru_cache(maxsize=4)
def _compile_unbounded(template: str) -> _Compiled:
    environment = _environment(ImmutableSandboxedEnvironment)
    environment.filters["tojson"] = _tojson
    try:
        takes_strings, takes_lists = _content_forms(environment.parse(template))
        return _Compiled(environment.from_string(template), takes_strings, takes_lists)
    except Exception as error:
        raise ChatTemplateError(f"the chat template is not valid: {error_text(error)}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML: no model was trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _LONGEST_FORMAT:
        raise ValueError(f"the format of a date has more than {_LONGEST_FORMAT} characters")
    return datetime.now().strftime(format)


def _content_forms(tree: nodes.Template) -> tuple[bool, bool]:
    """(accepts strings, accepts lists). A template that accepts lists of parts loops over a message's content, directly
    or through a variable. A template that accepts both forms tests the type of the content."""
    names = {"content"}  # the usual name for a macro's parameter, too

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            node = node.node
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return node.attr == "content" if isinstance(node, nodes.Getattr) else _name(node) in names

    for assignment in tree.find_all(nodes.Assign):
        if (name := _name(assignment.target)) and is_content(assignment.node):
            names.add(name)
    takes_lists = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests_type = any(
        test.name in ("string", "iterable", "sequence") and is_content(test.node) for test in tree.find_all(nodes.Test)
    )
    return tests_type or not takes_lists, takes_lists


def _name(node: nodes.Node | None) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _prepare(message: dict[str, Any], where: str, compiled: _Compiled) -> dict[str, Any]:
    """Return a copy of the message in the form that templates expect: without nulls, with content in a form that this
    template accepts, tool call arguments as objects, and the reasoning under each name that templates use."""
    prepared = {key: value for key, value in message.items() if value is not None}
    for field in _REASONING_FIELDS:
        if field in prepared:
            prepared = {"thinking": prepared[field], **prepared, "reasoning_content": prepared[field]}
            break
    prepared["content"] = _prepare_content(message, f"{where}.content", compiled)
    if calls := prepared.pop("tool_calls", None):
        calls = _objects(calls, f"{where}.tool_calls")
        prepared["tool_calls"] = [_parse_arguments(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return prepared


def _prepare_content(message: dict[str, Any], where: str, compiled: _Compiled) -> Any:
    """Return the content in a form that this template accepts. As in vLLM, missing content becomes empty content, and
    the text parts of a tool's message are joined, because most templates that accept lists expect a string there."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or "" if compiled.takes_strings else [_text_part(content or "")]
    if isinstance(content, list):
        content = [_text_part(part) if isinstance(part, str) else part for part in content]
    parts = [_plain_part(part) for part in _objects(content, where)]
    is_tool_text = message.get("role") == "tool" and all(part.get("type") == "text" for part in parts)
    as_list = compiled.takes_lists and not (is_tool_text and compiled.takes_strings)
    return parts if as_list else _join(parts, where)


def _objects(values: Any, where: str) -> list[dict[str, Any]]:
    """Return a copy of a list of JSON objects. Raises ChatTemplateError for any other value."""
    if not isinstance(values, list | tuple):
        raise ChatTemplateError(f"{where} is of type {type(values).__name__}: expected a list of objects")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(f"{where}[{index}] is of type {type(value).__name__}: expected an object")
    return [dict(value) for value in values]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _plain_part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a text part of any type to the type "text", which templates support."""
    kind = part.get("type")
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if kind == "text" or field is None or not isinstance(part.get(field), str):
        return part
    return {**{name: value for name, value in part.items() if name != field}, **_text_part(part[field])}


def _join(parts: list[dict[str, Any]], where: str) -> str:
    for index, part in enumerate(parts):
        if not isinstance(part.get("text", part.get("placeholder")), str):
            message = f"{where}[{index}] is of type {part.get('type')}: the model's chat template takes text only"
            raise ChatTemplateError(message)
    return "\n".join(str(part.get("text", part.get("placeholder"))) for part in parts)


def _parse_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Parses a tool call's arguments. OpenAI's protocol has them as JSON text, but templates expect an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise ChatTemplateError(f"{where}.function.arguments is not JSON: {error_text(error)}") from error
    except RecursionError as error:
        raise ChatTemplateError(f"{where}.function.arguments is nested too deeply") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _tag(message: dict[str, Any]) -> str:
    """Appends the tag to the message's content, and returns the content without it."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content or []):
        if isinstance(text := part.get("text"), str):
            part["text"] = text + _CONTINUE_TAG
            return text
    raise ChatTemplateError(_NOTHING_TO_CONTINUE)


def _cut_at_tag(prompt: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in prompt or final.strip() not in prompt:
        message = "continue_final_message is set, but the chat template leaves out the last message's content"
        raise ChatTemplateError(message)
    cut = prompt.rindex(tag)
    prompt, rest = prompt[:cut], prompt[cut:]
    # The tag ends with a space. If the template has stripped that space, it also strips the content.
    return prompt if rest.startswith(_CONTINUE_TAG) else prompt.rstrip()
