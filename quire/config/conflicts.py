"""The table of features that cannot be combined. Only this module decides whether two features can be combined.

An error names the first row that applies, so more specific rows come first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from quire.config import features as f
from quire.config.declaration import ConfigError
from quire.config.features import Feature, Kind, Setup

_ONE_OF_TWO = "leave one of the two out"
_OUT = "leave it out"


@dataclass(frozen=True)
class Conflict:
    """Two features that cannot be combined. The kind of the second one decides how the message begins. instead: the
    suggested action, by default to omit an option.
    """

    a: Feature
    b: Feature
    reason: str
    instead: str = ""

    @property
    def text(self) -> str:
        beginning = self.b.kind.value.format(a=self.a.name, b=self.b.name)
        instead = self.instead or (_ONE_OF_TWO if self.b.kind is Kind.OPTION else _OUT)
        return f"{beginning}, since {self.reason}; {instead}"


def _each(given: tuple[Feature, ...], b: Feature, reason: str, instead: str = "") -> Iterator[Conflict]:
    """Return a row for each of the given features."""
    return (Conflict(a, b, reason, instead) for a in given)


def _with_each(a: Feature, others: tuple[Feature, ...], reason: str, instead: str = "") -> Iterator[Conflict]:
    return (Conflict(a, b, reason, instead) for b in others)


_CONTEXTS = (f.DECODE_CONTEXT, f.PREFILL_CONTEXT)
_MACHINES = (
    Conflict(f.HEADLESS, f.RAY_REPLICAS, "Ray starts the replicas on the other machines", "leave headless out there"),
    Conflict(f.SEVERAL_MACHINES, f.RAY, "Ray finds the machines", "leave nnodes out, or take the backend mp"),
    Conflict(
        f.DATA_PARALLEL,
        f.SPANNING_REPLICA,
        "several replicas that span machines need distributed_executor_backend=ray",
        "choose it and leave nnodes out, or lower one of the two",
    ),
    *_with_each(f.ONE_REPLICA_SERVER, (f.HEADLESS, f.HYBRID_LB, f.LOCAL_REPLICAS), "each server has one replica then"),
    Conflict(
        f.SHARED_EXPERTS,
        f.SEVERAL_SERVERS,
        "replicas that share experts need one server for all",
        "give the other machines headless",
    ),
)
_RANKS = (
    Conflict(f.EPLB, f.NO_EXPERT_PARALLEL, "it moves experts between ranks"),
    Conflict(f.DBO, f.NO_SHARED_EXPERTS, "it hides the exchange of tokens between replicas that share experts"),
    Conflict(f.DBO, f.PREFILL_CONTEXT, "both divide the tokens of a step"),
    Conflict(f.SEQUENCE_PARALLEL, f.NO_TENSOR_PARALLEL, "it divides tokens among tensor-parallel ranks"),
    Conflict(f.DEEP_EP, f.NOT_BFLOAT16, "DeepEP exchanges bfloat16 between GPUs", "leave the option out, or set dtype"),
    Conflict(f.DEEP_EP, f.ON_CPU, "DeepEP exchanges bfloat16 between GPUs"),
    Conflict(f.SYMMETRIC_MEMORY, f.ON_CPU, "its kernels read the memory of other GPUs"),
    *_with_each(
        f.LORA,
        (f.DEEP_EP, f.SYMMETRIC_MEMORY),
        "these kernels send no adapters with the tokens",
        "leave all2all_backend out",
    ),
    Conflict(f.LORA, f.EPLB, "adapters stay with the ranks whose experts they were loaded for"),
    Conflict(f.EXPERT_PARALLEL, f.NO_EXPERTS, "it divides the experts among ranks"),
    *_each(_CONTEXTS, f.NO_CACHE, "it divides the KV cache"),
    *_each(_CONTEXTS, f.RECURRENT, "it divides the keys of a text, and a recurrent layer has none"),
    *_each(_CONTEXTS, f.CHUNKS, "ranks cannot divide a chunk"),
    *_each(_CONTEXTS, f.SHARED_GPU, "each rank needs a GPU of its own", "lower it, or use device=cpu"),
    Conflict(f.DBO, f.RECURRENT, "it computes a step in halves, which recurrent layers do not allow"),
    Conflict(f.PIPELINE_PARALLEL, f.SHARED_FIRST_VALUES, "later stages lack them"),
    Conflict(
        f.PIPELINE_PARALLEL,
        f.STAGES_APART,
        "the stage of the drafter lacks their outputs",
        "lower it, or give pipeline_layers",
    ),
)
_MODEL = (
    *_with_each(
        f.TRANSFORMERS,
        (
            f.PREFILL_CONTEXT,
            f.EXPERT_PARALLEL,
            f.TORCH_COMPILE,
            f.NO_SLIDING_WINDOW,
            f.COMPRESSION,
            f.BATCH_INVARIANT,
            f.PROMPT_EMBEDS,
            f.NVTX,
            f.DRAFTERS,
        ),
        "its forward is transformers' code, without this feature",
    ),
    Conflict(f.BFLOAT16_CACHE, f.NOT_BFLOAT16, "keys are stored as they are computed", "leave one at auto"),
    Conflict(f.FLOAT16_CACHE, f.NOT_FLOAT16, "keys are stored as they are computed", "leave one at auto"),
    *_each(
        (f.INT8_CACHE, f.FP8_CACHE),
        f.ALIBI,
        "keys hold positions, which one byte cannot tell apart",
        "leave it at auto",
    ),
    Conflict(f.LORA, f.TORCH_COMPILE, "the adapters of a step change after the model is compiled"),
    Conflict(f.LORA, f.POOLING_MODEL, "adapters are for models that generate"),
    Conflict(f.BATCH_INVARIANT, f.TORCH_COMPILE, "what torch.compile generates depends on the sizes of the batch"),
    Conflict(f.LORA_MODULES, f.NO_LORA, "it names adapters to load"),
)
_SCHEDULING = (
    *_with_each(f.NO_CHUNKED_PREFILL, (f.MAX_ITL, f.LONG_PREFILL), "the latter divides prompts into chunks"),
    Conflict(
        f.NO_CHUNKED_PREFILL,
        f.SHORT_STEPS,
        "a prompt is computed in one step",
        "raise max_num_batched_tokens to at least max_model_len, or leave it out",
    ),
    Conflict(
        f.ASYNC_SCHEDULING, f.HOST_PROPOSERS, "proposers on the host need the results of a step before the next one"
    ),
    Conflict(
        f.PREFILL_CONTEXT,
        f.DRAFTERS,
        "ranks would not know which tokens are theirs",
        "leave one of the two out, or use a method like ngram",
    ),
    Conflict(f.SPECULATION, f.POOLING_MODEL, "a model that pools generates nothing"),
)
_CACHE = (
    Conflict(
        f.KV_EVENTS, f.NO_PREFIX_CACHING, "events tell what the prefix cache has", "leave enable_prefix_caching at true"
    ),
    Conflict(
        f.TRANSFER,
        f.NO_PREFIX_CACHING,
        "what comes from other engines is found as cached prefixes",
        "leave no_enable_prefix_caching out",
    ),
    Conflict(
        f.TIERS, f.NO_PREFIX_CACHING, "what they keep is found as cached prefixes", "leave no_enable_prefix_caching out"
    ),
    *_with_each(f.COMPRESSION, (f.INT8_CACHE, f.FP8_CACHE), "cells of one byte cannot be moved"),
    Conflict(f.COMPRESSION, f.PIPELINE_PARALLEL, "layers share budgets"),
    *_with_each(f.COMPRESSION, (f.PREFILL_CONTEXT, f.DECODE_CONTEXT), "scores need whole contexts"),
    Conflict(f.COMPRESSION, f.DBO, "the halves of a step would have to be planned apart"),
    Conflict(f.COMPRESSION, f.DRAFTERS, "drafters keep their entries in the same blocks"),
    Conflict(f.COMPRESSION, f.BATCH_INVARIANT, "attention by head sums up in another order"),
    Conflict(f.COMPRESSION, f.TORCH_COMPILE, "layers plan attention by head"),
    Conflict(f.COMPRESSION, f.MAX_ITL, "a step must have room for a whole window"),
    Conflict(f.COMPRESSION, f.TWO_WAY, "tokens of a picture see each other"),
    Conflict(f.COMPRESSION, f.CROSSED, "keys of an encoder are not scored"),
    Conflict(f.COMPRESSION, f.NO_CACHE, "there is nothing to compress"),
    Conflict(f.COMPRESSION, f.RECURRENT, "their states are not keys that could be scored"),
    Conflict(f.COMPRESSION, f.LATENT, "all heads share one entry of a token"),
    Conflict(f.COMPRESSION, f.WINDOWS, "such a layer drops keys by their age"),
    Conflict(f.COMPRESSION, f.ALIBI, "scores depend on positions that moved keys no longer have"),
    Conflict(f.COMPRESSION, f.SINKS, "they take part in the scores"),
    Conflict(f.COMPRESSION, f.CHUNKS, "such a layer drops keys by their age"),
    Conflict(f.COMPRESSION, f.DIFFERENT_HEADS, "layers share the slices of a block"),
    Conflict(f.COMPRESSION, f.LAYER_BY_LAYER, "layers share the slices of a block"),
    *_with_each(f.TRANSFER, (f.PREFILL_CONTEXT,), "prefill_context_parallel_size divides blocks"),
    *_with_each(f.TRANSFER, (f.DECODE_CONTEXT,), "decode_context_parallel_size divides blocks"),
    Conflict(f.TRANSFER, f.COMPRESSION, "kv_compression gives blocks another meaning"),
    Conflict(f.TRANSFER, f.DRAFTERS, "drafters need entries of their own, which are not exchanged"),
    Conflict(
        f.PRODUCER,
        f.REPLICAS_ELSEWHERE,
        "consumers look for all replicas at one address",
        "run a server on each machine, and let quire route share out requests",
    ),
    Conflict(f.INSECURE_TRANSFERS, f.CLUSTER_SECRET, "the secret secures transfers", "leave one of them out"),
    Conflict(f.PRODUCER, f.SPANNING_REPLICA, "consumers look for all ranks at one address, and nnodes divides them"),
    Conflict(f.PRODUCER, f.RAY, "consumers must know where the ranks are, and Ray decides that"),
    Conflict(
        f.WHOLE_BLOCKS,
        f.LAYER_BY_LAYER,
        "these transports move whole blocks, whose bytes must be adjacent",
        "choose kv_connector='QuireConnector', which exchanges blocks between both layouts",
    ),
    Conflict(f.TRANSFER, f.RECURRENT, "engines exchange keys and values, but no states"),
)
_MEDIA = (
    *_each((f.PREFILL_CONTEXT, f.SEQUENCE_PARALLEL), f.MEDIA, "ranks divide tokens"),
    *_each((f.PREFILL_CONTEXT, f.SEQUENCE_PARALLEL), f.PROMPT_EMBEDS, "ranks divide tokens"),
    Conflict(f.DBO, f.MEDIA, "steps are divided"),
    Conflict(f.DBO, f.PROMPT_EMBEDS, "steps are divided"),
    Conflict(f.COMPRESSION, f.PROMPT_EMBEDS, "keys of embeddings are not scored"),
    Conflict(f.PIPELINE_PARALLEL, f.TWO_WAY, "later stages lack them"),
    Conflict(f.PIPELINE_PARALLEL, f.LEVELS, "later stages lack them"),
    Conflict(f.PIPELINE_PARALLEL, f.CROSSED, "later stages lack the encoder's output"),
    Conflict(f.DECODE_CONTEXT, f.TWO_WAY, "ranks divide a picture's tokens"),
    Conflict(f.DECODE_CONTEXT, f.CROSSED, "cross-attention reads one context"),
    Conflict(f.MAX_ITL, f.TWO_WAY, "a picture is computed in one step"),
    Conflict(f.TRANSFER, f.CROSSED, "keys of an encoder are not sent"),
    Conflict(f.PROMPT_EMBEDS, f.LEARNED_POSITIONS, "given embeddings have no such positions"),
)
_INTERFACE = (
    Conflict(f.API_PROCESSES, f.LORA_FOLDER, "adapters are loaded into one API process"),
    Conflict(f.LORA_FOLDER, f.NO_ADMIN_API, "clients load its adapters by that API"),
    Conflict(f.WEIGHTS_FOLDER, f.NO_ADMIN_API, "clients replace the weights by that API"),
    Conflict(f.API_PROCESSES, f.MEMORY_STORE, "processes share a file or a database only", "name one of these"),
    Conflict(f.API_PROCESSES, f.HEADLESS, "there is no API on this machine", "leave api_server_count out"),
    Conflict(f.DATA_PARALLEL, f.IN_LLM, "it runs one core, in this process", "use quire serve or AsyncLLM"),
    Conflict(f.HEADLESS, f.IN_LLM, "it is for other machines of quire serve"),
    Conflict(f.LORA, f.NEW_WEIGHTS, "adapters were trained for the weights in use", "start another engine with them"),
    Conflict(f.EPLB, f.NEW_WEIGHTS, "it has moved experts", "start another engine with them"),
    Conflict(f.TRANSFER, f.NEW_WEIGHTS, "other engines would not know of it", "start another engine with them"),
    Conflict(f.EPLB, f.DEEP_SLEEP, "it has moved experts", "sleep at level 1"),
)
CONFLICTS = (*_MACHINES, *_RANKS, *_MODEL, *_SCHEDULING, *_CACHE, *_MEDIA, *_INTERFACE)


def check(setup: Setup) -> None:
    """Raises ConfigError for features that cannot be combined."""

    @cache
    def is_on(feature: Feature) -> bool:
        return feature.is_on(setup)

    for conflict in CONFLICTS:
        if is_on(conflict.a) and is_on(conflict.b):
            raise ConfigError(conflict.text)
