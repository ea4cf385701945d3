"""The options of vLLM that Quire does not declare, and how each is treated: those of vLLM 0.30 and earlier versions.

docs/from-vllm.md lists the same tables for users; a test compares them.
"""

import difflib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from quire.options.declaration import ConfigError, read_json

_logger = logging.getLogger("quire")


class Foreign(NamedTuple):
    """An option of vLLM that Quire does not have.

    accepted: values that need no feature that Quire lacks; None means all values. reason: why the option has no effect.
    switch: on the command line, the option is a flag without a value.
    """

    accepted: tuple[Any, ...] | None
    reason: str = ""
    switch: bool = False


def _each(names: str, foreign: Foreign) -> dict[str, Foreign]:
    return dict.fromkeys(names.split(), foreign)


def _unsupported(names: str, *neutral: Any) -> dict[str, Foreign]:
    return _each(names, Foreign(neutral))


def _no_effect(reason: str, names: str, switches: str = "") -> dict[str, Foreign]:
    return {**_each(names, Foreign(None, reason)), **_each(switches, Foreign(None, reason, switch=True))}


# Options that are accepted with None and the listed values. Any other value is the error "not supported by Quire yet".
NOT_SUPPORTED: Mapping[str, Foreign] = {
    **_each(  # switches that must be off
        """data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter
        enable_eplb enable_expert_parallel enable_log_outputs enable_logging_iteration_details
        enable_layerwise_nvtx_tracing enable_lora enable_mfu_metrics enable_mm_embeds enable_per_request_metrics
        enable_prompt_adapter enable_prompt_embeds enable_reasoning enable_return_routed_experts enable_sleep_mode
        enable_ssl_refresh enable_tokenizer_info_endpoint enable_trace_replay engine_use_ray
        exclude_tools_when_tool_choice_none cudagraph_metrics grpc headless kv_cache_metrics kv_sharing_fast_prefill
        log_error_stack mm_encoder_only numa_bind return_sampling_mask skip_tokenizer_init tokens_only use_fp64_gumbel
        worker_use_ray""",
        Foreign((False,), switch=True),
    ),
    "enable_chunked_prefill": Foreign((True,), switch=True),
    **_unsupported(
        """api_server_count data_parallel_size data_parallel_size_local decode_context_parallel_size
        max_long_partial_prefills max_num_partial_prefills nnodes pipeline_parallel_size prefill_context_parallel_size
        prefill_schedule_interval""",
        1,
    ),
    **_unsupported(
        """cpu_offload_gb data_parallel_rank data_parallel_start_rank kv_offloading_size node_rank num_lookahead_slots
        offload_group_size scheduler_delay_factor""",
        0,
    ),
    **_unsupported("runner task", "auto", "generate"),
    **_unsupported("convert", "auto", "none"),
    **_unsupported("tokenizer_mode", "auto", "hf", "slow"),
    **_unsupported("config_format", "auto", "hf"),
    **_unsupported("model_impl", "auto", "vllm"),
    **_unsupported("distributed_executor_backend", "mp", "uni"),
    **_unsupported("offload_backend worker_cls", "auto"),
    **_unsupported("preemption_mode", "recompute"),
    **_unsupported("per_request_spec_decode_metrics fingerprint_mode", "none"),
    **_unsupported("model_weights reasoning_parser_plugin tool_parser_plugin worker_extension_cls", ""),
    **_unsupported("additional_config attention_config model_class_overrides profiler_config", {}),
    **_unsupported("cpu_offload_params kv_cache_dtype_skip_layers lora_modules offload_params prompt_adapters", []),
    **_unsupported(
        """afd_config collect_detailed_traces default_mm_loras device_ids diffusion_config ec_transfer_config
        fingerprint_value
        hf_config_path io_processor_plugin kv_events_config kv_transfer_config log_config_file
        logits_processor_pattern max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
        ngram_prompt_lookup_max ngram_prompt_lookup_min num_speculative_tokens numa_bind_cpus numa_bind_nodes
        otlp_traces_endpoint override_attention_dtype override_neuron_config override_pooler_config pooler_config
        prefix_cache_retention_interval qlora_adapter_name_or_path quantization_config quantization_param_path
        reasoning_config scheduler_cls spec_decoding_acceptance_method spec_method spec_model spec_tokens
        speculative_config speculative_disable_by_batch_size speculative_disable_mqa_scorer
        speculative_draft_tensor_parallel_size speculative_max_model_len speculative_model
        speculative_model_quantization tool_server typical_acceptance_sampler_posterior_alpha
        typical_acceptance_sampler_posterior_threshold watermarking_config weight_transfer_config"""
    ),
}

# Options that are accepted with any value. A warning in the log names the option and the reason.
NO_EFFECT: Mapping[str, Foreign] = {
    **_no_effect("code in checkpoints is never run", "code_revision", "trust_remote_code"),
    **_no_effect("preempted requests are computed again", "swap_space"),
    **_no_effect("each token and head of a one-byte KV cache has its own scale", "", "calculate_kv_scales"),
    **_no_effect("blocks are hashed with SHA-256", "prefix_caching_hash_algo"),
    **_no_effect("a request starts only when its whole prompt fits", "watermark", "scheduler_reserve_full_isl"),
    **_no_effect("Quire loads weights in its own way", "ignore_patterns max_parallel_loading_workers "
        "model_loader_extra_config pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads", "use_tqdm_on_load"),
    **_no_effect("Quire has its own controls: enforce_eager, torch_compile and kernels",
        """all2all_backend compilation_config cuda_graph_sizes cudagraph_capture_sizes gdn_prefill_backend
        ir_op_priority jit_monitor_mode kda_prefill_backend kernel_config linear_backend mamba_backend
        max_context_len_to_capture max_cudagraph_capture_size max_seq_len_to_capture moe_backend optimization_level
        performance_mode""",
        """disable_cascade_attn disable_custom_all_reduce enable_bf16x3_router_gemm enable_cumem_allocator
        enable_flashinfer_autotune enable_nccl_comm_suspend jit_monitor_verbose"""),
    **_no_effect("a lost engine core is always restarted", "fault_tolerance_config",
        "enable_fault_tolerance shutdown_on_fault_tolerance_failure"),
    **_no_effect("the server and the engine are always two processes", "",
        "disable_async_output_proc disable_frontend_multiprocessing"),
    **_no_effect("there is one node and one copy of the model",
        """cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend
        data_parallel_rpc_port data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold
        dcp_comm_backend dcp_kv_cache_interleave_size distributed_timeout_seconds dp_supervisor_probe_failure_threshold
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval eplb_config eplb_step_interval
        eplb_window_size expert_placement_strategy master_addr master_port num_redundant_experts ubatch_size""",
        """aggregate_engine_logging dcp_q_replicate disable_nccl_for_dp_synchronization eplb_log_balancedness
        ray_workers_use_nsight"""),
    **_no_effect("there are no LoRA adapters",
        """lora_dtype lora_extra_vocab_size lora_target_modules long_lora_scaling_factors max_cpu_loras max_lora_rank
        max_loras max_prompt_adapter_token max_prompt_adapters""",
        """enable_lora_bias enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras specialize_active_lora"""),
    **_no_effect("prompts are text",
        """allowed_local_media_path allowed_media_domains ec_manager_config limit_mm_per_prompt media_io_kwargs
        mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
        mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc video_pruning_method video_pruning_rate""",
        """disable_chunked_mm_input disable_mm_preprocessor_cache enable_flash_late_interaction
        enable_mm_processor_stats enable_multimodal_encoder_data_parallel interleave_mm_strings language_model_only
        skip_mm_profiling"""),
    **_no_effect("there are no state-space layers", "mamba_block_size mamba_cache_dtype mamba_cache_mode "
        "mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm prefix_match_unit "
        "replayssm_buffer_len", "enable_mamba_cache_stochastic_rounding use_replayssm"),
    **_no_effect("see structured_outputs_config", "guided_decoding_backend", "guided_decoding_disable_"
        "additional_properties guided_decoding_disable_any_whitespace guided_decoding_disable_fallback"),
    **_no_effect("there is no speculative decoding yet", "", "disable_logprobs_during_spec_decoding"),
    **_no_effect("the KV cache is not offloaded", "kv_offloading_backend offload_num_in_group "
        "offload_prefetch_step"),
    **_no_effect("Quire has one KV cache manager for all kinds of layers", "", "disable_hybrid_kv_cache_manager "
        "use_v2_block_manager"),
    **_no_effect("tokens are streamed as they are generated", "", "multi_step_stream_outputs"),
    **_no_effect("text is tokenized in the server's process", "renderer_num_workers tokenizer_pool_extra_config "
        "tokenizer_pool_size tokenizer_pool_type"),
    **_no_effect("deprecated quantization methods need no permission", "", "allow_deprecated_quantization"),
    **_no_effect("there are no such metrics", "kv_cache_metrics_sample show_hidden_metrics_for_version"),
    **_no_effect("requests are logged only with enable_log_requests", "", "disable_log_requests"),
    **_no_effect("tokens are not logged", "", "enable_log_deltas"),
    **_no_effect("only the server logs statistics", "", "disable_log_stats"),
    **_no_effect("always enabled", "", "enable_offline_docs enable_prompt_tokens_details "
        "enable_request_id_headers enable_server_load_tracking"),
    **_no_effect("HTTP is not parsed by h11; see max_body_bytes", "h11_max_header_count h11_max_incomplete_event_size"),
    **_no_effect("only the server has names for the model", "served_model_name"),
    **_no_effect("there is no Cohere API", "cohere_format", "cohere_is_reasoning_model"),
    **_no_effect("environment variables are not options", "", "fail_on_environ_validation"),
}  # fmt: skip

# Options of earlier versions: name → (the option that replaced it, if there is one; the explanation in the warning).
RETIRED: Mapping[str, tuple[str | None, str]] = {
    "chunked_prefill_size": ("long_prefill_token_threshold", "maximum number of tokens of one request per step"),
    "num_scheduler_steps": (None, "see async_scheduling, which schedules the next step while the current one runs"),
    "rope_scaling": ("hf_overrides", "values that replace those of config.json"),
    "rope_theta": ("hf_overrides", "values that replace those of config.json"),
}

FOREIGN: Mapping[str, Foreign] = {**NOT_SUPPORTED, **NO_EFFECT, **{name: Foreign(None) for name in RETIRED}}

# Options whose flags take several values on the command line.
LISTS = frozenset(
    "allowed_media_domains cuda_graph_sizes cudagraph_capture_sizes ignore_patterns lora_target_modules".split()
)

SHORT_FLAGS: Mapping[str, str] = {
    "-O": "optimization_level",
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-r": "node_rank",
    "-sc": "speculative_config",
}

# vLLM's spellings of values of Quire's own options.
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "attention_backend": {"auto": None},
    "hf_token": {True: None},  # the token that the user logged in with
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": dict.fromkeys(("hf", "pt", "gguf", "fastsafetensors", "runai_streamer"), "auto"),
    "max_model_len": {"auto": -1, "-1": -1},
}

# Values of Quire's own options that only vLLM supports.
UNSUPPORTED_VALUES: Mapping[str, frozenset[str]] = {
    "device": frozenset("hpu neuron openvino tpu xpu".split()),
    "kv_cache_dtype": frozenset("fp8_ds_mla fp8_e5m2 fp8_inc nvfp4".split()),
    "load_format": frozenset(
        "bitsandbytes instanttensor mistral npcache runai_streamer_sharded sharded_state tensorizer".split()
    ),
}


def translate(options: Mapping[str, Any], known: Iterable[str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Translates options as users of vLLM give them to Quire's. An option that is None counts as not given.

    known: the names of Quire's options. others: additional names to suggest in place of an unknown one. Raises
    ConfigError for an option that is unknown or not supported.
    """
    known = frozenset(known)
    result: dict[str, Any] = {}
    overrides: dict[str, Any] = {}  # of config.json
    for name, value in options.items():
        if value is None:
            if name not in known and name not in FOREIGN:
                raise ConfigError(unknown(name, [*known, *others]))
        elif name in known:
            result[name] = value
        elif name in RETIRED:
            successor, meaning = RETIRED[name]
            if successor is None:
                _logger.warning("%s is retired in vLLM, and has no effect in Quire: %s", name, meaning)
                continue
            _logger.warning("%s is retired in vLLM, and is read as %s in Quire: %s", name, successor, meaning)
            if successor == "hf_overrides":
                overrides[name] = read_json(name, value) if isinstance(value, str) else value
            else:
                result.setdefault(successor, value)
        else:
            _check(name, value, [*known, *others])
    if overrides:
        given = result.get("hf_overrides", {})
        result["hf_overrides"] = {
            **overrides,
            **(read_json("hf_overrides", given) if isinstance(given, str) else given),
        }
    return result


def _check(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ConfigError unless vLLM has the option and its value needs no feature that Quire lacks."""
    foreign = FOREIGN.get(name)
    if foreign is None:
        raise ConfigError(unknown(name, known))
    if foreign.accepted is None:
        if value is not False:
            _logger.warning("%s has no effect: %s", name, foreign.reason)
        return
    if value in foreign.accepted:
        return
    if (foreign.switch and foreign.accepted == (False,)) or not foreign.accepted:
        raise ConfigError(f"{name} is not supported by Quire yet")
    accepted = " and ".join(json.dumps(neutral) for neutral in foreign.accepted)
    raise ConfigError(f"{name}={value!r} is not supported by Quire yet (supported: {accepted})")


def unknown(name: str, known: Iterable[str]) -> str:
    """The error message for an option that neither Quire nor vLLM has."""
    near = difflib.get_close_matches(name, [*known, *FOREIGN], n=1, cutoff=0.7)
    return f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
