"""What is known about a model before its weights are loaded: its config, its spec and its longest request."""

from dataclasses import dataclass
from pathlib import Path

from quire.config import ConfigError, ModelConfig
from quire.loading.metadata import hf_config
from quire.models.registry import spec_of
from quire.models.spec import DecoderSpec, HfConfig


@dataclass(frozen=True)
class ModelDescription:
    """config: the checkpoint's config.json with the user's overrides. max_model_len: the longest request in tokens.

    With the option max_model_len="auto", the size of the KV cache limits it further once that is known.
    """

    config: HfConfig
    spec: DecoderSpec
    max_model_len: int


def describe(directory: Path, options: ModelConfig) -> ModelDescription:
    """Read the description of a checkpoint's directory or GGUF file.

    Raises ConfigError for options that this model does not allow, and ValueError for a model that is not supported.
    """
    config = hf_config(directory, options.hf_overrides)
    spec = spec_of(config)
    return ModelDescription(config, spec, _max_model_len(options, spec))


def _max_model_len(options: ModelConfig, spec: DecoderSpec) -> int:
    longest, reason = spec.max_positions, "positions of the model"
    windows = [window for window in spec.windows if window is not None]
    if options.disable_sliding_window and windows and min(windows) < longest:
        longest, reason = min(windows), "tokens of the model's sliding window, which disable_sliding_window keeps to"
    if options.max_model_len in (None, -1):
        return longest
    if options.max_model_len > longest:
        raise ConfigError(f"max_model_len={options.max_model_len} is more than the {longest} {reason}")
    return options.max_model_len
