"""All options, each declared once. Command-line flags and `LLM(...)` keyword arguments are made from these classes.

The names are vLLM's. cli/options.toml describes each option, and is the text of `--help`. config/vllm.toml lists the
options of vLLM that Quire does not have.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, Self, get_type_hints

from quire.config.cache import CacheConfig as CacheConfig
from quire.config.cluster import ClusterConfig, Layout
from quire.config.conflicts import check
from quire.config.declaration import ConfigError as ConfigError
from quire.config.declaration import at_least, check_seconds, option, read_value
from quire.config.features import Setup
from quire.config.http import HttpLimits
from quire.config.kernels import KernelConfig
from quire.config.lora import LoRAConfig
from quire.config.metrics import MetricsConfig
from quire.config.multimodal import MultiModalConfig
from quire.config.parallel import ParallelConfig as ParallelConfig
from quire.config.profile import ProfileConfig
from quire.config.scheduling import SchedulerConfig as SchedulerConfig
from quire.config.several_models import SeveralModels
from quire.config.vllm import FOREIGN, UNSUPPORTED_VALUES, VALUES, translate, unknown
from quire.config.weights import WeightsConfig

# The fields of structured_outputs_config, and their values. The last two are vLLM's, and have no effect.
STRUCTURED_OUTPUTS: dict[str, tuple[Any, ...]] = {
    "backend": ("auto", "guidance", "xgrammar", "outlines"),
    "disable_any_whitespace": (False, True),
    "disable_additional_properties": (False, True),
    "disable_fallback": (False, True),
    "enable_in_reasoning": (False,),
}
STRUCTURED_OUTPUTS_SECONDS = ("cpu_seconds", "total_seconds")  # quire/structured/workers.py has their defaults


@dataclass(frozen=True)
class ModelConfig:
    """Model, tokenizer and chat template."""

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = option(None, empty=True)
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] = "auto"
    max_model_len: int | None = option(None, size=True)
    disable_sliding_window: bool = False
    hf_overrides: dict[str, Any] = option({}, json=True)
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    model_impl: Literal["auto", "quire", "transformers"] = "auto"
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    pooler_config: dict[str, Any] = option({}, json=True)
    quantization: str | None = option(None, flags=("-q",))
    enforce_eager: bool = False
    torch_compile: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = option({}, json=True)
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    reasoning_parser: str | None = None
    default_chat_template_kwargs: dict[str, Any] = option({}, json=True)
    reasoning_effort_map: dict[str, str] = option({}, json=True)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_model_len != -1:
            at_least(self, 1, "max_model_len")

    @property
    def dtype_name(self) -> str:
        """The data type of the model's computation, by its name in torch.

        "auto" is bfloat16 even for a float16 checkpoint, since CPUs multiply bfloat16 faster. For quantized GGUF files,
        models/precision.py decides.
        """
        return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class SamplingConfig:
    """Limits and plugins of sampling."""

    max_logprobs: int = 20
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    logits_processors: list[Any] = option([])
    structured_outputs_config: dict[str, Any] = option({}, json=True)

    def __post_init__(self) -> None:
        at_least(self, -1, "max_logprobs")
        for name, value in self.structured_outputs_config.items():
            if name in STRUCTURED_OUTPUTS_SECONDS:
                check_seconds(f"structured_outputs_config: {name}", value, most=3600)
                continue
            accepted = STRUCTURED_OUTPUTS.get(name)
            if accepted is None:
                names = ", ".join((*STRUCTURED_OUTPUTS, *STRUCTURED_OUTPUTS_SECONDS))
                raise ConfigError(f"structured_outputs_config has no field {name!r}: {names}")
            if value not in accepted:
                raise ConfigError(f"structured_outputs_config: {name} must be one of {accepted}, got {value!r}")


@dataclass(frozen=True)
class ServerConfig(HttpLimits, SeveralModels):
    """Server."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_server_count: int = option(1, flags=("-asc",))
    api_key: list[str] = option([])
    served_model_name: list[str] = option([])
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    allowed_origins: list[str] = option([])
    allowed_methods: list[str] = option(["*"])
    allowed_headers: list[str] = option(["*"])
    allow_credentials: bool = False
    middleware: list[str] = option([])
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_strict_level: Literal["auto", "function", "parameter"] = "auto"
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    strict_max_tokens: bool = False
    disable_fastapi_docs: bool = False
    disable_ui: bool = False
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "warning"
    max_waiting_requests: int | None = None
    request_timeout: float | None = None
    drain_timeout: float = option(30.0, flags=("--shutdown-timeout",))
    max_body_bytes: int = option(64 << 20, size=True)
    max_total_body_bytes: int = option(256 << 20, size=True)
    max_generated_tokens: int | None = option(None, size=True)
    response_store: str | None = None
    response_store_bytes: int = option(1 << 30, size=True)
    response_store_days: float = 30.0
    lora_modules: list[str] = option([])
    lora_folder: str | None = None
    enable_admin_api: bool = False
    weights_folder: str | None = None
    trust_request_chat_template: bool = False
    metrics_prefix: str = "quire"
    log_format: Literal["text", "json"] = "text"
    access_log: str | None = None
    enable_log_requests: bool = False
    log_prompts: bool = False
    max_log_len: int | None = None
    disable_uvicorn_access_log: bool = False
    disable_access_log_for_endpoints: str = "/health,/ping,/version,/metrics,/load"
    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        self.check_http()
        self.check_models()
        at_least(self, 0, "port", "max_waiting_requests", "max_log_len")
        at_least(
            self,
            1,
            "api_server_count",
            "max_body_bytes",
            "max_total_body_bytes",
            "max_generated_tokens",
            "response_store_bytes",
        )
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        for name in ("request_timeout", "drain_timeout"):
            check_seconds(name, getattr(self, name), zero=True)
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
        check(Setup(server=self))

    @classmethod
    def create(cls, **options: Any) -> Self:
        """Create from options by name, `create(port=8080)`. Raises ConfigError."""
        given = {canonical_name(name): value for name, value in options.items()}
        for name in given:
            if name not in OPTIONS[cls]:
                raise ConfigError(unknown(name, OPTIONS[cls]))
        return cls(**_checked(given))


@dataclass(frozen=True)
class EngineConfig:
    """All options of an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        check(Setup(self))
        _ = self.layout  # raises ConfigError
        if self.model.model_impl == "transformers":
            from quire.config.transformers import check_installed

            check_installed()

    @property
    def layout(self) -> Layout:
        """Which replicas and ranks run on this machine."""
        return self.cluster.layout(self.parallel.data_parallel_size, self.parallel.ranks)

    @property
    def transfer_ports(self) -> int:
        """The number of ports at which a replica lets other engines read its blocks: of its core, and of each rank."""
        return 1 + self.parallel.ranks

    def at_replica(self, replica: int) -> Self:
        """Return the options of one replica of a producer, which listens at the ports after those of earlier replicas.
        replica: its number on this machine."""
        transfer = self.cache.transfer
        if transfer is None or not transfer.produces or not replica:
            return self
        given = {**self.cache.kv_transfer_config, "kv_port": transfer.kv_port + replica * self.transfer_ports}
        return replace(self, cache=replace(self.cache, kv_transfer_config=given))

    @classmethod
    def create(cls, **options: Any) -> Self:
        """Create from flat options, `create(max_model_len=2048, block_size=32)`. Raises ConfigError."""
        given = {canonical_name(name): value for name, value in options.items()}
        if misplaced := [name for name in given if name in OPTIONS[ServerConfig] and name not in FOREIGN]:
            raise ConfigError(f"{misplaced[0]} is an option of the server (quire serve)")
        engine_names = {name for config in GROUPS.values() for name in OPTIONS[config]}
        values = _checked(translate(given, engine_names, others=OPTIONS[ServerConfig]))
        groups = {group: {n: v for n, v in values.items() if n in OPTIONS[config]} for group, config in GROUPS.items()}
        made = cls(**{group: config(**groups[group]) for group, config in GROUPS.items()})
        made.cluster.check_secret(
            made.layout, exchanges=made.cache.transfer is not None and not made.cache.insecure_transfers
        )
        return made


GROUPS: dict[str, Any] = get_type_hints(EngineConfig)
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
    """Return the option's canonical name. `name` may be written with dashes, or be an alias."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def read_option(name: str, value: Any) -> Any:
    """Return the value of an option given as text, as a torch.dtype or in vLLM's spelling. Raises ConfigError."""
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
    """Return the values as read by `read_option`, without None. Raises ConfigError for a wrong type."""
    values = {name: read_option(name, value) for name, value in options.items() if value is not None}
    return {name: value for name, value in values.items() if value is not None}
