"""docs/models.md: its table says what the tests compare, and is written by them (`pytest ... --write`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.checkpoints.metadata import hf_config
from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, LatentAttentionSpec
from quire.layers.compressed_spec import CompressedEntriesSpec
from quire.layers.specs import MoESpec
from quire.layers.state_spec import DeltaSpec, LightningSpec, Mamba2Spec, MambaSpec, RwkvSpec, ShortConvSpec
from quire.models.registry import spec_of
from quire.models.spec import DecoderSpec
from support.checkpoints import FAMILIES
from support.engines import GREEDY, generate, make_llm, runner_of
from support.layouts import RENAMED, STAND_INS
from support.stand_in_layouts import SAME

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by tests/models/test_models_page.py --write -->\n", "<!-- end -->\n"

PEOPLE_CALL_IT = {
    "llama": "Llama 1, 2, 3, SmolLM 1/2, TinyLlama, Yi",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "internlm2": "InternLM2",
    "minicpm": "MiniCPM",
    "mimo": "MiMo",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma4_text": "Gemma 4 (text)",
    "gemma3n_text": "Gemma 3n (text)",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "olmo2": "OLMo-2",
    "olmo3": "OLMo-3",
    "granite": "Granite",
    "glm": "GLM-4",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "smollm3": "SmolLM3",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "opt": "OPT",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "falcon": "Falcon",
    "cohere": "Command-R, Aya",
    "cohere2": "Command-R7B, Command A",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gptj": "GPT-J",
    "codegen": "CodeGen",
    "persimmon": "Persimmon",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "llama4_text": "Llama 4 (text)",
    "arcee": "Arcee",
    "seed_oss": "Seed-OSS",
    "nemotron": "Nemotron-3, Nemotron-4, Minitron",
    "exaone4": "EXAONE 4",
    "apertus": "Apertus",
    "olmo": "OLMo-1",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 (experts)",
    "bitnet": "BitNet b1.58",
    "hunyuan_v1_dense": "Hunyuan",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "olmoe": "OLMoE",
    "phimoe": "Phi-3.5-MoE",
    "dots1": "dots.llm1",
    "minimax_m2": "MiniMax-M2, M2.1",
    "minimax_m3_vl_text": "MiniMax-M3 (text)",
    "granite_swa": "Granite with windows",
    "youtu": "Youtu-LLM",
    "minicpm3": "MiniCPM3",
    "mistral4": "Mistral 4 (text)",
    "olmo_hybrid": "OLMo Hybrid",
    "granitemoe": "Granite 3 (experts)",
    "granitemoeshared": "Granite with shared experts",
    "granitemoe_swa": "Granite with windows (experts)",
    "flex_olmo": "FlexOlmo",
    "exaone_moe": "EXAONE MoE, K-EXAONE",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "solar_open": "Solar Open",
    "hyperclovax": "HyperCLOVA X",
    "cwm": "Code World Model",
    "jais2": "Jais 2",
    "mellum": "Mellum 2",
    "cohere2_moe": "Cohere2 with experts",
    "hy_v3": "Hunyuan 3",
    "afmoe": "AFMoE (Trinity)",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "step3p5": "Step 3.5, Step 3.7 (text)",
    "muse_glimmer_text": "Muse Glimmer (text)",
    "dbrx": "DBRX",
    "hy_v4": "Hunyuan 4",
    "dots3_note_text": "dots3 (text)",
    "hrm_text": "HRM-Text",
    "mamba": "Mamba",
    "falcon_mamba": "Falcon Mamba",
    "jamba": "Jamba",
    "mamba2": "Mamba-2",
    "bamba": "Bamba",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "falcon_h1": "Falcon-H1",
    "zamba2": "Zamba2",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_5_moe_text": "Qwen3.5 with experts (text)",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "lfm3": "LFM3",
    "rwkv7": "RWKV-7 (Goose)",
    "glm_moe_dsa": "GLM-5, GLM-5.1",
    "glm5_next_text": "GLM-5-Next (text)",
    "internlm3": "InternLM3",
    "iquestcoder": "IQuest-Coder",
    "iquestloopcoder": "IQuest-LoopCoder",
    "orion": "Orion",
    "telechat3": "TeleChat3",
    "telechat": "TeleChat2",
    "teleflm": "Tele-FLM",
    "pangu_embedded": "openPangu-Embedded",
    "deepseek": "DeepSeekMoE",
    "bailing_moe": "Ling (BailingMoE)",
    "bailing_moe_v2": "Ling 2.0, Ring 2.0",
    "param2moe": "Param-2",
    "chatglm": "ChatGLM2, ChatGLM3, GLM-4-9B",
    "bailing_hybrid": "Ling 3",
    "bailing_moe_linear": "Ling 2.5",
    "solar": "Solar Pro",
    "nemotron-nas": "DeciLM, Llama-Nemotron",
    "plamo3": "PLaMo 3",
    "rnj1": "Rnj-1",
    "domyn_edge": "Domyn Edge",
    "pangu_ultra_moe": "openPangu-Ultra-MoE",
    "mistral_large3": "Mistral Large 3 (text)",
    "mimo_v2": "MiMo-V2.5",
    "step3_text": "Step 3 (text)",
    "step1": "Step 1",
}

OTHER_NAMES = {
    **SAME,
    "llama": ["YiForCausalLM", *SAME["llama"]],
    "gemma3_text": ["Gemma3ForConditionalGeneration"],
    "gemma4_text": ["Gemma4ForConditionalGeneration"],
    "gemma3n_text": ["Gemma3nForConditionalGeneration"],
    "llama4_text": ["Llama4ForConditionalGeneration"],
    "phimoe": ["PhiMoEForCausalLM"],
    "mpt": ["MPTForCausalLM"],
    "exaone_moe": ["ExaoneMoEForCausalLM"],
    "step3p5": ["Step3p7ForConditionalGeneration"],
    "muse_glimmer_text": ["MuseGlimmerForConditionalGeneration"],
    "dots3_note_text": ["Dots3NoteForConditionalGeneration"],
}

REFERENCES = {"rwkv7": "the paper's equations, and these against the package `rwkv`"}


def of_attention(has: Callable[[AttentionSpec], object]) -> Callable[[DecoderSpec], object]:
    return lambda spec: any(isinstance(mixer, AttentionSpec) and has(mixer) for _, mixer in spec.cached)


def of_latents(has: Callable[[LatentAttentionSpec], object]) -> Callable[[DecoderSpec], object]:
    return lambda spec: any(isinstance(mixer, LatentAttentionSpec) and has(mixer) for mixer in spec.mixers)


def of_experts(has: Callable[[MoESpec], object]) -> Callable[[DecoderSpec], object]:
    return lambda spec: any(isinstance(mlp, MoESpec) and has(mlp) for mlp in spec.mlps)


def partial_rotation(spec: DecoderSpec) -> bool:
    layers = zip(spec.mixers, spec.rotary, strict=True)
    return any(r and isinstance(mixer, AttentionSpec) and r.rotary_dim < mixer.head_dim for mixer, r in layers)


FEATURES: list[tuple[str, Callable[[DecoderSpec], object]]] = [
    ("fewer KV heads", of_attention(lambda a: a.num_kv_heads < a.num_heads)),
    ("latent attention", lambda s: any(isinstance(mixer, LatentAttentionSpec) for mixer in s.mixers)),
    ("sparse attention", of_latents(lambda a: a.indexer)),
    ("shared selections", of_latents(lambda a: a.shares_selection)),
    ("attention to selected blocks", lambda s: any(isinstance(m, BlockAttentionSpec) for m in s.mixers)),
    ("compressed attention", lambda s: any(isinstance(part, CompressedEntriesSpec) for _, part in s.cached)),
    ("state-space layers", lambda s: any(isinstance(mixer, MambaSpec | Mamba2Spec) for _, mixer in s.cached)),
    ("delta rule", lambda s: any(isinstance(mixer, DeltaSpec) for _, mixer in s.cached)),
    ("generalized delta rule", lambda s: any(isinstance(mixer, RwkvSpec) for mixer in s.mixers)),
    ("lightning attention", lambda s: any(isinstance(mixer, LightningSpec) for mixer in s.mixers)),
    ("short convolutions", lambda s: any(isinstance(mixer, ShortConvSpec) for mixer in s.mixers)),
    ("windows", lambda s: any(s.windows)),
    ("chunks of attention", lambda s: s.chunks),
    ("temperature by position", of_attention(lambda a: a.temperature)),
    ("sinks", of_attention(lambda a: a.sinks)),
    ("sinks of latent attention", of_latents(lambda a: a.sinks)),
    ("ALiBi", of_attention(lambda a: a.alibi)),
    ("roots of distances", of_attention(lambda a: a.root_reach)),
    ("blended attention", of_attention(lambda a: a.blends)),
    ("soft caps", lambda s: s.logit_soft_cap or of_attention(lambda a: a.soft_cap)(s)),
    ("norms of values", of_attention(lambda a: a.value_norm)),
    ("gates of heads", of_attention(lambda a: a.output_gate == "by_head")),
    ("short values", of_attention(lambda a: a.value_dim)),
    ("values that are keys", of_attention(lambda a: a.values_are_keys)),
    ("shared keys and values", lambda s: any(getattr(mixer, "source", None) is not None for mixer in s.mixers)),
    ("layers used several times", lambda s: s.weights_of or s.residual == "blocks"),
    ("several streams", lambda s: s.streams > 1),
    ("mixed streams", lambda s: s.hyper is not None and s.hyper.balances),
    ("embeddings by layer", lambda s: s.per_layer),
    ("norms of q and k", of_attention(lambda a: a.qk_norm)),
    ("norms before projections", of_attention(lambda a: a.sub_norm)),
    ("clipped q, k, v", of_attention(lambda a: a.qkv_clip)),
    ("biases", of_attention(lambda a: a.qkv_bias or a.output_bias)),
    ("q, k, v in one tensor", of_attention(lambda a: a.qkv_layout != "separate")),
    ("learned positions", lambda s: s.position_offset is not None),
    ("partial rotation", partial_rotation),
    ("interleaved rotation", of_attention(lambda a: a.interleaved_rotary)),
    ("unrotated layers", lambda s: None in s.rotary and any(s.rotary)),
    *(
        (f"{kind} scaling", lambda s, kind=kind: any(r and r.kind == kind for r in s.rotary))
        for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")
    ),
    ("layer norms", lambda s: s.norm.kind == "layer"),
    ("norms after branches", lambda s: s.names.get("mlp_post_norm") or s.residual == "post_norm"),
    ("parallel branches", lambda s: s.residual == "parallel"),
    ("experts", of_experts(lambda moe: True)),
    ("shared experts", of_experts(lambda moe: moe.shared)),
    ("experts by token id", of_experts(lambda moe: moe.hashed)),
    ("groups of experts", of_experts(lambda moe: moe.groups > 1)),
    ("tied embeddings", lambda s: s.tie_embeddings),
]


def table(checkpoints, recorded: Callable[[str], str]) -> str:
    """recorded: whether a family's decoding steps are, in bfloat16 on a CPU."""
    columns = ["family", "`architectures`", "compared features", "checked against", "recorded steps", "test"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for family, variants in FAMILIES.items():
        configs = [hf_config(checkpoints.path(variant), {}) for variant in variants]
        specs = [spec_of(config) for config in configs]
        names = [f"`{config['architectures'][0]}`" for config in configs[:1]]
        names += [f"`{name}`" for name in OTHER_NAMES.get(family, [])]
        features = [label for label, has in FEATURES if any(map(has, specs))]
        other = STAND_INS.get(family)
        how = "renamed" if family in RENAMED else "changed"
        reference = f"transformers' {other.capitalize()}, {how}" if other else REFERENCES.get(family, "transformers")
        rows.append(
            f"| {PEOPLE_CALL_IT[family]} | {', '.join(names)} | {', '.join(features)} | {reference} | "
            f"{recorded(family)} | `pytest -m \"family(name='{family}')\"` |"
        )
    return "\n".join(rows) + "\n"


@pytest.mark.slow
def test_the_page_says_what_the_tests_compare(checkpoints, request: pytest.FixtureRequest):
    """All columns but one, which takes an engine for each family: the next test."""
    cells = re.findall(r"\| ([^|]*) \| `pytest -m \"family\(name='([\w-]+)'\)\"` \|", PAGE.read_text())
    on_page = {family: cell for cell, family in cells}
    check(checkpoints, request, lambda family: on_page.get(family, "unknown"))


@pytest.mark.slow
def test_the_page_says_whose_steps_are_recorded_on_a_cpu(checkpoints, request: pytest.FixtureRequest):
    def recorded(family: str) -> str:
        llm = make_llm(checkpoints.path(FAMILIES[family][0]), dtype="bfloat16")
        generate(llm, [[5, 6, 7]], GREEDY.clone(max_tokens=4))
        return "yes" if runner_of(llm).forward._recorded else "no"

    check(checkpoints, request, recorded)


def check(checkpoints, request: pytest.FixtureRequest, recorded: Callable[[str], str]) -> None:
    text = PAGE.read_text()
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.DOTALL)
    assert pattern.search(text)
    made = table(checkpoints, recorded)
    if request.config.getoption("--write"):
        PAGE.write_text(pattern.sub(lambda _: made, text))
    else:
        assert pattern.search(text)[0] == made, "docs/models.md is not what the tests compare: run this with --write"
