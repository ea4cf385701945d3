"""Decoders that were trained to embed as encoders: each token attends to all tokens of the text."""

from dataclasses import replace

from quire.models.architectures import llama as decoders
from quire.models.architectures.qwen import qwen3 as causal_qwen3
from quire.models.spec import DecoderSpec, HfConfig, bidirectional


def llama(config: HfConfig) -> DecoderSpec:
    return bidirectional(decoders.llama(config))


def qwen3(config: HfConfig) -> DecoderSpec:
    return bidirectional(causal_qwen3(config))


def jina_v5(config: HfConfig) -> DecoderSpec:
    """jina-embeddings-v5: a Qwen3, or a EuroBERT in the small models."""
    return causal_qwen3(config) if config.get("is_decoder", True) else eurobert(config)


def eurobert(config: HfConfig) -> DecoderSpec:
    """A Llama. Poolers read its heads when needed."""
    spec = llama(config)
    return replace(spec, ignored=(*spec.ignored, r"^(lm_head|classifier|dense)\b"))
