"""All options, each declared once. Command-line flags and `LLM(...)` keyword arguments are made from these classes.

The names are vLLM's. options/vllm.toml lists the options of vLLM that Quire does not have.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self, get_type_hints

from quire.options.declaration import ConfigError as ConfigError
from quire.options.declaration import at_least, check_type, option, read_value
from quire.options.lora import LoRAConfig
from quire.options.speculative import SpeculativeOptions
from quire.options.vllm import FOREIGN, UNSUPPORTED_VALUES, VALUES, translate, unknown

_MAX_NUM_SEQS = 256

# The fields of structured_outputs_config, and their values. The last two are vLLM's, and have no effect.
STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "backend": ("auto", "guidance", "xgrammar", "outlines"),
    "disable_any_whitespace": (False, True),
    "disable_additional_properties": (False, True),
    "disable_fallback": (False, True),
    "enable_in_reasoning": (False,),
}

# Headings of the server's options in the help.
_HTTPS, _CORS, _LIMITS, _LOG = "HTTPS", "Web pages (CORS)", "Limits", "Log and metrics"
_STORE, _ADAPTERS = "Stored responses", "Adapters (LoRA)"


@dataclass(frozen=True)
class ModelConfig:
    """Model, tokenizer and chat template."""

    model: str | None = option(None, "checkpoint directory or Hugging Face id (default: the bundled model)")
    tokenizer: str | None = option(None, "directory or Hugging Face id of the tokenizer (default: the model's)")
    revision: str | None = option(None, "branch, tag or commit of the model on the Hugging Face hub")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer on the hub")
    download_dir: str | None = option(None, "directory for downloads from the hub (default: huggingface_hub's cache)")
    hf_token: str | None = option(
        None, "access token for gated models on the hub (default: the token that you logged in with)", empty=True
    )
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = option(
        "auto", "data type of weights and activations; auto is bfloat16"
    )
    max_model_len: int | None = option(
        None,
        "maximum number of tokens in prompt and output together; auto or -1 chooses the largest value for which the "
        "KV cache fits in memory, up to the model's own limit (default: the model's own limit)",
        size=True,
    )
    disable_sliding_window: bool = option(
        False, "limit max_model_len to the model's sliding window, so that every layer attends to all tokens"
    )
    hf_overrides: dict[str, Any] = option({}, "values that replace values of the model's config.json", json=True)
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        "auto", "dummy fills the weights with random values instead of reading the checkpoint's weights"
    )
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "what the model is for: generating text, or pooling (embeddings, scores); auto recognizes the checkpoint",
    )
    convert: Literal["auto", "none", "embed", "classify"] = option(
        "auto", "make embeddings, or the scores of a classifier, with a model that generates or has another head"
    )
    pooler_config: dict[str, Any] = option(
        {},
        'pooling of an embedding model or classifier, such as {"pooling_type": "MEAN", "normalize": true}',
        json=True,
    )
    quantization: str | None = option(
        None,
        "quantize dense weights while loading: int8 with one scale per channel, or int4 in groups of 128 (the "
        "language-model head in int8); activations are rounded to 8 bits. The name of a format (awq, gptq, fp8, "
        "compressed-tensors, gguf, mxfp4, ...) only checks the checkpoint's format (default: as in the checkpoint)",
        flags=("-q",),
    )
    enforce_eager: bool = option(
        False, "disable recorded steps and CUDA graphs: launch every kernel separately in each step"
    )
    torch_compile: bool = option(
        False,
        "let torch.compile fuse the operations between Quire's kernels (layer norms, routers, multipliers); the first "
        "steps of each kind then take seconds",
    )
    generation_config: str = option(
        "auto",
        "source of the default sampling parameters: auto reads the model's generation_config.json, a path reads the "
        "generation_config.json of that directory, vllm uses neutral values",
    )
    override_generation_config: dict[str, Any] = option(
        {}, "default sampling parameters that take precedence over the generation config", json=True
    )
    chat_template: str | None = option(None, "Jinja chat template, or the path of one (default: the model's)")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "form in which chat templates receive the content of a message: a string, or OpenAI's list of parts; auto "
        "detects the form from the template",
    )
    reasoning_parser: str | None = option(
        None,
        "format of the model's thinking, such as deepseek_r1 or qwen3, which separates it from the answer, or the "
        "import path of one; none leaves it in the answer (default: recognized from the chat template)",
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, 'variables for chat templates, such as {"enable_thinking": false}; requests can override them', json=True
    )
    seed: int = option(0, "seed of the engine; requests without a seed of their own draw one from it")

    def __post_init__(self) -> None:
        if self.max_model_len != -1:
            at_least(self, 1, "max_model_len")

    @property
    def dtype_name(self) -> str:
        """The data type in which the model computes, by its name in torch.

        "auto" is bfloat16 even for a float16 checkpoint, because CPUs compute float16 slowly.
        """
        return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class CacheConfig:
    """KV cache."""

    block_size: int = option(16, "tokens per block of the KV cache")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "int8", "fp8"] = option(
        "auto",
        "data type of the KV cache: auto is the model's type, and bfloat16 or float16 must equal that type; int8 and "
        "fp8 (e4m3) take one byte per value, with one scale per token and head",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts that begin with the same tokens")
    kv_cache_memory_bytes: int | None = option(
        None,
        "bytes for the KV cache, such as 4G (default on CPU: half of the free memory, but not more than max_num_seqs "
        "requests can use; on GPU: what gpu_memory_utilization leaves)",
        size=True,
    )
    gpu_memory_utilization: float = option(
        0.9, "fraction of the GPU's memory for weights, KV cache and activations, whatever other processes use"
    )
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, regardless of the memory")
    kv_cache_pretouch: bool = option(
        False,
        "touch all memory of the KV cache at start, so that it cannot run out later, and no request waits for the "
        "first touch, which is slow on some virtual machines",
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
    """Scheduling."""

    max_num_seqs: int = option(
        None, f"maximum number of running requests (default: {_MAX_NUM_SEQS}, or max_num_batched_tokens if less)"
    )
    max_num_batched_tokens: int | None = option(
        None, "maximum number of tokens per step; longer prompts are chunked (default: 512, on GPU 8192)", size=True
    )
    long_prefill_token_threshold: int = option(
        0,
        "maximum number of tokens of one request per step, so that long prompts leave room for others; 0 is no limit",
        size=True,
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "order in which requests are scheduled: first come, first served, or lowest priority value first"
    )
    async_scheduling: bool | None = option(
        None, "schedule the next step while the device runs the current one (default: only on a GPU)"
    )
    speculative_config: dict[str, Any] = option(
        {},
        "how the next tokens are guessed, to be verified by the model: method (such as ngram, suffix, draft_model, "
        "eagle3 or mtp), model (of the drafter), num_speculative_tokens, and more; see docs/speculation.md",
        json=True,
        flags=("-sc",),
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = option(
        "none",
        "what each answer of the server says about its drafts: nothing unless the request asks, a summary, or each "
        "verification too",
    )
    stream_interval: int = option(
        1, "number of tokens per streamed output; the first and the last output of a request are never delayed"
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "stream_interval")
        at_least(self, 0, "long_prefill_token_threshold")
        _ = self.speculation  # raises ConfigError
        if self.max_num_seqs is None:
            max_num_seqs = min(_MAX_NUM_SEQS, self.max_num_batched_tokens or _MAX_NUM_SEQS)
            object.__setattr__(self, "max_num_seqs", max_num_seqs)

    @property
    def speculation(self) -> SpeculativeOptions | None:
        return SpeculativeOptions.read(self.speculative_config) if self.speculative_config else None

    def tokens_of_a_step(self, gpu: bool) -> int:
        """The maximum number of tokens per step, with the device's default if the option is not given."""
        return self.max_num_batched_tokens or max(8192 if gpu else 512, self.max_num_seqs)


@dataclass(frozen=True)
class SamplingConfig:
    """Limits and plugins of sampling."""

    max_logprobs: int = option(20, "maximum number of logprobs per token that a request may ask for; -1 is no limit")
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = option(
        "raw_logprobs",
        "what logprobs contain: log-probabilities or logits, before (raw) or after (processed) penalties, temperature "
        "and the other sampling parameters are applied",
    )
    logits_processors: list[Any] = option(
        [], "plugins that modify logits: subclasses of LogitsProcessor, each written as package.module:Class"
    )
    structured_outputs_config: dict[str, Any] = option(
        {},
        "how outputs are constrained: backend (auto, guidance, xgrammar or outlines; auto is guidance), and for all "
        "requests disable_any_whitespace and disable_additional_properties (true or false)",
        json=True,
    )

    def __post_init__(self) -> None:
        at_least(self, -1, "max_logprobs")
        for name, value in self.structured_outputs_config.items():
            accepted = STRUCTURED_OUTPUTS.get(name)
            if accepted is None:
                raise ConfigError(f"structured_outputs_config has no field {name!r}: {', '.join(STRUCTURED_OUTPUTS)}")
            if value not in accepted:
                raise ConfigError(f"structured_outputs_config: {name} must be one of {accepted}, got {value!r}")


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism."""

    tensor_parallel_size: int = option(1, "number of processes that share each layer's weights", flags=("-tp",))

    def __post_init__(self) -> None:
        at_least(self, 1, "tensor_parallel_size")


@dataclass(frozen=True)
class KernelConfig:
    """Device and kernels."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model runs; auto chooses a GPU if available")
    attention_backend: str | None = option(
        None,
        "attention backend to use: triton, torch-varlen, flash-attn, cpu or reference; vLLM's names, such as "
        "FLASH_ATTN, are only preferences (default: the fastest that supports the model)",
    )
    cpu_isa: Literal["native", "avx512-bf16", "avx512-vnni", "avx512", "avx2"] = option(
        "native", "instruction set of the CPU kernels; native is the best that the processor supports"
    )
    kernels: dict[str, str] = option({}, 'implementations to use for ops, such as {"rms_norm": "reference"}', json=True)
    batch_invariant: bool = option(
        False,
        "on a GPU, compute each token in the same way in every batch, so that logits and samples do not depend on "
        "other requests, on chunks of prompts or on preemption; slower (on a CPU, Quire always computes in this way)",
    )


@dataclass(frozen=True)
class ServerConfig:
    """Server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 listens on all addresses")
    port: int = option(8000, "port to listen on; 0 chooses a free port")
    uds: str | None = option(None, "path of a Unix domain socket to listen on instead of host and port")
    api_key: list[str] = option(
        [],
        "API keys; each request must carry one of them as a bearer token or in the header x-api-key. Lists of "
        "processes show command lines: the environment variable QUIRE_API_KEY keeps a key secret",
    )
    served_model_name: list[str] = option([], "names of the model in the API (default: the value of --model)")
    root_path: str = option("", "path prefix of the server behind a proxy, such as /llm, stripped by the proxy or not")
    ssl_keyfile: str | None = option(None, "file of the private key for HTTPS", section=_HTTPS)
    ssl_certfile: str | None = option(None, "file of the certificate for HTTPS", section=_HTTPS)
    ssl_ca_certs: str | None = option(
        None, "file of the certificate authorities that sign clients' certificates", section=_HTTPS
    )
    ssl_cert_reqs: int = option(
        0, "certificates of clients: 0 does not ask for one, 1 checks it if present, 2 requires it", section=_HTTPS
    )
    ssl_ciphers: str | None = option(None, "ciphers for TLS 1.2 and below, in OpenSSL's notation", section=_HTTPS)
    allowed_origins: list[str] = option([], "web origins whose pages may call the server; * is all", section=_CORS)
    allowed_methods: list[str] = option(["*"], "HTTP methods that these pages may use", section=_CORS)
    allowed_headers: list[str] = option(["*"], "HTTP headers that these pages may send", section=_CORS)
    allow_credentials: bool = option(False, "allow requests with credentials (cookies) from these pages", section=_CORS)
    middleware: list[str] = option(
        [], "additional ASGI middleware by import path (package.module.name): classes or coroutine functions"
    )
    response_role: str = option("assistant", "role of generated chat messages; a continued message keeps its role")
    enable_auto_tool_choice: bool = option(
        False, "do not start if the format of the model's tool calls is unknown; if it is known, it is always used"
    )
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls, such as hermes, llama3_json or mistral, or the import path of one "
        "(package.module.FORMAT); none leaves calls in the text (default: recognized from the chat template)",
    )
    enable_force_include_usage: bool = option(False, "send the usage at the end of every stream, requested or not")
    return_tokens_as_token_ids: bool = option(False, "by default, write tokens in logprobs as 'token_id:42'")
    disable_fastapi_docs: bool = option(False, "do not serve /docs and /openapi.json")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "warning", "log level of the HTTP library", section=_LOG
    )
    max_waiting_requests: int | None = option(
        None, "answer 429 to new requests while this many requests are waiting (default: no limit)", section=_LIMITS
    )
    request_timeout: float | None = option(
        None, "seconds after which a request is aborted (default: never)", section=_LIMITS
    )
    drain_timeout: float = option(
        30.0,
        "seconds that running requests have to finish after SIGTERM; the rest ends with an error",
        flags=("--shutdown-timeout",),
        section=_LIMITS,
    )
    max_body_bytes: int = option(64 << 20, "maximum size of a request's body in bytes", size=True, section=_LIMITS)
    max_total_body_bytes: int = option(
        256 << 20,
        "maximum total size in bytes of the bodies being read, parsed or tokenized; further requests are answered 503",
        size=True,
        section=_LIMITS,
    )
    max_generated_tokens: int | None = option(
        None,
        "maximum number of tokens that a request may ask for: prompts x n x max_tokens (default: no limit)",
        size=True,
        section=_LIMITS,
    )
    response_store: str | None = option(
        None,
        "where /v1/responses keeps responses: a file of SQLite, a database (postgresql://USER@HOST/NAME) that several "
        "servers share, or memory (default: responses.sqlite3 in the user's state folder)",
        section=_STORE,
    )
    response_store_bytes: int = option(
        1 << 30,
        "maximum total size of stored responses; those that were not used for the longest time are deleted",
        size=True,
        section=_STORE,
    )
    response_store_days: float = option(
        30.0, "days after which a stored response is deleted if it was not continued", section=_STORE
    )
    lora_modules: list[str] = option(
        [], "adapters to serve, each as name=path or a JSON object (name, path, base_model_name)", section=_ADAPTERS
    )
    lora_folder: str | None = option(None, "folder below which clients may load adapters", section=_ADAPTERS)
    enable_admin_api: bool = option(False, "let clients load and unload adapters: /v1/load_lora_adapter")
    trust_request_chat_template: bool = option(
        False, "accept chat templates in requests; a malicious template can keep a core busy without end"
    )
    metrics_prefix: str = option(
        "quire", "prefix of the metrics' names; vllm makes dashboards for vLLM work", section=_LOG
    )
    enable_log_requests: bool = option(
        False,
        "log each request on arrival with its sampling parameters, and each of its sequences at its end with tokens "
        "and times; --log-level DEBUG adds the prompt",
        section=_LOG,
    )
    max_log_len: int | None = option(
        None, "maximum number of characters and of token ids of a prompt in the log (default: all)", section=_LOG
    )
    disable_uvicorn_access_log: bool = option(
        False, "do not log successful HTTP requests; refused requests are always logged", section=_LOG
    )
    disable_access_log_for_endpoints: str = option(
        "/health,/ping,/version,/metrics,/load",
        "comma-separated paths whose successful requests are not logged",
        section=_LOG,
    )
    disable_log_stats: bool = option(
        False,
        "disable the engine's statistics: no periodic log line, no line at the end of a sequence, and /metrics covers "
        "only HTTP requests and the process",
        section=_LOG,
    )

    def __post_init__(self) -> None:
        at_least(self, 0, "port", "max_waiting_requests", "max_log_len")
        at_least(self, 1, "max_body_bytes", "max_total_body_bytes", "max_generated_tokens", "response_store_bytes")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
        if not self.response_store_days > 0:
            raise ConfigError(f"response_store_days must be a number of days above 0, got {self.response_store_days!r}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, the authorities that sign clients' certificates")
        if (self.ssl_ca_certs or self.ssl_ciphers) and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs and ssl_ciphers need ssl_certfile and ssl_keyfile")

    @classmethod
    def create(cls, **options: Any) -> Self:
        """From options by their names, `create(port=8080)`. Raises ConfigError."""
        given = {canonical_name(name): value for name, value in options.items()}
        for name in given:
            if name not in OPTIONS[cls]:
                raise ConfigError(unknown(name, OPTIONS[cls]))
        return cls(**_checked(given))


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        kv_dtype = self.cache.kv_cache_dtype
        dtype = self.model.dtype_name
        if kv_dtype in ("bfloat16", "float16") and kv_dtype != dtype:
            raise ConfigError(
                f"kv_cache_dtype={kv_dtype!r} needs dtype={kv_dtype!r}, but dtype is {dtype!r}; leave one at auto"
            )
        if self.lora.enable_lora and self.model.torch_compile:
            raise ConfigError("enable_lora and torch_compile exclude each other; leave one of the two out")
        if self.kernels.batch_invariant and self.model.torch_compile:
            raise ConfigError(
                "batch_invariant and torch_compile exclude each other: what torch.compile generates depends on the "
                "sizes of the batch; leave one of the two out"
            )

    @classmethod
    def create(cls, **options: Any) -> Self:
        """From flat options, `create(max_model_len=2048, block_size=32)`. Raises ConfigError."""
        given = {canonical_name(name): value for name, value in options.items()}
        if misplaced := [name for name in given if name in OPTIONS[ServerConfig] and name not in FOREIGN]:
            raise ConfigError(f"{misplaced[0]} is an option of the server (quire serve)")
        engine_names = {name for config in GROUPS.values() for name in OPTIONS[config]}
        values = _checked(translate(given, engine_names, others=OPTIONS[ServerConfig]))
        groups = {group: {n: v for n, v in values.items() if n in OPTIONS[config]} for group, config in GROUPS.items()}
        return cls(**{group: config(**groups[group]) for group, config in GROUPS.items()})


GROUPS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "sampling": SamplingConfig,
    "parallel": ParallelConfig,
    "kernels": KernelConfig,
    "lora": LoRAConfig,
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
    """The option's name in config.py. `name` may be written with dashes, or be another name of the option."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def read_option(name: str, value: Any) -> Any:
    """The value of an option given as text, as a torch.dtype or in vLLM's spelling. Raises ConfigError."""
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
    """The values as `read_option` reads them, without those that are None. Raises ConfigError for a wrong type."""
    values = {name: read_option(name, value) for name, value in options.items() if value is not None}
    for name, value in values.items():
        if value is not None:
            check_type(name, value, TYPES[name])
    return {name: value for name, value in values.items() if value is not None}
