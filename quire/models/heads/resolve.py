"""Finds the files of a model and of its drafter before an engine starts, and completes speculative_config from them."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quire.checkpoints.hub import model_directory, read_json, resolve
from quire.config.conflicts import check
from quire.config.engine import ConfigError, EngineConfig, ModelConfig
from quire.config.features import ModelFacts, Setup
from quire.messages.errors import error_text
from quire.models.heads.config import speculative_fields, speculators_target
from quire.models.pooling import is_pooling_model
from quire.models.registry import runs_through_transformers
from quire.models.spec import HfConfig
from quire.observability.logging import logger


def with_files(config: EngineConfig, weights: bool = True) -> tuple[EngineConfig, Path]:
    """Return the model's directory or .gguf file, and the config with a complete speculative_config: `model` is the
    drafter's directory, and `method` and `num_speculative_tokens` are set.

    If the user named a drafter of the library speculators, its target is served, with this drafter unless the user's
    speculative_config has another model or method. For an embedding or scoring model, the options `runner` and `dtype`
    are completed; for an architecture that only transformers has, `model_impl`. weights: False downloads no tensors.
    Raises ConfigError or ModelNotFoundError.
    """
    directory = model_directory(config.model, weights)
    options = config.model
    drafter = {} if directory.is_file() else read_json(directory, "config.json")
    overridden = {**drafter, **options.hf_overrides}
    if is_pooling_model(overridden, directory, options):
        # The checkpoint's dtype, since most of these models are small, and few were trained in bfloat16.
        kept = str(drafter.get("dtype") or drafter.get("torch_dtype") or "float32")
        dtype = "float32" if options.dtype == "auto" and kept == "float32" else options.dtype
        completed = replace(options, runner="pooling", dtype=dtype)
        config = replace(config, model=_with_implementation(completed, overridden))
        check(Setup(config, model=ModelFacts(pools=True)))
        return config, directory
    try:
        found = speculators_target(drafter, str(directory))
    except ValueError as error:
        raise ConfigError(error_text(error)) from error
    if found is not None:
        target, fields = found
        given = config.scheduler.speculative_config
        logger.info("%s is a drafter for %s, which is loaded with it", options.model, target)
        if "model" in given or given.get("method", "replay") not in ("replay", fields["method"]):
            fields = {}
        config = replace(config, scheduler=replace(config.scheduler, speculative_config={**fields, **given}))
        fetched = weights and options.load_format != "dummy"
        directory = resolve(target, None, options.download_dir, options.hf_token, fetched)
    else:
        config = replace(config, model=_with_implementation(options, overridden))
    return _with_drafter(config, weights), directory


def _with_implementation(options: ModelConfig, config: HfConfig) -> ModelConfig:
    """Return the options with transformers' code chosen, if they leave it open and only transformers has the model."""
    if options.model_impl == "auto" and runs_through_transformers(config):
        return replace(options, model_impl="transformers")
    return options


def _with_drafter(config: EngineConfig, weights: bool) -> EngineConfig:
    """Return the config with the drafter's directory instead of its name."""
    options = config.scheduler.speculation
    model = config.model
    if options is None or not options.on_device:
        return config
    if options.model is None and options.method not in ("mtp", "replay"):
        if options.method is None:
            raise ConfigError("speculative_config: method and model are missing; give one of them")
        raise ConfigError(f"speculative_config: {options.method} needs model, the directory or name of the drafter")
    size = config.parallel.tensor_parallel_size
    if options.draft_tensor_parallel_size not in (None, 1, size):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size must be 1 or tensor_parallel_size ({size}), "
            f"got {options.draft_tensor_parallel_size}"
        )
    if options.acceptance_rates:
        logger.warning("speculative_config: drafts are accepted at given rates, so that answers mean nothing")
    if options.method not in ("mtp", "replay"):
        place = resolve(options.model, options.revision, model.download_dir, model.hf_token, weights)
        fields = _what_its_config_says(place, str(options.model))
        count = options.num_speculative_tokens or fields.get("num_speculative_tokens", 0)
        method = options.method or fields["method"]
        options = replace(options, model=str(place), method=method, num_speculative_tokens=count)
    if not options.num_speculative_tokens:
        raise ConfigError("speculative_config: num_speculative_tokens is missing")
    fields = {name: value for name, value in asdict(options).items() if value is not None}
    return replace(config, scheduler=replace(config.scheduler, speculative_config=fields))


def _what_its_config_says(place: Path, name: str) -> dict[str, Any]:
    """Return the fields of speculative_config that the drafter's own config implies."""
    from quire.checkpoints.metadata import hf_config  # slow to import, which would delay each start

    try:
        return speculative_fields(hf_config(place, {}), name)
    except ValueError as error:
        raise ConfigError(f"speculative_config: {error_text(error)}") from error
