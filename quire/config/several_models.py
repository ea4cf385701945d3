"""Options of a server with several models."""

from dataclasses import dataclass

from quire.config.declaration import at_least, check_seconds, option

NAMING = frozenset({"models", "models_dir", "pulled_models"})  # the options that name models


@dataclass(frozen=True)
class SeveralModels:
    """Which models a server has, and how they share its memory. Times are in seconds."""

    models: str | None = None
    models_dir: str | None = None
    pulled_models: bool = False
    rules: str | None = None
    memory: int | None = option(None, size=True)
    max_loaded_models: int | None = None
    model_ttl: float | None = None
    model_wait: float = 300.0
    max_waiting_for_models: int = 512

    @property
    def names_models(self) -> bool:
        """Whether an option names the models of the server."""
        return any(getattr(self, name) for name in NAMING)

    def check_models(self) -> None:
        """Raises ConfigError."""
        at_least(self, 1, "memory", "max_loaded_models")
        at_least(self, 0, "max_waiting_for_models")
        check_seconds("model_ttl", self.model_ttl, zero=True)
        check_seconds("model_wait", self.model_wait)
