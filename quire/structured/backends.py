"""The libraries that can compile grammars, by their names in the option structured_outputs_config."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.platform.extras import install_command
from quire.structured.grammar import Backend, TokenTable

if TYPE_CHECKING:  # imports the tokenizers library
    from quire.structured.vocabulary import Vocabulary

# name → the required package, the module and the class of the back end. They are imported on first use.
_BACKENDS = {
    "guidance": ("llguidance", "quire.structured.guidance", "GuidanceBackend"),
    "xgrammar": ("xgrammar", "quire.structured.xgrammar", "XgrammarBackend"),
    "outlines": ("outlines_core", "quire.structured.outlines", "OutlinesBackend"),
}


def check_backend(options: Mapping[str, Any]) -> None:
    """Raises ConfigError if the package of the chosen back end is not installed."""
    from quire.config.engine import ConfigError  # here, since worker processes also load back ends

    name = _name(options)
    package = _BACKENDS[name][0]
    if find_spec(package) is None:
        raise ConfigError(
            f"structured_outputs_config: the back end {name!r} needs the package {package!r}: {install_command(name)}"
        )


def load_backend(options: Mapping[str, Any], vocabulary: "Vocabulary | TokenTable") -> Backend:
    """Create the chosen back end for the tokens of a model. This may take seconds."""
    _, module, class_name = _BACKENDS[_name(options)]
    backend: Backend = getattr(import_module(module), class_name)(
        vocabulary,
        compact=options.get("disable_any_whitespace", False),
        closed=options.get("disable_additional_properties", False),
    )
    return backend


def _name(options: Mapping[str, Any]) -> str:
    name: str = options.get("backend", "auto")
    return "guidance" if name == "auto" else name
