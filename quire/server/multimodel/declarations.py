"""The models that a server may load, and the options with which it loads them."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from quire.config.engine import OPTIONS, ConfigError, EngineConfig, ServerConfig, canonical_name, read_option
from quire.messages.errors import error_text
from quire.server.adapters import read_module
from quire.server.durations import seconds_of

# The options of quire serve that may differ between models. The other options of the server apply to all of them.
OF_A_MODEL = frozenset(
    "response_role enable_auto_tool_choice tool_call_parser tool_strict_level enable_force_include_usage "
    "return_tokens_as_token_ids strict_max_tokens max_waiting_requests request_timeout max_generated_tokens "
    "lora_modules lora_folder weights_folder trust_request_chat_template".split()
)
_KEYS = ("model", "aliases", "pinned", "ttl")


@dataclass(frozen=True)
class ModelDeclaration:
    """A model that a server may load.

    name, aliases: its names in the API. model: as for `quire serve`; None for the bundled one. pinned: loaded at start,
    and never unloaded to make room. ttl: seconds without a request after which it is unloaded; None for never.
    engine, server: options by name. is_found: it was found in a folder, and may disappear again.
    """

    name: str
    model: str | None
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    ttl: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    is_found: bool = False

    @property
    def names(self) -> list[str]:
        """The names in the API, followed by those of the adapters that are loaded with the model."""
        adapters = (read_module(module).lora_name for module in self.server.get("lora_modules", ()))
        return [self.name, *self.aliases, *adapters]

    @property
    def owned_names(self) -> list[str]:
        return [self.name, *self.aliases]

    def engine_config(self) -> EngineConfig:
        """Raises ConfigError."""
        return EngineConfig.create(model=self.model, **self.engine)

    @classmethod
    def create(
        cls,
        name: str,
        model: str | None,
        options: Mapping[str, Any],
        *,
        aliases: Sequence[str] = (),
        pinned: bool = False,
        ttl: float | None = None,
        is_found: bool = False,
    ) -> Self:
        """options: of quire serve, for the engine and for the server. Raises ConfigError."""
        given = {canonical_name(key): value for key, value in options.items()}
        server = {key: read_option(key, value) for key, value in given.items() if key in OPTIONS[ServerConfig]}
        if misplaced := server.keys() - OF_A_MODEL:
            raise ConfigError(f"model {name!r}: {min(misplaced)} is an option of the whole server")
        engine = {key: value for key, value in given.items() if key not in server}
        declaration = cls(name, model, tuple(aliases), pinned, ttl, engine, server, is_found)
        try:
            declaration.engine_config()
            _ = declaration.names
        except ConfigError as error:
            raise ConfigError(f"model {name!r}: {error_text(error)}") from error
        return declaration


Resolve = Callable[[str], str | None]


def read_models(path: Path, options: Mapping[str, Any], ttl: float | None, resolve: Resolve) -> list[ModelDeclaration]:
    """Read a models.toml: a table `models` with a table of options for each model, by name. options: for all models;
    those of a model take precedence. ttl: for models without one. resolve: turns a model's name into a path, a
    repository, or None for the bundled model. Raises ConfigError or OSError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error_text(error)}") from error
    tables = document.pop("models", None)
    defaults = document.pop("defaults", {})
    if document or not _is_table(defaults) or not _is_table(tables) or not all(map(_is_table, tables.values())):
        raise ConfigError(f"{path} should have a table [models.NAME] for each model, and may have a table [defaults]")
    return [
        _read(path, name, table, {**options, **_canonical(defaults)}, ttl, resolve) for name, table in tables.items()
    ]


def _read(
    path: Path, name: str, table: dict[str, Any], options: Mapping[str, Any], ttl: float | None, resolve: Resolve
) -> ModelDeclaration:
    given = {key: value for key, value in table.items() if key in _KEYS}
    own = _canonical({key: value for key, value in table.items() if key not in _KEYS})
    aliases = given.get("aliases", [])
    pinned = given.get("pinned", False)
    model = given.get("model", name)
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ConfigError(f"{path}: aliases of {name!r} should be a list of names")
    if not isinstance(pinned, bool) or not isinstance(model, str):
        raise ConfigError(f"{path}: {name!r} should have a text as model, and true or false as pinned")
    try:
        seconds = seconds_of(given["ttl"]) if "ttl" in given else ttl
        beside = path.parent / model
        found = str(beside) if beside.exists() else resolve(model)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {name!r}: {error_text(error)}") from error
    merged = {**options, **own}
    return ModelDeclaration.create(name, found, merged, aliases=aliases, pinned=pinned, ttl=seconds)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    return {canonical_name(name): value for name, value in options.items()}
