"""Everything that Triton compiles is compiled at start, before the first request."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 64, "kv_lora_rank": 128,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "num_key_value_heads": 4,
}  # fmt: skip


def _compiled(card: str = "sm_90", thorough: bool = True, **options: Any) -> tuple[list[str], list[str]]:
    """The kernels that the start of an engine compiled, and those that were compiled while it served."""
    small = {"max_num_seqs": 18, "max_model_len": 300, "max_num_batched_tokens": 128, "num_hidden_layers": 2}
    options = {**small, "num_gpu_blocks_override": 120, "device": "cuda", "load_format": "dummy", **options}
    layers = {"num_hidden_layers": options.pop("num_hidden_layers")}
    options["hf_overrides"] = {**layers, **options.get("hf_overrides", {})}
    printed = run_on_stand_in(
        f"""
        import json
        from quire import LLM
        from support.traffic import serve_everything
        llm = LLM(**json.loads({json.dumps(options)!r}))
        at_start = len(device.compilations)
        serve_everything(llm, {thorough})
        print(json.dumps([device.compilations[:at_start], device.compilations[at_start:]]))
    """,
        card,
    )
    at_start, later = json.loads(printed.splitlines()[-1])
    assert len(at_start) > 5
    return at_start, later


@pytest.mark.nightly
def test_an_engine_that_serves_compiles_nothing():
    at_start, later = _compiled(thorough=False)
    assert not later
    assert sum(kernel.startswith("_flat_batch[") for kernel in at_start) == 1  # not one for each number of tokens
    for name in ("_count_kept[", "_masses[", "_accept_or_resample["):  # no request has drafts there
        assert sum(kernel.startswith(name) for kernel in at_start) == 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4", "max_num_batched_tokens": 18},
        {
            "hf_overrides": _EXPERTS,
            "max_num_batched_tokens": 2000,
            "max_model_len": 1030,
            "num_gpu_blocks_override": 400,
        },
        {"hf_overrides": _EXPERTS, "quantization": "int8", "enforce_eager": True},
        {"hf_overrides": _LATENT, "dtype": "float16"},
        {"hf_overrides": _LATENT, "kv_cache_dtype": "int8", "enforce_eager": True},
        {"kv_cache_dtype": "int8", "async_scheduling": False},
        {"kv_cache_dtype": "fp8", "enforce_eager": True, "max_num_seqs": 1},
        {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 33, "max_model_len": 140},
        {"attention_backend": "torch-varlen", "enforce_eager": True},
        {"logprobs_mode": "processed_logprobs", "block_size": 32},
    ],
    ids=str,
)
def test_an_engine_with_these_options_that_serves_compiles_nothing(options: dict[str, Any]):
    assert not _compiled(**options)[1]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "card",
    [pytest.param("sm_80", marks=pytest.mark.nightly), "sm_100", pytest.param("sm_120", marks=pytest.mark.nightly)],
)
def test_an_engine_that_serves_on_another_card_compiles_nothing(card: str):
    assert not _compiled(card)[1]
    assert not _compiled(card, hf_overrides=_EXPERTS, quantization="int8")[1]
