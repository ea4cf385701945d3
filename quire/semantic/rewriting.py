"""Applies a rule's action to the body of a request."""

from typing import Any

from quire.semantic.prompt import Api
from quire.semantic.rules import Action, Sampling

_OLLAMA_OPTIONS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


def rewritten(api: Api, body: dict[str, Any], action: Action, model: str | None) -> dict[str, Any]:
    """Return the body with the action's model, reasoning, system prompt, sampling parameters and salt."""
    new = dict(body)
    if model is not None:
        new["model"] = model
    if action.reasoning is not None or action.reasoning_effort is not None:
        _set_reasoning(api, new, action)
    if action.system_prompt is not None:
        _add_system_prompt(api, new, action.system_prompt)
    _fill_sampling(api, new, action.sampling)
    if action.cache_salt is not None and not new.get("cache_salt"):
        new["cache_salt"] = action.cache_salt
    return new


def _set_reasoning(api: Api, body: dict[str, Any], action: Action) -> None:
    """Each API has its own switch. Completions have none, since their prompts are not rendered."""
    effort = action.reasoning_effort
    thinks = action.reasoning if effort is None else effort != "none"
    if api == "chat":
        given = body.get("chat_template_kwargs")
        body["chat_template_kwargs"] = {**(given if isinstance(given, dict) else {}), "enable_thinking": thinks}
        if effort is not None:
            body["reasoning_effort"] = effort
    elif api == "responses":
        given = body.get("reasoning")
        chosen = effort or ("medium" if thinks else "none")
        body["reasoning"] = {**(given if isinstance(given, dict) else {}), "effort": chosen}
    elif api == "messages":
        given = body.get("thinking")
        if not thinks:
            body["thinking"] = {"type": "disabled"}
        elif not (isinstance(given, dict) and given.get("type") not in (None, "disabled")):
            body["thinking"] = {"type": "adaptive"}
    elif api in ("ollama_chat", "ollama_generate"):
        body["think"] = effort if thinks and effort in ("low", "medium", "high") else thinks


def _add_system_prompt(api: Api, body: dict[str, Any], text: str) -> None:
    if api in ("responses", "messages", "ollama_generate"):
        name = "instructions" if api == "responses" else "system"
        given = body.get(name)
        if isinstance(given, list):
            body[name] = [{"type": "text", "text": text}, *given]
        else:
            body[name] = f"{text}\n\n{given}" if given else text
        return
    if api == "completions":
        return
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system" and isinstance(first.get("content"), str):
        body["messages"] = [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    else:
        body["messages"] = [{"role": "system", "content": text}, *messages]


def _fill_sampling(api: Api, body: dict[str, Any], sampling: Sampling) -> None:
    values = {name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None}
    if not values:
        return
    if api in ("ollama_chat", "ollama_generate"):
        given = body.get("options")
        named = {_OLLAMA_OPTIONS.get(name, name): value for name, value in values.items()}
        body["options"] = {**named, **(given if isinstance(given, dict) else {})}
        return
    if "max_tokens" in values:
        limit = values.pop("max_tokens")
        name = "max_output_tokens" if api == "responses" else "max_tokens"
        if body.get(name) is None and body.get("max_completion_tokens") is None:
            body[name] = limit
    for name, value in values.items():
        if body.get(name) is None:
            body[name] = value
