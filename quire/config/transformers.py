"""Checks whether transformers is installed, which `model_impl="transformers"` requires."""

from importlib.util import find_spec

from quire.config.declaration import ConfigError
from quire.platform.extras import install_command


def check_installed() -> None:
    """Raises ConfigError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError(f"model_impl='transformers' needs transformers: {install_command('transformers')}")
