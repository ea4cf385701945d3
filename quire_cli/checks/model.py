"""The check of a model: whether it fits into memory, and how fast its answers can be at most."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire_cli.checks.engine import need_engine
from quire_cli.checks.finding import Finding, note, ok, problem, size_text
from quire_cli.checks.memory import cache_bytes, rates

if TYPE_CHECKING:
    from quire.models.spec import DecoderSpec

_ELEMENT = 2  # bytes of a weight or of a cached value in bfloat16
_FLOATS = ("F64", "F32", "F16", "BF16")  # types that become bfloat16 when they are loaded
_SMALL = 64 << 20  # bytes of weights that a processor's caches may hold, if their size is unknown
_SLOW = 5.0  # tokens a second, below which a reader waits


def check_model(model: str) -> Iterator[Finding]:
    """Downloads nothing. Options are the defaults of quire serve, and of several GPUs only the first one counts."""
    need_engine()
    import huggingface_hub.constants

    from quire.config import EngineConfig
    from quire.loading.hub import model_directory
    from quire.messages.errors import error_text
    from quire.models.description import describe
    from quire.worker.device import on_gpu

    huggingface_hub.constants.HF_HUB_OFFLINE = True  # what is not in the cache is reported as missing
    config = EngineConfig.create(model=model)
    try:
        path = model_directory(config.model)
        description = describe(path, config.model)
        sizes = _weight_sizes(path)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: torch's files
        found = error_text(error)
        if "could not be fetched" in found:
            found = f"{model} is neither a folder nor in the hub's cache, so nothing is known about it"
            yield note(found, f"hf download {model}, or let the first start download it")
        else:
            yield problem(found, "docs/models.md says which models and formats run.")
        return
    is_on_gpu = on_gpu("auto")
    yield _fit(description.spec, sum(sizes.values()), description.max_model_len, is_on_gpu)
    if is_on_gpu:
        return  # the bandwidth of its memory is not measured
    read = _bytes_of_a_token(description.spec, sizes)
    speed = rates()[0] / read
    found = f"memory lets it generate at most {speed:.{0 if speed >= 10 else 1}f} tokens/s for a single request"
    if read < max(_SMALL, cache_bytes()):
        yield ok("its weights fit into the processor's caches, so memory does not limit how fast it generates")
    elif speed < _SLOW:
        yield note(found, "Take --quantization int8 or int4, a smaller model, or a machine with faster memory.")
    else:
        yield ok(found)


def _fit(spec: "DecoderSpec", weights: int, max_model_len: int, is_on_gpu: bool) -> Finding:
    """weights: their bytes."""
    from quire.worker.memory import FREE_SHARE

    free, place = _free(is_on_gpu), "the first GPU" if is_on_gpu else "memory"
    found = f"about {size_text(weights)} of weights"
    if weights >= free:
        advice = "Take --quantization int8 or int4, a smaller model, or more memory."
        return problem(f"{found} do not fit into {place}, where {size_text(free)} may be used", advice)
    found += f" fit into the {size_text(free)} of {place} that may be used"
    cached = _cached_bytes(spec)
    if not cached:
        return ok(found)
    tokens = int((free - weights) * (1 if is_on_gpu else FREE_SHARE)) // cached
    if tokens < max_model_len:
        found += f", but the KV cache then has room for {tokens:,} tokens, and a request may have {max_model_len:,}"
        return problem(f"{found}, so a start fails", "Start with --max-model-len auto, or with what you need.")
    return ok(f"{found}; the KV cache then has room for {tokens:,} tokens")


def _free(is_on_gpu: bool) -> int:
    """Bytes that an engine may use, by default."""
    if not is_on_gpu:
        from quire.system.limits import free_on_host

        return free_on_host()
    import torch

    from quire.config import CacheConfig

    free, total = torch.cuda.mem_get_info(0)
    return max(0, int(CacheConfig().gpu_memory_utilization * total) - (total - free))


def _cached_bytes(spec: "DecoderSpec") -> int:
    """Bytes of the KV cache for a token, without regard to sliding windows; 0 for an encoder."""
    from quire.parallel.mesh import Communicator

    if spec.is_encoder:
        return 0
    shapes = [mixer.cache_shape(Communicator()) for mixer in spec.mixers]
    # value_dim: of latents, whose values are a part of the keys
    elements = sum(s.num_kv_heads * s.head_dim * (2 if s.value_dim is None else 1) for s in shapes)
    return elements * _ELEMENT


def _bytes_of_a_token(spec: "DecoderSpec", sizes: dict[str, int]) -> float:
    """Bytes of weights that a step with one token reads. sizes: of all weights, by name."""
    from quire.layers.specs import MoESpec

    mixtures = [mlp for mlp in spec.mlps if isinstance(mlp, MoESpec)]
    share = mixtures[0].top_k / mixtures[0].num_experts if mixtures else 1.0
    table = None if spec.tie_embeddings else f"{spec.names['embedding']}.weight"  # one row is read
    return sum(size * (share if ".experts." in name else 1.0) for name, size in sizes.items() if name != table)


def _weight_sizes(path: Path) -> dict[str, int]:
    """Bytes that the weights of a checkpoint take in memory, by name: about as many as in the files, but floats become
    bfloat16. Raises ModelNotFoundError or ValueError."""
    from quire.loading.gguf import read_gguf
    from quire.loading.gguf_checkpoint import GgufCheckpoint
    from quire.loading.gguf_models import gguf_tensors
    from quire.loading.weights import open_checkpoint, weight_files

    if path.is_file():
        stored = GgufCheckpoint(gguf_tensors(read_gguf(path))).names
        return {name: math.prod(s.shape[:-1] or s.shape) * s.tensor.row_bytes for name, s in stored.items()}
    files = weight_files(path, "model.safetensors", "*.safetensors")
    if files:
        return {name: size for file in files for name, size in _safetensors_sizes(file)}
    tensors = open_checkpoint(path).names.items()
    return {name: t.numel() * (_ELEMENT if t.is_floating_point() else t.itemsize) for name, t in tensors}


def _safetensors_sizes(file: Path) -> Iterator[tuple[str, int]]:
    """Only the header is read: the library would map the whole file, which fails if it is larger than the memory."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > size - 8:
            raise ValueError(f"{file} ends within its header")
        header = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    if size < 8 + header_bytes + max((tensor["data_offsets"][1] for tensor in header.values()), default=0):
        raise ValueError(f"{file} ends within its tensors; download it again")
    for name, tensor in header.items():
        yield name, math.prod(tensor["shape"]) * _bits(tensor["dtype"]) // 8


def _bits(kind: str) -> int:
    """The bits that an element takes in memory. kind: its type in safetensors, such as BF16, I32 or F8_E4M3."""
    if kind in _FLOATS:
        return 8 * _ELEMENT
    number = re.search(r"\d+", kind)
    return int(number[0]) if number else 8
