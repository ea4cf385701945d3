"""`--model-impl transformers`: transformers' own code on Quire's paged attention says what transformers says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.errors import WeightError
from quire.config.engine import ConfigError, EngineConfig
from quire.kv.specs import FullAttentionSpec, SlidingWindowSpec
from quire.models.registry import ARCHITECTURES
from support.checkpoints import write_checkpoint
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.families import NEW_VARIANTS
from support.families.base import GLOBAL, LOCAL
from support.reference import FEWER_PROMPTS, LENGTHS, Continuation, greedy, load, logits, prompts
from support.ways import WAYS, in_chunks_of_24, name_of, two_steps_deep_in_chunks_preempted

# Model type and differences from support.checkpoints.BASE. Quire lacks only those in LACKED.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("starcoder2", {"sliding_window": 20}),
    "persimmon": ("persimmon", {}),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "logits_scaling": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 20, "layer_types": [LOCAL, GLOBAL, LOCAL]},
    ),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "helium": ("helium", {"head_dim": 16, "num_attention_heads": 4}),
    "llama": ("llama", {}),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "sliding_window": 20, "layer_types": [LOCAL, GLOBAL, LOCAL]},
    ),
}
LACKED = ["vaultgemma", "helium"]


class Cases:
    """The models on disk, and what transformers says."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory, self._paths = factory, dict[str, Path]()
        self._networks: dict[str, Any] = {}
        self._continuations: dict[str, list[Continuation]] = {}

    def path(self, name: str) -> Path:
        if name not in self._paths:
            kind, config = MODELS[name]
            self._paths[name] = write_checkpoint(self._factory.mktemp(name), kind, config)
        return self._paths[name]

    def network(self, name: str) -> Any:
        if name not in self._networks:
            self._networks[name] = load(self.path(name))
        return self._networks[name]

    def continuations(self, name: str) -> list[Continuation]:
        if name not in self._continuations:
            self._continuations[name] = greedy(self.network(name), prompts(320, FEWER_PROMPTS))
        return self._continuations[name]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Cases:
    return Cases(tmp_path_factory)


HARDEST = two_steps_deep_in_chunks_preempted
PLAN = [
    *((name, HARDEST) for name in MODELS),
    *(pytest.param(name, way, marks=pytest.mark.sampled(6)) for name in MODELS for way in WAYS if way is not HARDEST),
]


@pytest.mark.sampled(200)
@pytest.mark.slow
@pytest.mark.texts
@pytest.mark.parametrize(("name", "way"), PLAN, ids=name_of)
def test_greedy_tokens_equal_transformers(cases, name, way):
    way(lambda **options: make_llm(cases.path(name), model_impl="transformers", **options), cases.continuations(name))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(cases, name):
    continuation = cases.continuations(name)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    expected = logits(cases.network(name), text)
    llm = make_llm(cases.path(name), model_impl="transformers")
    difference = (teacher_forced_logits(llm, text, [1, 15, 17, 40, 1, len(text) - 74]) - expected).abs().max()
    assert difference / expected.std() < 2e-4


def test_the_models_are_some_that_quire_lacks(cases):
    for name in LACKED:
        (architecture,) = json.loads((cases.path(name) / "config.json").read_text())["architectures"]
        assert architecture not in ARCHITECTURES
        with pytest.raises(ValueError, match=f"{architecture} is not supported; .* transformers' code"):
            make_llm(cases.path(name), model_impl="quire")


def test_auto_runs_transformers_code_where_quire_has_no_layers(cases, caplog):
    caplog.set_level("INFO", logger="quire")
    expected = cases.continuations("vaultgemma")[2]
    llm = make_llm(cases.path("vaultgemma"))
    expected.check(tokens_of(generate(llm, [expected.prompt]))[0])
    lines = [record.message for record in caplog.records if "transformers" in record.message]
    assert lines == ["VaultGemmaForCausalLM runs transformers' own code, which is slower than Quire's layers"]
    assert llm.config.model.model_impl == "transformers"
    assert make_llm(cases.path("llama")).config.model.model_impl == "auto"


def test_auto_names_an_option_that_transformers_code_lacks(cases):
    with pytest.raises(ConfigError, match=r"model_impl='transformers' and torch_compile exclude each other"):
        make_llm(cases.path("vaultgemma"), torch_compile=True)


def test_a_model_type_without_a_class_of_its_own_runs_that_of_another_family(tmp_path):
    """EXAONE's checkpoints have names of their own, and transformers runs them as Llama."""
    write_checkpoint(tmp_path, "exaone", {})
    edit(tmp_path, architectures=["ExaoneForCausalLM"])
    expected = greedy(load(tmp_path), prompts(320, 3))
    llm = make_llm(tmp_path)
    assert llm.config.model.model_impl == "transformers"
    for continuation, token_ids in zip(expected, tokens_of(generate(llm, prompts(320, 3))), strict=True):
        continuation.check(token_ids)


def test_windows_and_full_attention_get_groups_of_their_own(cases):
    specs = make_llm(cases.path("vaultgemma"), model_impl="transformers").core.executor.kv_cache.specs
    assert [(type(spec), spec.layers) for spec in specs] == [
        (FullAttentionSpec, (1,)),
        (SlidingWindowSpec, (0,)),
        (SlidingWindowSpec, (2,)),
    ]


def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(cases):
    continuation = cases.continuations("starcoder2")[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    exact = logits(cases.network("starcoder2"), text)
    rounded = logits(load(cases.path("starcoder2")).bfloat16(), text).float()
    llm = make_llm(cases.path("starcoder2"), model_impl="transformers", dtype="bfloat16")
    own = teacher_forced_logits(llm, text, [len(text)]).float()
    assert (own - exact).square().mean() < 1.5 * (rounded - exact).square().mean()


def test_drafts_of_the_host_change_nothing(cases):
    expected = cases.continuations("starcoder2")
    llm = make_llm(
        cases.path("starcoder2"),
        model_impl="transformers",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    in_chunks_of_24(lambda **options: llm, expected)


def test_weights_are_replaced_and_sleep(cases, tmp_path):
    target = tmp_path / "new"
    shutil.copytree(cases.path("starcoder2"), target)
    tensors = load_file(target / "model.safetensors")
    save_file({name: tensor.roll(1, 0).contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    expected = tokens_of(generate(make_llm(target, model_impl="transformers"), [[5, 6, 7]]))
    llm = make_llm(cases.path("starcoder2"), model_impl="transformers")
    model = runner_of(llm).model
    tensors = [*model.tensors.values(), *(layer.weight.dense() for layer in model.linear_layers.values())]
    tensors += [layer.bias for layer in model.linear_layers.values() if layer.bias is not None]
    assert sum(tensor.numel() for tensor in tensors) >= model.num_parameters
    assert tokens_of(generate(llm, [[5, 6, 7]])) != expected
    llm.update_weights(str(target))
    assert tokens_of(generate(llm, [[5, 6, 7]])) == expected
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens_of(generate(llm, [[5, 6, 7]])) == expected


def test_random_weights_need_no_checkpoint(cases, tmp_path):
    for file in cases.path("starcoder2").glob("*.json"):
        shutil.copy(file, tmp_path)
    llm = make_llm(tmp_path, model_impl="transformers", load_format="dummy")
    assert len(tokens_of(generate(llm, [[5, 6, 7]]))[0]) == 64


REFUSED = {
    "convolutions": ("lfm2", {"layer_types": ["conv", GLOBAL, "conv"]}, "tokens meet outside of attention"),
    "states": ("mamba", {}, "needs a number as num_attention_heads"),
    "old-attention": ("bloom", {"n_layer": 2, "n_head": 4}, "transformers' attention interface"),
    "masks": (
        "axk2",
        {
            "layer_types": ["indexed_attention"] * 2,
            "mlp_layer_types": ["dense"] * 2,
            "num_hidden_layers": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
        "its layers read the attention mask",
    ),
    "longrope": ("phi3", NEW_VARIANTS["phi3-longrope"][1], "set max_model_len to at most 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_would_be_wrong_are_refused(tmp_path, case):
    kind, config, message = REFUSED[case]
    write_checkpoint(tmp_path, kind, config)
    with pytest.raises(ValueError, match=message):
        make_llm(tmp_path, model_impl="transformers")


def test_masks_tell_their_windows():
    from transformers import masking_utils as masks

    from quire.models.transformers_backend.probe import _window

    assert _window(masks.causal_mask_function, 100) is None
    assert _window(masks.sliding_window_causal_mask_function(20), 100) == 20
    with pytest.raises(ValueError, match="neither causal nor that of a sliding window"):
        _window(masks.chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int64)), 100)
    with pytest.raises(ValueError, match="neither causal nor that of a sliding window"):
        _window(masks.bidirectional_mask_function, 100)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["SpiralForCausalLM"]}, "has no causal language model SpiralForCausalLM$"),
        ({"architectures": ["SpiralForCausalLM"], "auto_map": {"AutoModel": "evil.Model"}}, "which Quire never runs"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "has no causal language model"),
        ({"model_type": "spiral"}, "has no model_type 'spiral'"),
        ({"quantization_config": {"quant_method": "quip"}}, "checkpoints quantized with 'quip' are not supported"),
    ],
)
def test_configs_that_transformers_cannot_run_are_named(cases, tmp_path, fields, message):
    shutil.copytree(cases.path("starcoder2"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    edit(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        make_llm(tmp_path, model_impl="transformers")


def test_the_code_of_a_checkpoint_is_not_executed(cases, tmp_path):
    shutil.copytree(cases.path("starcoder2"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "custom_generate").mkdir()
    for file in ("evil.py", "custom_generate/generate.py"):
        (tmp_path / file).write_text("raise SystemExit('executed')")
    edit(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    llm = make_llm(tmp_path, model_impl="transformers")
    expected = cases.continuations("starcoder2")[2]
    expected.check(tokens_of(generate(llm, [expected.prompt]))[0])


def test_a_missing_tensor_is_an_error(cases, tmp_path):
    shutil.copytree(cases.path("starcoder2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"missing: model\.layers\.1\.mlp\.c_fc\.weight"):
        make_llm(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_context_parallel_size": 2},
        {"torch_compile": True},
        {"batch_invariant": True},
        {"kv_compression": {"method": "kv_compress", "ratio": 4}},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    ],
)
def test_options_that_it_lacks_are_refused(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"model_impl='transformers' and .*{name}.* exclude each other"):
        EngineConfig.create(model_impl="transformers", **options)


def test_vllm_is_another_word_for_quire():
    assert EngineConfig.create(model_impl="vllm").model.model_impl == "quire"
    with pytest.raises(ConfigError, match="model_impl"):
        EngineConfig.create(model_impl="terratorch")


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("quire.config.transformers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[transformers\]"):
        EngineConfig.create(model_impl="transformers")
