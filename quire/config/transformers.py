"""Which options go with transformers' models."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from quire.config.declaration import ConfigError
from quire.platform.extras import install_command

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig


def check(config: "EngineConfig") -> None:
    """Raises ConfigError if transformers is not installed, or for an option that its models cannot have."""
    if find_spec("transformers") is None:
        raise ConfigError(f"model_impl='transformers' needs transformers: {install_command('transformers')}")
    model = config.model
    parallel = config.parallel
    drafts = config.scheduler.speculation
    for name, given in (
        ("tensor_parallel_size", parallel.tensor_parallel_size > 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1),
        ("enable_expert_parallel", parallel.enable_expert_parallel),
        ("quantization", model.quantization is not None),
        ("torch_compile", model.torch_compile),
        ("disable_sliding_window", model.disable_sliding_window),
        ("runner='pooling'", model.runner == "pooling"),
        ("convert", model.convert not in ("auto", "none")),
        ("enable_lora", config.lora.enable_lora),
        ("kv_compression", config.cache.compression is not None),
        ("batch_invariant", config.kernels.batch_invariant),
        ("enable_prompt_embeds", config.multimodal.enable_prompt_embeds),
        ("enable_layerwise_nvtx_tracing", config.profile.enable_layerwise_nvtx_tracing),
        ("drafters on the device (speculative_config)", drafts is not None and drafts.on_device),
    ):
        if given:
            raise ConfigError(f"model_impl='transformers' and {name} exclude each other; leave one of the two out")
