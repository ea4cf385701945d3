"""Collects the properties of a model that decide which features it can be combined with, see config/conflicts.py."""

from quire.config.features import ModelFacts
from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, LatentAttentionSpec
from quire.layers.compressed_spec import CompressedAttentionSpec
from quire.layers.specs import MoESpec
from quire.layers.state_spec import RwkvSpec
from quire.models.spec import DecoderSpec


def facts_of(spec: DecoderSpec, max_model_len: int, pools: bool = False) -> ModelFacts:
    """max_model_len: the longest request in tokens. Windows and chunks at least as long have no effect."""
    cached = [] if spec.is_encoder else [part for _, part in spec.cached]
    attention = [part for part in cached if isinstance(part, AttentionSpec)]
    latent = [part for part in cached if isinstance(part, LatentAttentionSpec)]
    media = spec.media
    return ModelFacts(
        max_model_len=max_model_len,
        pools=pools,
        has_no_cache=spec.is_encoder,
        has_no_experts=not any(isinstance(mlp, MoESpec) for mlp in spec.mlps),
        recurrent=spec.has_states,
        sparse=any(part.indexer is not None or part.shares_selection for part in latent),
        latent=bool(latent),
        own_entries=any(isinstance(part, CompressedAttentionSpec | BlockAttentionSpec) for part in cached),
        windows=any(window is not None and window < max_model_len for window in spec.windows),
        chunks=any(chunk is not None and chunk < max_model_len for chunk in spec.chunks or ()),
        alibi=any(part.alibi for part in attention),
        distance_biases=any(part.buckets is not None or part.root_reach for part in attention),
        sinks=any(part.sinks for part in attention),
        different_heads=len(set(spec.mixers)) > 1,
        shares_first_values=any(isinstance(part, RwkvSpec) for part in cached)
        or spec.per_layer is not None
        or any(isinstance(mlp, MoESpec) and mlp.hashed for mlp in spec.mlps),
        learned_positions=spec.position_offset is not None,
        media=media is not None,
        two_way=media is not None and media.two_way,
        levels=media is not None and bool(media.levels),
        crossed=spec.crossed > 0,
    )
