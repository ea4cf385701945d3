"""Chooses the attention backends and the block size of a rank."""

from collections.abc import Sequence
from functools import partial

from quire.attention.base import AttentionBackend, AttentionShape, CacheBackend
from quire.attention.by_head import by_head
from quire.attention.cells import CELLS
from quire.attention.chunked import in_chunks
from quire.attention.compressed import CompressedEntries
from quire.attention.cross import across
from quire.attention.pooled import PooledSparseAttention
from quire.attention.rows import Rows
from quire.attention.selection import choose_backend
from quire.attention.sparse import SparseAttention
from quire.attention.sparse_stripes import StripedSparseAttention
from quire.attention.states import StateBackend, matching_block_size
from quire.config.engine import EngineConfig
from quire.kv.specs import RowsShape, StateShape
from quire.layers.attention_spec import CacheShape
from quire.models.model import Shape
from quire.ops import Kernels
from quire.parallel.mesh import Mesh
from quire.worker.context import check_context, choose_context


def make_backends(
    config: EngineConfig, block_size: int, kernels: Kernels, mesh: Mesh, shapes: Sequence[Shape]
) -> list[CacheBackend]:
    """Return the backend of each KV group. Groups of the same shape share one. shapes: of the groups.

    Raises ConfigError or ValueError if no backend fits.
    """
    target = kernels.target
    speculation = config.scheduler.speculation
    choose = partial(choose_backend, pinned=config.kernels.attention_backend)
    check_context(shapes, config.parallel)
    context = choose_context(mesh, shapes)
    by_shape: dict[Shape, CacheBackend] = {}
    for cache in shapes:
        if isinstance(cache, StateShape):
            drafts = 0 if speculation is None else speculation.num_speculative_tokens
            by_shape[cache] = StateBackend(cache, block_size, drafts, "triton" in kernels.chosen["scan"])
        elif isinstance(cache, RowsShape):
            by_shape[cache] = Rows(cache.size, target.dtype, block_size)
        elif cache not in by_shape:
            shape = AttentionShape(
                cache.num_heads,
                cache.num_kv_heads,
                cache.head_dim,
                block_size,
                target.dtype,
                target.device,
                cache.value_dim,
                target.narrow or CELLS.get(config.cache.kv_cache_dtype),
                target.batch_invariant,
            )
            backend: AttentionBackend
            if cache.entries is not None:
                backend = CompressedEntries(shape, cache.entries, choose)
            elif cache.indexer is not None and cache.indexer.pool:
                index = cache.indexer
                backend = PooledSparseAttention(shape, index.top_k, index.pool, 2 * index.head_dim, choose)
            elif cache.indexer is not None:
                sparse = cache.indexer.top_k, cache.indexer.head_dim
                backend = (
                    SparseAttention(shape, *sparse, choose)
                    if context is None
                    else StripedSparseAttention(shape, mesh.cp, mesh.dcp, choose, kernels, *sparse)
                )
            else:
                backend = choose(shape) if context is None else context(shape, mesh.cp, mesh.dcp, choose, kernels)
                backend = _wrapped(backend, cache, config)
            by_shape[cache] = backend
    return [by_shape[cache] for cache in shapes]


def _wrapped(backend: AttentionBackend, cache: CacheShape, config: EngineConfig) -> AttentionBackend:
    """Return the backend in the form that reads chunks, the tokens of an encoder, or compressed prompts."""
    if cache.chunk is not None:
        return in_chunks(backend, cache.chunk)
    if cache.crossed:
        return across(backend)
    return backend if config.cache.compression is None else by_head(backend)


def choose_block_size(config: EngineConfig, kernels: Kernels, mesh: Mesh, shapes: Sequence[Shape]) -> int:
    """Return the tokens per block. Usually the option decides. In a model with states, the entries of a block's tokens
    take as much memory as one state; the rank with the highest number of tokens decides."""
    least = config.cache.block_size
    if not any(isinstance(shape, StateShape) for shape in shapes):
        return least
    if config.cache.mamba_block_size is not None:
        return config.cache.mamba_block_size
    sizes: dict[bool, int] = {}
    for backend in make_backends(config, least, kernels, mesh, shapes):
        is_state = isinstance(backend, StateBackend)
        sizes[is_state] = max(sizes.get(is_state, 0), backend.entry_bytes())
    return -mesh.replica.minimum(-matching_block_size(least, sizes[True], sizes.get(False, 0) // least))
