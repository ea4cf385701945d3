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
_EXTRAS = ("xgrammar", "outlines")  # in pyproject.toml; llguidance is one of the dependencies


def check_backend(options: Mapping[str, Any]) -> None:
    """Raises ConfigError if the options name a back end whose package is not installed. The default back end is not
    checked until a request has a grammar, since most engines never need it.
    """
    if options.get("backend", "auto") != "auto":
        _require(_name(options))


def load_backend(options: Mapping[str, Any], vocabulary: "Vocabulary | TokenTable") -> Backend:
    """Create the chosen back end for the tokens of a model. This may take seconds. Raises ConfigError if its package is
    not installed."""
    name = _name(options)
    _require(name)
    _, module, class_name = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), class_name)(
        vocabulary,
        compact=options.get("disable_any_whitespace", False),
        closed=options.get("disable_additional_properties", False),
    )
    return backend


def _name(options: Mapping[str, Any]) -> str:
    name: str = options.get("backend", "auto")
    return "guidance" if name == "auto" else name


def _require(name: str) -> None:
    package = _BACKENDS[name][0]
    if find_spec(package) is None:
        from quire.config.engine import ConfigError  # here, since worker processes also load back ends

        command = install_command(name) if name in _EXTRAS else f"pip install {package}"
        raise ConfigError(f"structured_outputs_config: the back end {name!r} needs the package {package!r}: {command}")
