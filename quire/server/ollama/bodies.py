"""The common fields of Ollama's API: the model's name, options, and how long the model stays loaded."""

from typing import Any

from fastapi import Request
from pydantic import Field, PrivateAttr, field_validator

from quire.checkpoints.created import CreatedModel
from quire.messages.errors import error_text
from quire.server.durations import seconds_of as seconds_of
from quire.server.fields import TABLES, fail
from quire.server.generation import Server
from quire.server.ollama.state import State
from quire.server.protocol import Body
from quire.server.routing import StrictRoute, answers

OPTIONS: dict[str, str] = TABLES["ollama"]["options"]  # and their names in ChatRequest
ANSWERS = answers(dict[str, Any], dict[str, str])


class OllamaRoute(StrictRoute):
    names = {theirs: f"options.{ours}" for ours, theirs in OPTIONS.items()}  # noqa: RUF012  (read only)
    names |= {"response_format": "format", "reasoning_effort": "think", "chat_template": "template"}


def is_zero(keep_alive: object) -> bool:
    """Whether a keep_alive asks to unload the model at once."""
    try:
        return isinstance(keep_alive, str | int | float) and seconds_of(keep_alive) == 0
    except ValueError:
        return False


class NamedModel(Body):
    """model: the name of a served or created model, optionally with the tag `latest`."""

    name: str | None = Field(None, description="The older name of model.")

    _created: CreatedModel | None = PrivateAttr(None)

    @property
    def given(self) -> str:
        """The name as the client wrote it."""
        return self.model or self.name or ""

    @property
    def created(self) -> CreatedModel | None:
        """The created model that the name refers to. Valid after `accepted`."""
        return self._created

    def accepted(self, request: Request) -> str:
        """Return the name as the client wrote it, or the served model's name. Sets `model` to the served model's name.

        Raises ApiError."""
        server: Server = request.app.state.server
        state: State = request.app.state.ollama
        given = self.given
        self._created = state.created(given)
        if self._created is not None:
            self.model = state.base_name
        elif given and given not in server.names:
            self.model = given.removesuffix(":latest")
        else:
            self.model = given or None
        name = server.accept(self)
        return given or name


class KeptModel(NamedModel):
    """Requests that load the model."""

    options: dict[str, Any] | None = Field(None, description=f"{', '.join(OPTIONS)}; others are ignored.")
    keep_alive: float | str | None = Field(
        None, description="How long the model stays loaded: seconds, or 5m; negative: forever. See docs/apis.md."
    )

    @field_validator("keep_alive")
    @classmethod
    def _check_keep_alive(cls, value: float | str | None) -> float | str | None:
        try:
            if value is not None and value != "":
                seconds_of(value)
        except ValueError as error:
            raise fail("keep_alive", error_text(error)) from error
        return None if value == "" else value

    @property
    def kept_seconds(self) -> float | None:
        """Return the seconds of keep_alive, or None for forever, which is the default."""
        return None if self.keep_alive is None else seconds_of(self.keep_alive)

    def accepted(self, request: Request) -> str:
        name = super().accepted(request)
        server: Server = request.app.state.server
        if self.keep_alive is None:
            server.keep_alive.keep_by_default()
        else:
            server.keep_alive.keep(self.kept_seconds)
        return name

    def unknown(self) -> list[str]:
        return [*super().unknown(), *(f"options.{name}" for name in self.options or () if name not in OPTIONS)]
