"""Architectures by name: all are covered, each is short, and one that is not there gets a helpful error."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.models.architectures
from quire.checkpoints.metadata import hf_config
from quire.models.registry import ARCHITECTURES, spec_of
from support.checkpoints import EOS, FAMILIES, byte_level_tokenizer
from support.engines import make_llm, teacher_forced_logits
from support.reference import logits, prompts
from support.seeing import SEEING
from support.stand_in_layouts import SAME

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}


def test_an_unsupported_architecture_is_an_error_that_lists_the_supported_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"CTRLLMHeadModel is not supported; supported: Afmoe.*Generation, BertModel, Bit.*Yi"
    ):
        spec_of({"architectures": ["CTRLLMHeadModel"]})
    with pytest.raises(ValueError, match=r"the nearest is Qwen2ForCausalLM$"):
        spec_of({"architectures": ["Qwen2ForCausalLanguage"]})
    with pytest.raises(ValueError, match=r"architecture \(none named in config.json\) is not supported"):
        spec_of({})


def test_a_config_that_lacks_a_field_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"config.json of a LlamaForCausalLM lacks 'vocab_size'"):
        spec_of({**LLAMA, "intermediate_size": 64})


def test_an_architecture_takes_less_than_sixty_lines_on_average():
    files = list(Path(quire.models.architectures.__path__[0]).glob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines / len(FAMILIES) < 60


def test_yi_is_llama(checkpoints):
    config = hf_config(checkpoints.path("llama"), {})
    assert spec_of({**config, "architectures": ["YiForCausalLM"]}) == spec_of(config)


TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 20,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=319, tie_word_embeddings=True
    )
    config._attn_implementation = "eager"
    return Gemma3ForConditionalGeneration(config)


def _llama4() -> Any:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text = TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 32, "floor_scale": 16}
    vision = VISION | {
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_feature_layer": -1,
    }
    config = Llama4Config(text_config=text, vision_config=vision, image_token_index=319, boi_token_index=318)
    config._attn_implementation = "eager"
    return Llama4ForConditionalGeneration(config)


def _gemma4() -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    kinds = ["sliding_attention", "full_attention"] * 3
    own = {"layer_types": kinds, "global_head_dim": 24, "num_kv_shared_layers": 2}
    text = TEXT | own | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "pad_token_id": 0}
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=True)
    config._attn_implementation = "eager"
    return Gemma4ForConditionalGeneration(config)


def _mistral3(text: Any) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

    vision = PixtralVisionConfig(**VISION, head_dim=16)
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=319)
    config._attn_implementation = "eager"
    return Mistral3ForConditionalGeneration(config)


def _mistral4() -> Any:
    from transformers import Mistral4Config

    latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    fields = {**TEXT, **latent, **experts, "num_hidden_layers": 2, "num_key_value_heads": 4}
    del fields["head_dim"], fields["sliding_window"]
    return _mistral3(Mistral4Config(**fields))


def _ministral3() -> Any:
    from transformers import Ministral3Config

    return _mistral3(Ministral3Config(**{**TEXT, "num_hidden_layers": 2, "sliding_window": None}))


def _hyperclovax() -> Any:
    from transformers import HyperCLOVAXConfig, HyperCLOVAXVisionV2Config, HyperCLOVAXVisionV2ForConditionalGeneration

    text = HyperCLOVAXConfig(**{**TEXT, "num_hidden_layers": 2, "attention_multiplier": 0.3, "logits_scaling": 0.5})
    vision = {"model_type": "qwen2_5_vl_vision", "depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = HyperCLOVAXVisionV2Config(text_config=text, vision_config={**vision, "intermediate_size": 32})
    config._attn_implementation = "eager"
    return HyperCLOVAXVisionV2ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "make",
    [_gemma3, _llama4, _gemma4, _mistral4, _ministral3, _hyperclovax],
    ids=["gemma3", "llama4", "gemma4", "mistral4", "ministral3", "hyperclovax"],
)
def test_the_text_model_of_a_model_that_sees_equals_transformers(tmp_path, make):
    torch.manual_seed(0)
    model = make().float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
    model.tie_weights()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    # transformers' Llama 4 fails without pictures.
    text_model = model.language_model if make is _llama4 else model
    for prompt in prompts(318, 9)[-2:]:
        expected = logits(text_model, prompt)
        ours = teacher_forced_logits(make_llm(tmp_path), prompt)
        assert (ours - expected).abs().max() / expected.std() < 5e-5


def test_every_architecture_has_a_variant_that_is_compared(checkpoints):
    named = {hf_config(checkpoints.path(variants[0]), {})["architectures"][0] for variants in FAMILIES.values()}
    other_names = {
        "YiForCausalLM",
        "PhiMoEForCausalLM",
        "Llama4ForConditionalGeneration",
        "MPTForCausalLM",
        "ExaoneMoEForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "HCXVisionV2ForCausalLM",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        *chain.from_iterable(SAME.values()),
        "Step3p7ForConditionalGeneration",
        "MuseGlimmerForConditionalGeneration",
        "Dots3NoteForConditionalGeneration",
        "NemotronHPuzzleForCausalLM",  # the variant nemotron_h-puzzle
    }
    assert named | other_names | SEEING == set(ARCHITECTURES)  # tests/multimodal compares the last ones
