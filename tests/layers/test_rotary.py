"""Every rotary variant against transformers: the same cosines and sines, bit for bit, from both forms of the config.

A difference in the last bit of a frequency is a visible angle at position 100,000.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from quire.layers.rotary import RotaryEmbedding, inverse_frequencies
from quire.layers.rotary_spec import RotarySpec, max_model_positions, rotary_spec, softmax_scale_factor

CPU = torch.device("cpu")
LONGROPE = {"short_factor": [1 + i / 64 for i in range(48)], "long_factor": [1 + i / 2 for i in range(48)]}


@dataclass
class Model:
    """config: what a config.json of before transformers 5 says of heads and rotation; length: of the text at hand."""

    rotary: type[torch.nn.Module]
    config: dict[str, Any]
    head_dim: int
    length: int = 300
    layer_type: str | None = None

    def reference(self) -> Any:
        return AutoConfig.for_model(**deepcopy(self.config))

    def forms(self) -> dict[str, dict[str, Any]]:
        """The config as the checkpoint has it, and as transformers 5 saves it."""
        return {"old": self.config, "new": self.reference().to_dict()}


def llama(**config: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        **config,
    }


LLAMA_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": DEEPSEEK_YARN,
}
DEEPSEEK_V2 = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v2",
    "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
}
PHI_3 = {
    "model_type": "phi3",
    "hidden_size": 384,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", **LONGROPE},
}
PHI_3_TWICE = {**PHI_3, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 2048, **LONGROPE}}
PHI_4_MINI = {**PHI_3, "hidden_size": 512, "partial_rotary_factor": 0.75}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
OLMO_3 = {
    "model_type": "olmo3",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 65536,
    "rope_theta": 500_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "rope_theta": 150000,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
GLM_4 = {
    "model_type": "glm4",
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
PYTHIA = {
    "model_type": "gpt_neox",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rotary_emb_base": 20000,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5_000_000,
    "rotary_dim": 64,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LINEAR = llama(rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=10000.0)
DYNAMIC = llama(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=512)

MODELS = {
    "Llama 2": Model(LlamaRotaryEmbedding, llama(), 128),
    "Llama 3": Model(LlamaRotaryEmbedding, llama(rope_theta=500_000.0, rope_scaling=None), 128),
    "Llama 3.1": Model(
        LlamaRotaryEmbedding, llama(rope_theta=500_000.0, rope_scaling={"rope_type": "llama3", **LLAMA_31}), 128, 20_000
    ),
    "linear": Model(LlamaRotaryEmbedding, LINEAR, 128, 4096),
    "dynamic, a trained length": Model(LlamaRotaryEmbedding, DYNAMIC, 128, 400),
    "Qwen2.5 with YaRN": Model(
        Qwen2RotaryEmbedding,
        {**llama(), "model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": QWEN_YARN},
        128,
        9000,
    ),
    "DeepSeek-V3": Model(DeepseekV3RotaryEmbedding, DEEPSEEK_V3, 64, 9000),
    "Phi-3, a short text": Model(Phi3RotaryEmbedding, PHI_3, 96, 4096),
    "Phi-3, a long text": Model(Phi3RotaryEmbedding, PHI_3, 96, 4097),
    "Phi-3 that states its original length twice": Model(Phi3RotaryEmbedding, PHI_3_TWICE, 96, 3000),
    "Phi-4-mini": Model(Phi3RotaryEmbedding, PHI_4_MINI, 128, 5000),
    "Gemma 3, local": Model(Gemma3RotaryEmbedding, GEMMA_3, 256, 3000, LOCAL),
    "Gemma 3, global": Model(Gemma3RotaryEmbedding, GEMMA_3, 256, 3000, GLOBAL),
    "OLMo 3, local": Model(Olmo3RotaryEmbedding, OLMO_3, 128, 3000, LOCAL),
    "OLMo 3, global": Model(Olmo3RotaryEmbedding, OLMO_3, 128, 3000, GLOBAL),
    "gpt-oss": Model(GptOssRotaryEmbedding, GPT_OSS, 64, 9000),
    "Gemma 4, local": Model(Gemma4TextRotaryEmbedding, GEMMA_4, 256, 3000, LOCAL),
    "Gemma 4, global": Model(Gemma4TextRotaryEmbedding, GEMMA_4, 512, 3000, GLOBAL),
    "GLM-4": Model(Glm4RotaryEmbedding, GLM_4, 128),
    "Pythia": Model(GPTNeoXRotaryEmbedding, PYTHIA, 64),
    "MiniMax-M2": Model(MiniMaxM2RotaryEmbedding, MINIMAX_M2, 128),
}


def tables(
    module: torch.nn.Module, positions: Tensor, of_pairs: slice, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """positions: [tokens] or [3, tokens] -> transformers' cos, sin: [tokens, pairs]; it has two of each pair."""
    positions = positions[..., None, :]
    cos, sin = module(torch.zeros(1), positions, **({"layer_type": layer_type} if layer_type else {}))
    return cos[0, :, of_pairs], sin[0, :, of_pairs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("name", MODELS)
def test_cosines_and_sines_are_bit_for_bit_those_of_transformers(name, form):
    model = MODELS[name]
    spec = rotary_spec(model.forms()[form], model.head_dim, model.layer_type)
    positions = torch.arange(model.length)
    cos, sin = RotaryEmbedding(spec, model.length, CPU)(positions)
    expected = tables(model.rotary(model.reference()), positions, slice(spec.rotary_dim // 2), model.layer_type)
    assert cos.shape == (model.length, spec.rotary_dim // 2)
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])


@pytest.mark.parametrize("name", MODELS)
def test_both_forms_of_a_config_give_the_same_spec(name):
    model = MODELS[name]
    old, new = (rotary_spec(form, model.head_dim, model.layer_type) for form in model.forms().values())
    assert old == new
    assert hash(old) == hash(new)


PAIRS_64 = {"short_factor": [1 + i / 99 for i in range(64)], "long_factor": [1 + i / 3 for i in range(64)]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PARAMETERS = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3},
    {"rope_type": "llama3", **LLAMA_31},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    YARN,
    {**YARN, "factor": 0.5},
    {**YARN, "original_max_position_embeddings": 128},
    {**YARN, "original_max_position_embeddings": 262144},
    {**YARN, "beta_fast": 20, "beta_slow": 2, "attention_factor": 1.25},
    {**YARN, "beta_fast": 8, "beta_slow": 8, "truncate": False},
    {**YARN, "truncate": False},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "longrope", **PAIRS_64, "original_max_position_embeddings": 512},
    {"rope_type": "longrope", **PAIRS_64, "original_max_position_embeddings": 512, "factor": 16.0},
    {"rope_type": "longrope", **PAIRS_64, "original_max_position_embeddings": 512, "factor": 0.5},
    {"rope_type": "longrope", **PAIRS_64, "attention_factor": 1.5},
    {"rope_type": "proportional"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.34, "factor": 2.0},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("theta", [10_000, 500_000.0, 8e6])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_frequencies_and_attention_factors_are_bit_for_bit_those_of_transformers(parameters, theta):
    heads = (
        [(128, 1.0)] if parameters["rope_type"] in ("longrope", "proportional") else [(128, 1.0), (80, 0.4), (64, 0.5)]
    )
    for (head_dim, fraction), length in product(heads, (100, 2048, 5000)):
        scaling = {"rope_theta": theta, **({"partial_rotary_factor": fraction} if fraction < 1 else {}), **parameters}
        config = llama(head_dim=head_dim, rope_parameters=scaling)
        reference = LlamaConfig(**deepcopy(config))
        expected = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference, CPU, seq_len=length)
        frequencies, attention_factor = inverse_frequencies(rotary_spec(config, head_dim), length)
        assert torch.equal(frequencies, expected[0])
        assert attention_factor == expected[1]


def test_dynamic_scaling_of_a_longer_text_is_that_of_transformers():
    """Whose module rounds the base to float32, unlike its own function, which the test above compares with."""
    positions, spec = torch.arange(900), rotary_spec(DYNAMIC, 128)
    cos, sin = RotaryEmbedding(spec, 900, CPU)(positions)
    expected = tables(LlamaRotaryEmbedding(LlamaConfig(**deepcopy(DYNAMIC))), positions, slice(64))
    torch.testing.assert_close(cos, expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, expected[1], atol=1e-4, rtol=0)
    unscaled = RotaryEmbedding(RotarySpec(10_000.0, 128, 512), 900, CPU)(positions)[0]
    assert (unscaled - cos).abs().max() > 0.5


@pytest.mark.parametrize("config", [PHI_3, DYNAMIC])
def test_the_longest_text_the_engine_takes_decides_how_all_texts_are_rotated(config):
    """Keys are cached, and must not turn when a text grows past the trained length."""
    spec, positions = rotary_spec(config, config["hidden_size"] // 4), torch.arange(100)
    of = {length: RotaryEmbedding(spec, length, CPU)(positions)[0] for length in (100, 512, 8192)}
    assert torch.equal(of[100], of[512])
    assert not torch.equal(of[100], of[8192])


def test_deepseek_v2_rotates_by_the_same_angles():
    """transformers has them as complex numbers, whose parts are rounded in another way."""
    positions, spec = torch.arange(9000), rotary_spec(DEEPSEEK_V2, 64)
    expected = DeepseekV2RotaryEmbedding(AutoConfig.for_model(**deepcopy(DEEPSEEK_V2)))(
        torch.zeros(1), positions[None]
    )[0]
    cos, sin = RotaryEmbedding(spec, 9000, CPU)(positions)
    torch.testing.assert_close(torch.complex(cos, sin), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("config", [DEEPSEEK_V3, DEEPSEEK_V2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("name", ["yarn", "deepseek_yarn"])
def test_deepseeks_softmax_scale_factor(config, name):
    spec = rotary_spec({**config, "rope_scaling": {**config["rope_scaling"], "type": name}}, 64)
    reference = AutoConfig.for_model(**{**deepcopy(config), "model_type": "deepseek_v3", "q_lora_rank": 8})
    scale = DeepseekV3Attention(reference, layer_idx=0).scaling
    assert 192**-0.5 * softmax_scale_factor(spec) == pytest.approx(scale, rel=1e-12)
    assert softmax_scale_factor(rotary_spec(llama(rope_scaling=QWEN_YARN), 128)) == 1.0


MULTI_SECTION = {
    "Qwen2-VL": (Qwen2VLRotaryEmbedding, "qwen2_vl_text", {"type": "mrope", "mrope_section": [16, 24, 24]}),
    "Qwen2.5-VL with YaRN": (Qwen2VLRotaryEmbedding, "qwen2_vl_text", {**QWEN_YARN, "mrope_section": [16, 24, 24]}),
    "Qwen3-VL": (
        Qwen3VLTextRotaryEmbedding,
        "qwen3_vl_text",
        {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    ),
    "GLM-4.1V": (
        Glm4vTextRotaryEmbedding,
        "glm4v_text",
        {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("name", MULTI_SECTION)
def test_multi_section_rotation_is_bit_for_bit_that_of_transformers(name):
    module, model_type, scaling = MULTI_SECTION[name]
    config = {**llama(max_position_embeddings=32768, rope_theta=1e6, rope_scaling=scaling), "model_type": model_type}
    spec = rotary_spec(config, 128)
    of_pairs = slice(None, None, 2) if name == "GLM-4.1V" else slice(spec.rotary_dim // 2)  # interleaved, or halves
    rotary = RotaryEmbedding(spec, 500, CPU)
    positions = torch.randint(500, (3, 77), generator=torch.Generator().manual_seed(0))
    expected = tables(module(AutoConfig.for_model(**deepcopy(config))), positions, of_pairs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rotary(positions), expected, strict=True))
    text = positions[0]  # has all three positions equal
    of_text = rotary(text.expand(3, -1))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rotary(text), of_text, strict=True))


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (llama(), 2048),
        (llama(rope_scaling={"type": "linear", "factor": 4.0}), 8192),
        (llama(rope_scaling={"type": "dynamic", "factor": 2.5}), 5120),
        (llama(max_position_embeddings=131072, rope_scaling={"rope_type": "llama3", **LLAMA_31}), 131072),
        (llama(max_position_embeddings=32768, rope_scaling=QWEN_YARN), 131072),
        (llama(max_position_embeddings=262144, rope_scaling=QWEN_YARN), 262144),
        ({"rope_scaling": QWEN_YARN}, 131072),
        (DEEPSEEK_V3, 163840),
        (GPT_OSS, 131072),
        (PHI_3, 131072),
        (GEMMA_3, 131072),
        ({}, 0),
    ],
)
def test_how_long_a_text_a_variant_was_made_for(config, positions):
    """The numbers of the model cards; vLLM's default max_model_len."""
    head_dim = 96 if config is PHI_3 else 128
    assert max_model_positions(config, rotary_spec(config, head_dim)) == positions


def test_older_names_of_a_variant_mean_the_same():
    for older, name, numbers in [
        ("su", "longrope", LONGROPE),
        ("deepseek_yarn", "yarn", {"factor": 2}),
        ("mrope", "default", {}),
    ]:
        specs = [rotary_spec({**PHI_3, "rope_scaling": {"type": kind, **numbers}}, 96) for kind in (older, name)]
        assert specs[0] == specs[1]


def test_what_is_null_is_not_there():
    scaling = {**YARN, "attention_factor": None, "mscale": None, "beta_fast": None, "truncate": None}
    with_null = {"rope_theta": None, "rope_parameters": {**scaling, "rope_theta": None, "partial_rotary_factor": None}}
    assert rotary_spec({**with_null, "partial_rotary_factor": None}, 128) == rotary_spec({"rope_scaling": YARN}, 128)


def test_rope_scaling_given_as_an_override_adds_to_rope_parameters():
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "max_position_embeddings": 2048}
    spec = rotary_spec({**config, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64)
    assert (spec.kind, spec.theta, spec.scaling["factor"]) == ("linear", 5e5, 2.0)


def test_an_architecture_may_know_how_much_of_a_head_is_rotated():
    assert rotary_spec(GLM_4, 128, rotary_dim=32).rotary_dim == 32


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "spiral"},
            "rope type 'spiral' is not supported; supported: default, linear, dynamic, llama3, yarn",
        ),
        ({"type": "linear"}, "rope type 'linear' needs a positive 'factor'; the config has None"),
        ({"type": "linear", "factor": 0}, "rope type 'linear' needs a positive 'factor'; the config has 0"),
        ({"type": "linear", "factor": "8"}, "rope type 'linear' needs a positive 'factor'; the config has '8'"),
        ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic' needs a positive 'max_position_embeddings'"),
        ({"rope_type": "llama3", "factor": 2.0}, "rope type 'llama3' needs a positive 'low_freq_factor'"),
        ({"type": "yarn", "factor": 2.0}, "rope type 'yarn' needs a positive 'original_max_position_embeddings'"),
        ({**YARN, "factor": None}, "rope type 'yarn' needs a positive 'factor'; the config has None"),
        ({"type": "longrope", "short_factor": [1.0] * 64}, "rope type 'longrope' needs a positive 'long_factor'"),
        (
            {"type": "su", **LONGROPE, "original_max_position_embeddings": 1},
            "'short_factor' has 48 numbers for 64 rotated",
        ),
        ({"type": "mrope", "mrope_section": [16, 24, 25]}, r"mrope_section=\[16, 24, 25\] does not add up to 64"),
        ({"partial_rotary_factor": 0.008}, "rotary dimension 1 is not a positive even number"),
        ({GLOBAL: {"rope_type": "default"}}, "rope_parameters has the layer types full_attention, but not None"),
    ],
)
def test_a_variant_that_is_unknown_or_incomplete_is_an_error_that_names_the_field(scaling, message):
    with pytest.raises(ValueError, match=message):
        rotary_spec({"rope_parameters": scaling}, 128)
