"""Renders conversations into prompts, with the model's chat template or the request's own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.frontend import Frontend
from quire.messages.errors import error_text
from quire.platform.untrusted.limits import BusyError
from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, bad_value
from quire.server.media import ChatMedia
from quire.server.messages import Message, has_media, json_of
from quire.server.protocol import Rendering

if TYPE_CHECKING:
    from quire.text.chat_template import ChatRendering  # imports jinja2


async def render(
    frontend: Frontend,
    messages: Sequence[Message],
    body: Rendering,
    held: HeldBody,
    media: ChatMedia | None,
    may_bring_template: bool,
) -> str:
    """Return the prompt of a conversation, see Server.render. The request's own template, and any rendering that takes
    long, runs in a worker process. Raises ApiError."""
    template = body.chat_template
    if template is not None and not may_bring_template:
        message = "chat_template: this server does not take templates from requests"
        raise ApiError(400, f"{message} (--trust-request-chat-template)", param="chat_template")
    if template is not None and "{" not in template:  # never a file's name
        raise ApiError(400, "chat_template should be a Jinja template", param="chat_template")
    try:
        rendering, prompt = await held.run(_begin, frontend, messages, body, media)
        prompt = str(prompt if prompt is not None else await held.unless_left(rendering.run_apart()))
        held.grow_to_prompt(len(prompt))
        return prompt
    except BusyError as error:
        text = f"rendering the chat template: {error_text(error)}"
        raise ApiError(503, text, code="server_overloaded", headers={"Retry-After": "1"}) from error
    except (ValueError, TypeError) as error:
        default = "messages" if template is None else "chat_template"
        refusal = bad_value(error, type(body).model_fields, default)
        refusal.quotes |= error.__cause__ is not None and not _is_of_template(frontend, error.__cause__)
        raise refusal from error


def _is_of_template(frontend: Frontend, error: BaseException) -> bool:
    """Whether a template's error text is a constant in the server's template, and thus not from the conversation."""
    templates = (frontend.given_chat_template, *frontend.tokenizer.chat_templates.values())
    return any(error_text(error) in template for template in templates if template is not None)


def _begin(
    frontend: Frontend, messages: Sequence[Message], body: Rendering, media: ChatMedia | None
) -> "tuple[ChatRendering, str | None]":
    """Start a rendering, and return its prompt if it is finished quickly. A request's own template never runs here."""
    if media is None and has_media(messages):
        raise ValueError("messages: pictures and other media are not taken here")
    chat: Any = json_of(messages) if media is None else media.messages
    effort = frontend.config.model.reasoning_effort_map.get(body.reasoning_effort or "", body.reasoning_effort)
    variables: dict[str, Any] = {"documents": body.documents, "reasoning_effort": effort}
    variables["tools"] = body.tool_objects or None
    if effort is not None:  # for templates that only have an on/off switch, as in vLLM
        variables["enable_thinking"] = effort != "none"
    arguments: dict[str, Any] = {
        "chat_template": body.chat_template,
        "continue_final_message": bool(body.continue_final_message),
        "add_generation_prompt": body.add_generation_prompt is not False,
        **{name: value for name, value in variables.items() if value is not None},
        **(body.chat_template_kwargs or {}),
    }
    if body.add_generation_prompt is None and body.continue_final_message:
        arguments["add_generation_prompt"] = False
    rendering = frontend.rendering(chat, **arguments)
    return rendering, rendering.here() if body.chat_template is None else None
