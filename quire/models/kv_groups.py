"""The KV groups of a model: what its layers cache, derived from its spec alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.kv.specs import CacheEntry, CrossAttentionSpec, ModelKVSpec, attention_spec, group_entries
from quire.layers.attention_spec import CacheShape
from quire.models.model import Shape
from quire.models.spec import DecoderSpec
from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class KVGroups:
    """kv_specs: of all layers. cache_shapes: for each group, the sizes of a rank's cache entry in one layer."""

    kv_specs: Sequence[ModelKVSpec]
    cache_shapes: Sequence[Shape]


def kv_groups(spec: DecoderSpec, max_model_len: int, tensor_group: Communicator) -> KVGroups:
    """Return the groups of a rank of the tensor group. An encoder has none."""
    if spec.is_encoder:
        return KVGroups([], [])
    kept = list[ModelKVSpec]()
    shapes = list[Shape]()
    for layer, part in spec.cached:
        kv_spec = part.kv_spec(layer, short_window(spec, layer, max_model_len))
        shape = part.cache_shape(tensor_group)
        chunk = spec.chunks[layer] if spec.chunks else None
        if chunk and chunk < max_model_len and isinstance(shape, CacheShape):
            kv_spec = attention_spec([layer], chunk=chunk)
            shape = replace(shape, chunk=chunk)
        kept.append(kv_spec)
        shapes.append(shape)
        if spec.crossed and isinstance(shape, CacheShape):
            kept.append(CrossAttentionSpec((CacheEntry(layer, "cross"),), spec.crossed))
            shapes.append(replace(shape, crossed=spec.crossed))
    kv_specs = group_entries(kept, max_model_len, shapes)
    shape_of = {kv_spec.entries[0]: shape for kv_spec, shape in zip(kept, shapes, strict=True)}
    return KVGroups(kv_specs, [shape_of[kv_spec.entries[0]] for kv_spec in kv_specs])


def short_window(spec: DecoderSpec, layer: int, max_model_len: int) -> int | None:
    """Return the window of a layer, None if it is no shorter than the longest request."""
    window = spec.windows[layer]
    return window if window is not None and window < max_model_len else None
