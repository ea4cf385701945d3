"""The description of a model before its weights are loaded: its config, its spec and its longest request."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from quire.checkpoints.metadata import hf_config
from quire.config.engine import ConfigError, ModelConfig
from quire.config.features import ModelFacts
from quire.models.facts import facts_of
from quire.models.pooling import PoolingDescription, describe_pooling, is_pooling_model
from quire.models.registry import spec_of
from quire.models.spec import DecoderSpec, HfConfig

# The families for which vLLM also refuses float16.
_OVERFLOWS = re.compile(r"(Gemma[23]|Glm4|Plamo2)(Text|For|Model)")


@dataclass(frozen=True)
class ModelDescription:
    """config: the checkpoint's config.json with the user's overrides. max_model_len: the longest request in tokens.
    pooling: what an embedding or scoring model computes; None for a model that generates.

    With the option max_model_len="auto", the size of the KV cache limits it further once that is known.
    """

    config: HfConfig
    spec: DecoderSpec
    max_model_len: int
    pooling: PoolingDescription | None = None

    @property
    def facts(self) -> ModelFacts:
        return facts_of(self.spec, self.max_model_len, pools=self.pooling is not None)


def describe(directory: Path, options: ModelConfig) -> ModelDescription:
    """Read the description of a checkpoint's directory or GGUF file.

    Raises ConfigError for options that this model does not allow, and ValueError for an unsupported model.
    """
    config = hf_config(directory, options.hf_overrides)
    _check_dtype(config, options)
    if options.model_impl == "transformers":
        from quire.models.transformers_backend.spec import spec_of as transformers_spec  # imports transformers

        spec = transformers_spec(config)
    else:
        spec = spec_of(config)
    if spec.media is not None:
        spec = replace(spec, media=replace(spec.media, directory=directory))
    if not is_pooling_model(config, directory, options):
        if spec.is_encoder:
            raise ConfigError(f"{options.model} is an encoder, which cannot generate; leave runner at auto")
        return ModelDescription(config, spec, _max_model_len(options, spec))
    pooling = describe_pooling(config, spec, directory, options)
    # Such a checkpoint often lacks the head, which is not needed.
    names = {**spec.names, "lm_head": None}
    ignored = (*spec.ignored, r"^(language_model\.)?(lm_head|score|classifier)\b")
    spec = replace(spec, names=names, tie_embeddings=False, ignored=ignored)
    return ModelDescription(config, spec, _max_model_len(options, spec, pooling.files.max_tokens), pooling)


def _check_dtype(config: HfConfig, options: ModelConfig) -> None:
    """Raises ConfigError for float16 in a family whose hidden states exceed float16's largest number, 65,504."""
    names = config.get("architectures")
    overflows = [name for name in names if isinstance(name, str) and _OVERFLOWS.match(name)] if names else []
    if overflows and options.dtype_name == "float16":
        raise ConfigError(
            f"dtype={options.dtype!r} overflows in {overflows[0]}, whose hidden states exceed the range of float16; "
            "use bfloat16 or float32"
        )


def _max_model_len(options: ModelConfig, spec: DecoderSpec, max_tokens: int | None = None) -> int:
    """max_tokens: the limit in sentence-transformers' files. An option may raise it, up to the model's positions."""
    longest = spec.max_positions
    reason = "positions of the model"
    windows = [window for window in spec.windows if window is not None]
    if options.disable_sliding_window and windows and min(windows) < longest:
        longest = min(windows)
        reason = "tokens of the model's sliding window, which disable_sliding_window keeps to"
    if options.max_model_len in (None, -1):
        return min(longest, max_tokens or longest)
    if options.max_model_len > longest:
        raise ConfigError(f"max_model_len={options.max_model_len} is more than the {longest} {reason}")
    return options.max_model_len
