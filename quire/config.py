"""Every option, once. Command-line flags and `LLM(...)` keyword arguments are made from these classes.

Names are vLLM's. options/vllm.py says what becomes of options that vLLM has and Quire does not have.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self, get_type_hints

from quire.options.declaration import ConfigError as ConfigError
from quire.options.declaration import at_least, check_type, option, read_value
from quire.options.vllm import FOREIGN, UNSUPPORTED_VALUES, VALUES, translate, unknown

_MAX_NUM_SEQS = 256

# Sections of the server's options in the help.
_HTTPS, _CORS, _LIMITS, _LOG = "HTTPS", "Web pages (CORS)", "Limits", "Log and metrics"


@dataclass(frozen=True)
class ModelConfig:
    """The model and its text side."""

    model: str | None = option(None, "a checkpoint directory or a Hugging Face id; the bundled model if left out")
    tokenizer: str | None = option(None, "directory or id of the tokenizer, if it is not the model's")
    revision: str | None = option(None, "branch, tag or commit of the model on the hub")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer on the hub")
    download_dir: str | None = option(None, "where hub downloads are kept (default: huggingface_hub's cache)")
    hf_token: str | None = option(
        None, "token for gated models on the hub (default: the one you logged in with)", empty=True
    )
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = option(
        "auto", "type of weights and activations; auto is bfloat16"
    )
    max_model_len: int | None = option(
        None,
        "longest prompt + output in tokens; auto or -1 takes the longest, up to the model's, whose keys and values fit "
        "memory (default: the model's)",
        size=True,
    )
    disable_sliding_window: bool = option(
        False, "limit max_model_len to the model's sliding window, so that every layer sees all tokens"
    )
    hf_overrides: dict[str, Any] = option({}, "values that replace those of the model's config.json", json=True)
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        "auto", "dummy draws random weights of the right shapes instead of reading the checkpoint's"
    )
    quantization: str | None = option(
        None,
        "quantize dense weights when they are loaded: int8 with a scale a channel, or int4 in groups of 128 (the "
        "language-model head int8); activations are rounded to 8 bits. The name of a format (awq, gptq, fp8, "
        "compressed-tensors, gguf, mxfp4, ...) only checks that the checkpoint has it (default: as the checkpoint is)",
        flags=("-q",),
    )
    enforce_eager: bool = option(
        False, "call every kernel anew in each step, instead of replaying recorded calls or CUDA graphs"
    )
    torch_compile: bool = option(
        False,
        "have torch.compile fuse what lies between Quire's kernels (layer norms, routers, multipliers); the first "
        "steps of each kind then take seconds",
    )
    generation_config: str = option(
        "auto",
        "where default sampling parameters come from: the model's generation_config.json (auto), that of another "
        "directory (its path), or nowhere: neutral ones (vllm)",
    )
    override_generation_config: dict[str, Any] = option(
        {}, "default sampling parameters that win over those of the generation config", json=True
    )
    chat_template: str | None = option(None, "a Jinja template, or the file of one, instead of the model's")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "what chat templates get as a message's content: a string, or OpenAI's list of parts; auto sees what the "
        "template takes",
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, 'variables for chat templates, such as {"enable_thinking": false}; a request\'s own win', json=True
    )
    seed: int = option(0, "seed from which requests without a seed draw theirs")

    def __post_init__(self) -> None:
        if self.max_model_len != -1:
            at_least(self, 1, "max_model_len")

    @property
    def dtype_name(self) -> str:
        """torch's name of the type in which the model computes. "auto" is bfloat16, whatever the checkpoint's type is:
        processors compute float16 slowly."""
        return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(16, "tokens in a KV block")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "int8", "fp8"] = option(
        "auto",
        "type of the keys and values that are kept: auto is the model's, which bfloat16 and float16 must equal; int8 "
        "and fp8 (e4m3) take one byte, and have a scale for each token and head",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal beginnings")
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache (default on CPU: half of what is free, at most what all rows could use; on GPU: what "
        "--gpu-memory-utilization leaves)",
        size=True,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory for weights, KV cache and steps together, whatever else is on it"
    )
    num_gpu_blocks_override: int | None = option(None, "use this many KV blocks, whatever the memory")
    kv_cache_pretouch: bool = option(
        False,
        "use all memory of the KV cache once at start: it cannot be missing later, and first use is slow on some "
        "virtual machines",
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "block_size", "kv_cache_memory_bytes")
        at_least(self, 2, "num_gpu_blocks_override")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_seqs: int = option(
        None, f"requests that run at once (default: {_MAX_NUM_SEQS}, or max_num_batched_tokens if that is less)"
    )
    max_num_batched_tokens: int | None = option(
        None, "tokens that a step computes: the chunk of chunked prefill (default: 512 on CPU, 8192 on GPU)", size=True
    )
    long_prefill_token_threshold: int = option(
        0,
        "longest chunk of one request in a step, in tokens: long prompts leave room for others (0: no limit)",
        size=True,
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "order of service: first come first served, or lowest priority value first"
    )
    async_scheduling: bool | None = option(
        None, "schedule a step while the device runs the one before (default: on GPU, where it hides the host's work)"
    )
    stream_interval: int = option(
        1, "tokens between two outputs of a stream; the first and the last output of a request come at once"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "stream_interval")
        at_least(self, 0, "long_prefill_token_threshold")
        if self.max_num_seqs is None:
            fewest = min(_MAX_NUM_SEQS, self.max_num_batched_tokens or _MAX_NUM_SEQS)
            object.__setattr__(self, "max_num_seqs", fewest)

    def tokens_of_a_step(self, gpu: bool) -> int:
        """At most."""
        return self.max_num_batched_tokens or max(8192 if gpu else 512, self.max_num_seqs)


@dataclass(frozen=True)
class SamplingConfig:
    """What requests may ask of sampling."""

    max_logprobs: int = option(20, "most logprobs that a request may ask for at each place; -1 for no limit")
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = option(
        "raw_logprobs",
        "report log-probabilities or logits; of the model's output, or as penalties, temperature and the like leave it",
    )
    logits_processors: list[Any] = option(
        [], "plugins that change logits: subclasses of LogitsProcessor, each as package.module:Class"
    )

    def __post_init__(self) -> None:
        at_least(self, -1, "max_logprobs")


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes share the model."""

    tensor_parallel_size: int = option(1, "processes that split every layer's weights between them", flags=("-tp",))

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size")


@dataclass(frozen=True)
class KernelConfig:
    """Where the model runs, and which implementation of each operation."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model runs; auto: a GPU if there is one")
    attention_backend: str | None = option(
        None,
        "pin the attention backend: triton, torch-varlen, flash-attn, cpu, reference; vLLM's names, such as "
        "FLASH_ATTN, are preferences (default: the best that applies)",
    )
    cpu_isa: Literal["native", "avx512", "avx2"] = option(
        "native", "instructions that the CPU kernels may use: all that the processor has, or those of older ones"
    )
    kernels: dict[str, str] = option({}, "pin implementations of ops, such as {'rms_norm': 'reference'}", json=True)


@dataclass(frozen=True)
class ServerConfig:
    """The server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 for any that is free")
    uds: str | None = option(None, "listen on this Unix domain socket instead")
    api_key: list[str] = option(
        [],
        "keys of which a request must carry one as a bearer token; they show in lists of processes, other than one in "
        "the environment variable QUIRE_API_KEY",
    )
    served_model_name: list[str] = option([], "names of the model in the API (default: as --model says)")
    root_path: str = option("", "path at which a proxy serves this server, such as /llm; it may strip it or not")
    ssl_keyfile: str | None = option(None, "private key for HTTPS", section=_HTTPS)
    ssl_certfile: str | None = option(None, "certificate for HTTPS", section=_HTTPS)
    ssl_ca_certs: str | None = option(
        None, "certificates of the authorities that sign clients' certificates", section=_HTTPS
    )
    ssl_cert_reqs: int = option(
        0, "whether clients must show a certificate: 0 no, 1 it is checked if they do, 2 yes", section=_HTTPS
    )
    ssl_ciphers: str | None = option(None, "ciphers for TLS 1.2 and below, in OpenSSL's notation", section=_HTTPS)
    allowed_origins: list[str] = option([], "web origins whose pages may call the server; * for all", section=_CORS)
    allowed_methods: list[str] = option(["*"], "HTTP methods that those pages may use", section=_CORS)
    allowed_headers: list[str] = option(["*"], "HTTP headers that those pages may send", section=_CORS)
    allow_credentials: bool = option(False, "let browsers send cookies and the like from those pages", section=_CORS)
    middleware: list[str] = option(
        [], "further ASGI middleware, by import path (package.module.name): a class, or a coroutine function"
    )
    response_role: str = option("assistant", "role of the answer in chats that ask for a new message")
    enable_force_include_usage: bool = option(False, "end every stream with the usage, as if it were asked for")
    return_tokens_as_token_ids: bool = option(False, "name tokens in logprobs 'token_id:42', unless a request differs")
    disable_fastapi_docs: bool = option(False, "serve neither /docs nor /openapi.json")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "warning", "how much the HTTP library logs", section=_LOG
    )
    max_waiting_requests: int | None = option(
        None,
        "answer 429 to a request that would find this many waiting ones before it (default: no limit)",
        section=_LIMITS,
    )
    request_timeout: float | None = option(
        None, "seconds after which a request is ended (default: never)", section=_LIMITS
    )
    drain_timeout: float = option(
        30.0,
        "seconds that running requests get to finish after SIGTERM; then they end with an error",
        flags=("--shutdown-timeout",),
        section=_LIMITS,
    )
    max_body_bytes: int = option(64 << 20, "largest body of a request", size=True, section=_LIMITS)
    max_total_body_bytes: int = option(
        256 << 20,
        "most bytes of all bodies that are read, parsed or tokenized at once; beyond it, answer 503",
        size=True,
        section=_LIMITS,
    )
    max_generated_tokens: int | None = option(
        None,
        "most tokens that a request may ask for: prompts x n x max_tokens (default: no limit)",
        size=True,
        section=_LIMITS,
    )
    trust_request_chat_template: bool = option(
        False, "render chat templates that requests bring; a template can keep a core busy for as long as it likes"
    )
    metrics_prefix: str = option(
        "quire", "first part of the metrics' names; vllm fits dashboards made for that", section=_LOG
    )
    enable_log_requests: bool = option(
        False,
        "log each request when it arrives, with its sampling parameters, and each of its sequences when it ends, with "
        "its tokens and times; --log-level DEBUG adds the prompt",
        section=_LOG,
    )
    max_log_len: int | None = option(
        None, "most characters, and token ids, of a prompt in the log of requests (default: all)", section=_LOG
    )
    disable_uvicorn_access_log: bool = option(
        False, "do not log HTTP requests that succeed; those that are refused are logged in any case", section=_LOG
    )
    disable_access_log_for_endpoints: str = option(
        "/health,/ping,/version,/metrics,/load",
        "paths, separated by commas, of which requests that succeed are not logged",
        section=_LOG,
    )
    disable_log_stats: bool = option(
        False,
        "keep no statistics of the engine: no periodic log line, no line when a sequence ends, and /metrics shows HTTP "
        "requests and the process alone",
        section=_LOG,
    )

    def __post_init__(self) -> None:
        at_least(self, 0, "port", "max_waiting_requests", "max_log_len")
        at_least(self, 1, "max_body_bytes", "max_total_body_bytes", "max_generated_tokens")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, to check clients' certificates against")
        if (self.ssl_ca_certs or self.ssl_ciphers) and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs and ssl_ciphers need ssl_certfile and ssl_keyfile")

    @classmethod
    def create(cls, **options: Any) -> Self:
        """Raises ConfigError."""
        names = {canonical_name(name): value for name, value in options.items()}
        for name in names:
            if name not in OPTIONS[cls]:
                raise ConfigError(unknown(name, OPTIONS[cls]))
        return cls(**_checked(names))


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        kept = self.cache.kv_cache_dtype
        computed = self.model.dtype_name
        if kept in ("bfloat16", "float16") and kept != computed:
            raise ConfigError(
                f"kv_cache_dtype={kept!r} needs dtype={kept!r}, but dtype is {computed!r}; leave one of them at auto"
            )

    @classmethod
    def create(cls, **options: Any) -> Self:
        """From flat options, `create(max_model_len=2048, block_size=32)`. Raises ConfigError."""
        names = {canonical_name(name): value for name, value in options.items()}
        if misplaced := [name for name in names if name in OPTIONS[ServerConfig] and name not in FOREIGN]:
            raise ConfigError(f"{misplaced[0]} is an option of the server (quire serve)")
        engine_names = {name for config in GROUPS.values() for name in OPTIONS[config]}
        given = _checked(translate(names, engine_names, others=OPTIONS[ServerConfig]))
        groups = {group: {n: v for n, v in given.items() if n in OPTIONS[config]} for group, config in GROUPS.items()}
        return cls(**{group: config(**groups[group]) for group, config in GROUPS.items()})


GROUPS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "sampling": SamplingConfig,
    "parallel": ParallelConfig,
    "kernels": KernelConfig,
}
_CLASSES: list[Any] = [*GROUPS.values(), ServerConfig]
OPTIONS: dict[Any, dict[str, Field[Any]]] = {c: {f.name: f for f in fields(c)} for c in _CLASSES}
TYPES: dict[str, Any] = {name: hint for c in _CLASSES for name, hint in get_type_hints(c).items()}
ALIASES: dict[str, str] = {
    flag.removeprefix("--").replace("-", "_"): name
    for options in OPTIONS.values()
    for name, declared in options.items()
    for flag in declared.metadata.get("flags", ())
    if flag.startswith("--")
}


def canonical_name(name: str) -> str:
    """The name of an option that is written with dashes, or known by another name as well."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def read_option(name: str, value: Any) -> Any:
    """The value that a text, a type of torch's or a spelling of vLLM's stands for. Raises ConfigError."""
    if name == "dtype":
        value = str(value).removeprefix("torch.")
    spellings = VALUES.get(name, {})
    if isinstance(value, str | bool) and value in spellings:
        return spellings[value]
    if isinstance(value, str) and value in UNSUPPORTED_VALUES.get(name, ()):
        raise ConfigError(f"{name}={value!r} is not supported by Quire yet")
    owner = next(config for config in _CLASSES if name in OPTIONS[config])
    return read_value(name, value, TYPES[name], OPTIONS[owner][name].metadata)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a value of the wrong type. None stands for an option that is left out."""
    values = {name: read_option(name, value) for name, value in options.items() if value is not None}
    for name, value in values.items():
        if value is not None:
            check_type(name, value, TYPES[name])
    return {name: value for name, value in values.items() if value is not None}
