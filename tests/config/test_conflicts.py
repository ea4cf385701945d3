"""Each row of the table of conflicts is an error at start when both of its features are enabled, and only then."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import features as f
from quire.config.conflicts import CONFLICTS, Conflict, check
from quire.config.engine import OPTIONS, ConfigError, EngineConfig, ServerConfig
from quire.config.features import Feature, Kind, Operation, Place, Setup
from quire.engine.frontend import Frontend
from quire.engine.llm import LLM
from quire.models.heads.resolve import with_files
from quire.parallel.mesh import Mesh
from quire.server.serve import serve
from quire.worker.worker import Worker
from support.checkpoints import Checkpoints
from support.minilm import minilm

QUIRE = Path(f.__file__).parents[1]
EXPERTS = {"enable_expert_parallel": True, "data_parallel_size": 2}
# The options that enable a feature. One that is missing is enabled by leaving it out.
ENABLED: dict[Feature, dict[str, Any]] = {
    f.TRANSFORMERS: {"model_impl": "transformers"},
    f.QUANTIZATION: {"quantization": "int8"},
    f.TORCH_COMPILE: {"torch_compile": True},
    f.BATCH_INVARIANT: {"batch_invariant": True},
    f.NO_SLIDING_WINDOW: {"disable_sliding_window": True},
    f.LORA: {"enable_lora": True},
    f.PROMPT_EMBEDS: {"enable_prompt_embeds": True},
    f.NVTX: {"enable_layerwise_nvtx_tracing": True},
    f.NOT_BFLOAT16: {"dtype": "float32"},
    f.NOT_FLOAT16: {"dtype": "float32"},
    f.BFLOAT16_CACHE: {"kv_cache_dtype": "bfloat16"},
    f.FLOAT16_CACHE: {"kv_cache_dtype": "float16"},
    f.INT8_CACHE: {"kv_cache_dtype": "int8"},
    f.FP8_CACHE: {"kv_cache_dtype": "fp8"},
    f.COMPRESSION: {"kv_compression": {"ratio": 2}},
    f.TRANSFER: {"kv_transfer_config": {"kv_role": "kv_consumer"}, "cluster_secret_file": "secret"},
    f.PRODUCER: {"kv_transfer_config": {"kv_role": "kv_producer"}, "cluster_secret_file": "secret"},
    f.INSECURE_TRANSFERS: {"kv_transfer_config": {"kv_role": "kv_both"}, "insecure_transfers": True},
    f.CLUSTER_SECRET: {"cluster_secret_file": "secret"},
    f.LAYER_BY_LAYER: {"kv_cache_layout": "layer_by_layer"},
    f.WHOLE_BLOCKS: {
        "kv_transfer_config": {"kv_role": "kv_consumer", "kv_connector": "NixlConnector"},
        "cluster_secret_file": "secret",
    },
    f.KV_EVENTS: {"kv_events_config": {"enable_kv_cache_events": True}},
    f.TIERS: {"kv_offloading_size": 1},
    f.NO_PREFIX_CACHING: {"enable_prefix_caching": False},
    f.NO_CHUNKED_PREFILL: {"enable_chunked_prefill": False},
    f.SHORT_STEPS: {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    f.MAX_ITL: {"max_itl": 50},
    f.LONG_PREFILL: {"long_prefill_token_threshold": 64},
    f.ASYNC_SCHEDULING: {"async_scheduling": True},
    f.SPECULATION: {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    f.HOST_PROPOSERS: {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    f.DRAFTERS: {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    f.TENSOR_PARALLEL: {"tensor_parallel_size": 2},
    f.PIPELINE_PARALLEL: {"pipeline_parallel_size": 2},
    f.DECODE_CONTEXT: {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    f.PREFILL_CONTEXT: {"prefill_context_parallel_size": 2},
    f.SEQUENCE_PARALLEL: {"enable_sequence_parallel": True, "tensor_parallel_size": 2},
    f.DATA_PARALLEL: {"data_parallel_size": 2},
    f.EXPERT_PARALLEL: {"enable_expert_parallel": True},
    f.SHARED_EXPERTS: EXPERTS,
    f.EPLB: {"enable_eplb": True, "enable_expert_parallel": True},
    f.DBO: {"enable_dbo": True, **EXPERTS},
    f.DEEP_EP: {"all2all_backend": "deepep_high_throughput", **EXPERTS},
    f.SYMMETRIC_MEMORY: {"all2all_backend": "symmetric_memory", **EXPERTS},
    f.RAY: {"distributed_executor_backend": "ray"},
    f.RAY_REPLICAS: {"data_parallel_backend": "ray"},
    f.SEVERAL_MACHINES: {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret_file": "secret"},
    f.SPANNING_REPLICA: {"nnodes": 4, "tensor_parallel_size": 4, "cluster_secret_file": "secret"},
    f.REPLICAS_ELSEWHERE: {"data_parallel_size": 2, "data_parallel_size_local": 1, "cluster_secret_file": "secret"},
    f.HEADLESS: {"headless": True, "data_parallel_size_local": 1, "cluster_secret_file": "secret"},
    f.ONE_REPLICA_SERVER: {"data_parallel_rank": 0},
    f.HYBRID_LB: {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1},
    f.LOCAL_REPLICAS: {"data_parallel_size_local": 2, "data_parallel_size": 2},
    f.SEVERAL_SERVERS: {"data_parallel_rank": 0, "data_parallel_size": 2},
    f.LORA_FOLDER: {"lora_folder": ".", "enable_admin_api": True},
    f.LORA_MODULES: {"lora_modules": ["a=b"]},
    f.WEIGHTS_FOLDER: {"weights_folder": ".", "enable_admin_api": True},
    f.API_PROCESSES: {"api_server_count": 2},
    f.MEMORY_STORE: {"response_store": "memory"},
}
# What is left out where a feature is missing.
MISSING = {
    f.NO_EXPERT_PARALLEL: ("enable_expert_parallel",),
    f.NO_SHARED_EXPERTS: ("data_parallel_size",),
    f.NO_TENSOR_PARALLEL: ("tensor_parallel_size",),
    f.NO_ADMIN_API: ("enable_admin_api",),
    f.NO_LORA: (),
}
# A checkpoint of tests/support, and further options that show the feature rather than another one.
MODELS: dict[Feature, tuple[str, dict[str, Any]]] = {
    f.POOLING_MODEL: ("minilm", {}),
    f.NO_CACHE: ("minilm", {}),
    f.NO_EXPERTS: ("llama", {}),
    f.RECURRENT: ("mamba2", {}),
    f.LATENT: ("deepseek_v3", {}),
    f.WINDOWS: ("mistral-window-20", {}),
    f.CHUNKS: ("llama4", {}),
    f.ALIBI: ("falcon-rw", {}),
    f.SINKS: ("gpt_oss", {"max_model_len": 16}),
    f.DIFFERENT_HEADS: ("llama4", {"max_model_len": 16}),
    f.SHARED_FIRST_VALUES: ("rwkv7", {}),
    f.LEARNED_POSITIONS: ("gpt2", {}),
    f.MEDIA: ("llava", {}),
    f.TWO_WAY: ("gemma3-sees", {}),
    f.LEVELS: ("qwen3_vl", {}),
    f.CROSSED: ("bart", {}),
}
WITH_EXPERTS = {f.RECURRENT: ("qwen3_next", {}), f.MEDIA: ("qwen3_vl_moe", {})}  # for replicas that share them
PLACES = {f.SHARED_GPU: Place(shares_gpu=True), f.STAGES_APART: Place(stages_apart=True)}  # not on every machine


def pair(conflict: Conflict) -> str:
    return f"{conflict.a.name} - {conflict.b.name}"


ROWS = [pytest.param(conflict, id=pair(conflict)) for conflict in CONFLICTS]


def all_features() -> list[Feature]:
    return [value for value in vars(f).values() if isinstance(value, Feature)]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def path(name: str) -> str:
        if name not in made:
            made[name] = str(write(name))
        return made[name]

    def write(name: str) -> Path:
        if name == "minilm":
            return minilm()
        if name == "bart":
            from support.encoder_decoders import written

            return written(tmp_path_factory.mktemp(name), name)
        if name in ("llava", "gemma3-sees", "qwen3_vl", "qwen3_vl_moe"):
            from support import seeing

            return seeing.write(tmp_path_factory.mktemp(name), seeing.MODELS[name.removesuffix("-sees")])
        return checkpoints.path(name)

    return path


def started(conflict: Conflict, path_of: Callable[[str], str]) -> None:
    """Start what has both features, as far as it gets."""
    a, b = conflict.a, conflict.b
    models = MODELS | WITH_EXPERTS if a is f.DBO else MODELS
    name, more = models.get(b, ("mixtral" if a is f.EPLB else "llama", {}))
    options = {**ENABLED.get(b, {}), **ENABLED[a], **more}
    for option in MISSING.get(b, ()):
        del options[option]
    server = {name: options.pop(name) for name in list(options) if name in OPTIONS[ServerConfig]}
    if server:
        serve(path_of(name), ServerConfig.create(**server), options)
    config = EngineConfig.create(model=path_of(name), **options)
    if b in PLACES:
        check(Setup(config, place=PLACES[b]))
    elif a is f.TRANSFER and b.kind is Kind.OPERATION:  # without another engine
        check(Setup(config, operation=Operation(replaces_weights=True)))
    elif b is f.IN_LLM:
        LLM(path_of(name), **options)
    elif b.kind is Kind.OPERATION:
        llm = LLM(
            path_of(name), dtype="float32", max_num_seqs=2, max_model_len=64, num_gpu_blocks_override=8, **options
        )
        llm.sleep(level=2) if b is f.DEEP_SLEEP else llm.update_weights(path_of(name))
    elif b is f.ON_CPU:
        Worker(config, Path(path_of(name)), 64, Mesh())
    else:
        Frontend(*with_files(config), in_process=False)


@pytest.mark.parametrize("conflict", ROWS)
def test_two_features_that_exclude_each_other_are_an_error(conflict: Conflict, path_of: Callable[[str], str]):
    with pytest.raises(ConfigError) as raised:
        started(conflict, path_of)
    assert str(raised.value) == conflict.text


@pytest.mark.parametrize("feature", [pytest.param(feature, id=feature.name) for feature in ENABLED])
def test_a_feature_alone_is_no_error(feature: Feature):
    options = dict(ENABLED[feature])
    if feature in (f.DEEP_EP, f.BFLOAT16_CACHE):
        options["dtype"] = "bfloat16"
    if feature is f.FLOAT16_CACHE:
        options["dtype"] = "float16"
    server = {name: options.pop(name) for name in list(options) if name in OPTIONS[ServerConfig]}
    made = Setup(EngineConfig.create(**options), ServerConfig.create(**server))
    assert feature in (f.LORA_MODULES, f.SHORT_STEPS) or feature.is_on(made)


def test_each_feature_is_in_the_table_once_with_another():
    pairs = [frozenset((conflict.a, conflict.b)) for conflict in CONFLICTS]
    assert len(pairs) == len(set(pairs))
    assert all(len(features) == 2 for features in pairs)
    used = {feature for features in pairs for feature in features}
    # Those that go with all others; the page of features shows them.
    assert set(all_features()) == used | {f.SPARSE, f.QUANTIZATION, f.TENSOR_PARALLEL}


def test_only_the_second_feature_may_be_a_models_or_a_places():
    assert {conflict.a.kind for conflict in CONFLICTS} == {Kind.OPTION}


# ---- other places decide about one thing only

# Files outside quire/config that raise ConfigError, and what for.
ALLOWED = {
    "a file of the checkpoint, or a value that it bounds": """checkpoints/config_fields.py checkpoints/formats/config.py
        checkpoints/merged_adapter.py engine/frontend.py models/description.py models/heads/load.py
        models/heads/resolve.py models/pooling.py models/pooling_heads.py models/stages.py
        models/towers/transformers.py models/transformers_backend/load.py multimodal/processor.py worker/context.py
        worker/assembly/loading.py worker/drafters/load.py worker/runner.py""",
    "a file or an address that cannot be used": """cli/flags.py cluster/addresses.py cluster/head.py cluster/secret.py
        engine/cores.py engine/kv_events.py server/access_log.py server/listening.py server/response_store.py
        transfer/link.py transfer/ranks.py worker/tiers.py""",
    "memory or devices that do not suffice": """engine/devices.py executor/ray_cluster.py scheduler/compression.py
        worker/device.py worker/memory.py""",
    "a package, a plugin or a compiler that is missing": """cli/compile.py executor/messages.py layers/deep_ep.py
        layers/symmetric_dispatch.py
        models/load.py sampling/logits_processors.py server/middleware.py server/tracing.py structured/backends.py""",
    "the value of one option, where it is declared": """bench/sweep.py cli/top.py router/config.py server/adapters.py
        server/app.py server/spans.py""",
    "another machine that refused": "cluster/node.py engine/ray_cores.py",
}
# Texts that name two options since their remedy is one of them, or since one is the bound of the other.
TWO_NAMES = {
    "models/heads/resolve.py",
    "scheduler/compression.py",
    "server/app.py",  # the chat template decides whether the second option is needed
    "server/listening.py",
    "worker/context.py",
    "worker/memory.py",
}


def raised_texts() -> dict[str, list[str]]:
    """By file outside quire/config, the texts of the ConfigErrors that it makes."""
    found: dict[str, list[str]] = {}
    for path in sorted(QUIRE.rglob("*.py")):
        name = path.relative_to(QUIRE).as_posix()
        source = path.read_text(encoding="utf-8")
        if name.startswith("config/") or "ConfigError(" not in source:
            continue
        nodes = list(ast.walk(ast.parse(source)))
        made = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError"]
        named = {ast.unparse(argument) for call in made for argument in call.args if isinstance(argument, ast.Name)}
        texts = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in named]
        found[name] = [ast.unparse(node) for node in (*made, *texts)]
    return found


def test_other_files_raise_it_for_one_thing_only():
    allowed = {name for names in ALLOWED.values() for name in names.split()}
    assert set(raised_texts()) == allowed
    known = {name for options in OPTIONS.values() for name in options if "_" in name}
    names = re.compile(rf"\b({'|'.join(known)})\b(?!\.)")
    two = {file for file, texts in raised_texts().items() for text in texts if len(set(names.findall(text))) > 1}
    assert two == TWO_NAMES
