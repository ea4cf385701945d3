"""The features of an engine that cannot all be combined, each a named predicate over the facts known at start."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from quire.config.experts import DEEP_EP as DEEP_EP_EXCHANGES
from quire.config.kv_transfer import CONNECTORS

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig, ServerConfig


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that features depend on. The defaults, used while no model is known, exclude nothing.

    max_model_len: the longest request in tokens, 0 if unknown. windows: sliding windows shorter than that. chunks:
    attention is limited to chunks of the text. two_way: tokens of an image attend to each other in both directions.
    levels: image features are also added to later layers. crossed: layers read an encoder's output by cross-attention.
    """

    max_model_len: int = 0
    pools: bool = False
    has_no_cache: bool = False
    has_no_experts: bool = False
    recurrent: bool = False
    sparse: bool = False
    latent: bool = False
    windows: bool = False
    chunks: bool = False
    alibi: bool = False
    sinks: bool = False
    different_heads: bool = False
    shares_first_values: bool = False
    learned_positions: bool = False
    media: bool = False
    two_way: bool = False
    levels: bool = False
    crossed: bool = False


@dataclass(frozen=True)
class Place:
    """The placement of a part of the engine. stages_apart: a drafter reads layers of other pipeline stages."""

    in_llm: bool = False
    on_cpu: bool = False
    shares_gpu: bool = False
    stages_apart: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation requested from a running engine."""

    replaces_weights: bool = False
    drops_weights: bool = False


@dataclass(frozen=True)
class Setup:
    """The facts known at one point of the start. Features of unknown parts are off."""

    engine: "EngineConfig | None" = None
    server: "ServerConfig | None" = None
    model: ModelFacts = ModelFacts()
    place: Place = Place()
    operation: Operation = Operation()


class Kind(Enum):
    """The kind of a feature, which determines the wording of its conflict with an option `a`. MISSING is an option that
    was not given."""

    OPTION = "{a} and {b} exclude each other"
    MISSING = "{a} needs {b}"
    MODEL = "{a} cannot be used with a model that has {b}"
    PLACE = "{a} cannot be used {b}"
    OPERATION = "{b} cannot be used in an engine with {a}"


@dataclass(frozen=True)
class Feature:
    """name: used in messages and docs/features.md."""

    name: str
    is_on: Callable[[Setup], bool]
    kind: Kind = Kind.OPTION


def _engine(name: str, is_on: "Callable[[EngineConfig], bool]", kind: Kind = Kind.OPTION) -> Feature:
    return Feature(name, lambda setup: setup.engine is not None and is_on(setup.engine), kind)


def _server(name: str, is_on: "Callable[[ServerConfig], bool]", kind: Kind = Kind.OPTION) -> Feature:
    return Feature(name, lambda setup: setup.server is not None and is_on(setup.server), kind)


def _model(name: str, is_on: Callable[[ModelFacts], bool]) -> Feature:
    return Feature(name, lambda setup: is_on(setup.model), Kind.MODEL)


def _place(name: str, is_on: Callable[[Place], bool]) -> Feature:
    return Feature(name, lambda setup: is_on(setup.place), Kind.PLACE)


def _operation(name: str, is_on: Callable[[Operation], bool]) -> Feature:
    return Feature(name, lambda setup: is_on(setup.operation), Kind.OPERATION)


def _drafts(config: "EngineConfig", on_device: bool) -> bool:
    speculation = config.scheduler.speculation
    return speculation is not None and speculation.on_device is on_device


def _produces(config: "EngineConfig") -> bool:
    return config.cache.transfer is not None and config.cache.transfer.produces


def _moves_whole_blocks(config: "EngineConfig") -> bool:
    transfer = config.cache.transfer
    return transfer is not None and CONNECTORS[transfer.kv_connector] in (("nixl",), ("shared_memory",))


def _spans_machines(config: "EngineConfig") -> bool:
    """Whether each machine has fewer ranks than a replica."""
    return config.parallel.data_parallel_size < config.cluster.nnodes


def _has_short_steps(setup: Setup) -> bool:
    """Whether a prompt of the maximum length exceeds the given number of tokens per step."""
    given = None if setup.engine is None else setup.engine.scheduler.max_num_batched_tokens
    return given is not None and not setup.model.pools and given < setup.model.max_model_len


# ---- options: the model and how it is computed

TRANSFORMERS = _engine("model_impl='transformers'", lambda c: c.model.model_impl == "transformers")
QUANTIZATION = _engine("quantization", lambda c: c.model.quantization is not None)
TORCH_COMPILE = _engine("torch_compile", lambda c: c.model.torch_compile)
BATCH_INVARIANT = _engine("batch_invariant", lambda c: c.kernels.batch_invariant)
NO_SLIDING_WINDOW = _engine("disable_sliding_window", lambda c: c.model.disable_sliding_window)
LORA = _engine("enable_lora", lambda c: c.lora.enable_lora)
NO_LORA = _engine("enable_lora", lambda c: not c.lora.enable_lora, Kind.MISSING)
PROMPT_EMBEDS = _engine("enable_prompt_embeds", lambda c: c.multimodal.enable_prompt_embeds)
NVTX = _engine("enable_layerwise_nvtx_tracing", lambda c: c.profile.enable_layerwise_nvtx_tracing)
NOT_BFLOAT16 = _engine("dtype='bfloat16'", lambda c: c.model.dtype_name != "bfloat16", Kind.MISSING)
NOT_FLOAT16 = _engine("dtype='float16'", lambda c: c.model.dtype_name != "float16", Kind.MISSING)

# ---- options: the KV cache

BFLOAT16_CACHE = _engine("kv_cache_dtype='bfloat16'", lambda c: c.cache.kv_cache_dtype == "bfloat16")
FLOAT16_CACHE = _engine("kv_cache_dtype='float16'", lambda c: c.cache.kv_cache_dtype == "float16")
INT8_CACHE = _engine("kv_cache_dtype='int8'", lambda c: c.cache.kv_cache_dtype == "int8")
FP8_CACHE = _engine("kv_cache_dtype='fp8'", lambda c: c.cache.kv_cache_dtype == "fp8")
COMPRESSION = _engine("kv_compression", lambda c: c.cache.compression is not None)
LAYER_BY_LAYER = _engine("kv_cache_layout='layer_by_layer'", lambda c: c.cache.kv_cache_layout == "layer_by_layer")
TRANSFER = _engine("kv_transfer_config", lambda c: c.cache.transfer is not None)
PRODUCER = _engine("kv_transfer_config of a producer", _produces)
WHOLE_BLOCKS = _engine("kv_transfer_config with NixlConnector or SharedMemoryConnector", _moves_whole_blocks)
INSECURE_TRANSFERS = _engine("insecure_transfers", lambda c: c.cache.insecure_transfers)
CLUSTER_SECRET = _engine("cluster_secret_file", lambda c: c.cluster.cluster_secret_file is not None)
KV_EVENTS = _engine("kv_events_config", lambda c: c.cache.events is not None)
TIERS = _engine("kv_offloading_size or kv_offloading_path", lambda c: c.cache.has_tiers)
NO_PREFIX_CACHING = _engine("enable_prefix_caching", lambda c: not c.cache.enable_prefix_caching, Kind.MISSING)

# ---- options: scheduling and speculation

NO_CHUNKED_PREFILL = _engine("enable_chunked_prefill=False", lambda c: not c.scheduler.enable_chunked_prefill)
SHORT_STEPS = Feature("max_num_batched_tokens below max_model_len", _has_short_steps)
MAX_ITL = _engine("max_itl", lambda c: c.scheduler.max_itl is not None)
LONG_PREFILL = _engine("long_prefill_token_threshold", lambda c: c.scheduler.long_prefill_token_threshold > 0)
ASYNC_SCHEDULING = _engine("async_scheduling", lambda c: bool(c.scheduler.async_scheduling))
SPECULATION = _engine("speculative_config", lambda c: c.scheduler.speculation is not None)
HOST_PROPOSERS = _engine("proposers on the host (speculative_config)", lambda c: _drafts(c, on_device=False))
DRAFTERS = _engine("drafters on the device (speculative_config)", lambda c: _drafts(c, on_device=True))

# ---- options: ranks and replicas

TENSOR_PARALLEL = _engine("tensor_parallel_size", lambda c: c.parallel.tensor_parallel_size > 1)
NO_TENSOR_PARALLEL = _engine(
    "a tensor_parallel_size of 2 or more", lambda c: c.parallel.tensor_parallel_size == 1, Kind.MISSING
)
PIPELINE_PARALLEL = _engine("pipeline_parallel_size", lambda c: c.parallel.pipeline_parallel_size > 1)
DECODE_CONTEXT = _engine("decode_context_parallel_size", lambda c: c.parallel.decode_context_parallel_size > 1)
PREFILL_CONTEXT = _engine("prefill_context_parallel_size", lambda c: c.parallel.prefill_context_parallel_size > 1)
SEQUENCE_PARALLEL = _engine("enable_sequence_parallel", lambda c: c.parallel.enable_sequence_parallel)
DATA_PARALLEL = _engine("data_parallel_size", lambda c: c.parallel.data_parallel_size > 1)
EXPERT_PARALLEL = _engine("enable_expert_parallel", lambda c: c.parallel.enable_expert_parallel)
NO_EXPERT_PARALLEL = _engine("enable_expert_parallel", lambda c: not c.parallel.enable_expert_parallel, Kind.MISSING)
SHARED_EXPERTS = _engine("enable_expert_parallel with data_parallel_size", lambda c: c.parallel.shares_experts)
NO_SHARED_EXPERTS = _engine(
    "enable_expert_parallel and data_parallel_size of at least 2", lambda c: not c.parallel.shares_experts, Kind.MISSING
)
EPLB = _engine("enable_eplb", lambda c: c.parallel.enable_eplb)
DBO = _engine("enable_dbo", lambda c: c.parallel.enable_dbo)
DEEP_EP = _engine(
    "all2all_backend of DeepEP",
    lambda c: c.parallel.all2all_backend in DEEP_EP_EXCHANGES and c.parallel.exchanges_tokens,
)
SYMMETRIC_MEMORY = _engine(
    "all2all_backend='symmetric_memory'",
    lambda c: c.parallel.all2all_backend == "symmetric_memory" and c.parallel.exchanges_tokens,
)

# ---- options: machines

RAY = _engine("Ray (distributed_executor_backend or data_parallel_backend)", lambda c: c.cluster.uses_ray)
RAY_REPLICAS = _engine("data_parallel_backend='ray'", lambda c: c.cluster.data_parallel_backend == "ray")
SEVERAL_MACHINES = _engine("nnodes", lambda c: c.cluster.nnodes > 1)
SPANNING_REPLICA = _engine("nnodes of one replica", _spans_machines)
REPLICAS_ELSEWHERE = _engine("replicas on other machines", lambda c: c.cluster.headless or len(c.layout.elsewhere) > 0)
HEADLESS = _engine("headless", lambda c: c.cluster.headless)
ONE_REPLICA_SERVER = _engine(
    "data_parallel_external_lb or data_parallel_rank",
    lambda c: c.cluster.data_parallel_external_lb or c.cluster.data_parallel_rank is not None,
)
HYBRID_LB = _engine("data_parallel_hybrid_lb", lambda c: c.cluster.data_parallel_hybrid_lb)
LOCAL_REPLICAS = _engine("data_parallel_size_local", lambda c: c.cluster.data_parallel_size_local not in (None, 1))
SEVERAL_SERVERS = _engine(
    "several servers", lambda c: not c.cluster.headless and len(c.layout.served) < c.parallel.data_parallel_size
)

# ---- options of the server

LORA_FOLDER = _server("lora_folder", lambda c: c.lora_folder is not None)
LORA_MODULES = _server("lora_modules", lambda c: bool(c.lora_modules))
WEIGHTS_FOLDER = _server("weights_folder", lambda c: c.weights_folder is not None)
NO_ADMIN_API = _server("enable_admin_api", lambda c: not c.enable_admin_api, Kind.MISSING)
API_PROCESSES = _server("api_server_count", lambda c: c.api_server_count > 1)
MEMORY_STORE = _server("response_store='memory'", lambda c: c.response_store == "memory")

# ---- what a model has

POOLING_MODEL = _model("no output but embeddings and scores (a pooling model)", lambda m: m.pools)
NO_CACHE = _model("no KV cache", lambda m: m.has_no_cache)
NO_EXPERTS = _model("no experts", lambda m: m.has_no_experts)
RECURRENT = _model("recurrent layers", lambda m: m.recurrent)
SPARSE = _model("sparse attention", lambda m: m.sparse)
LATENT = _model("latent attention", lambda m: m.latent)
WINDOWS = _model("sliding windows below max_model_len", lambda m: m.windows)
CHUNKS = _model("attention chunks", lambda m: m.chunks)
ALIBI = _model("linear biases (ALiBi)", lambda m: m.alibi)
SINKS = _model("learned attention sinks", lambda m: m.sinks)
DIFFERENT_HEADS = _model("layers with different heads", lambda m: m.different_heads)
SHARED_FIRST_VALUES = _model(
    "layers that all read the values of the first one or the token ids", lambda m: m.shares_first_values
)
LEARNED_POSITIONS = _model("learned positions, which it adds to embeddings", lambda m: m.learned_positions)
MEDIA = _model("pictures, sounds or texts of an encoder as inputs", lambda m: m.media)
TWO_WAY = _model("pictures whose tokens attend to each other in both directions", lambda m: m.two_way)
LEVELS = _model("pictures that also reach later layers", lambda m: m.levels)
CROSSED = _model("cross-attention", lambda m: m.crossed)

# ---- where it runs

IN_LLM = _place("in an LLM", lambda p: p.in_llm)
ON_CPU = _place("on a CPU", lambda p: p.on_cpu)
SHARED_GPU = _place("where ranks share a GPU", lambda p: p.shares_gpu)
STAGES_APART = _place("with a drafter that reads layers of other stages", lambda p: p.stages_apart)

# ---- requests to the engine

NEW_WEIGHTS = _operation("new weights", lambda o: o.replaces_weights)
DEEP_SLEEP = _operation("sleep at level 2", lambda o: o.drops_weights)
