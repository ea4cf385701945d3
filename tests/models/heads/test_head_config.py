"""What config.json says of a drafter, in the formats in which drafters are published."""

from __future__ import annotations

from typing import Any

import pytest

from quire.models.heads.config import speculative_fields, speculators_target

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "num_attention_heads": 32}


def speculators(kind: str, *proposals: dict[str, Any], default: str = "greedy", verifier: Any = "qwen/target") -> Any:
    """A config as the library writes it, without the fields that describe the layers."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": default,
            "proposal_methods": list(proposals),
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": verifier},
        },
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": 32000,
    }


GREEDY = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
SAMPLE = {"proposal_type": "sample", "speculative_tokens": 5}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "name", "method", "number"),
    [
        ({**LLAMA, "num_hidden_layers": 1}, "yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle", None),
        ({**LLAMA, "num_hidden_layers": 1}, "/models/eagle-heads/llama-160m", "draft_model", None),
        ({"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, "head", "eagle", None),
        ({**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, "head", "eagle3", None),
        ({**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"]}, "AngelSlim/Qwen3-8B_eagle3", "eagle3", None),
        (LLAMA, "AngelSlim/Qwen3-8B_eagle3/", "eagle3", None),
        ({"medusa_num_heads": 2, "medusa_num_layers": 1}, "FasterDecoding/medusa-vicuna-7b-v1.3", "medusa", 2),
        ({**LLAMA, "medusa_num_heads": 5, "medusa_num_layers": 1}, "Qwen2-7B-Instruct-medusa", "medusa", 5),
        ({"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 4}, "head", "medusa", 4),
        (
            {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 4},
            "ibm-ai-platform/llama3-8b-accelerator",
            "mlp_speculator",
            4,
        ),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "deepseek-ai/DeepSeek-V3", "mtp", 1),
        ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"], "n_predict": 2}, "head", "mtp", 2),
        ({**LLAMA, "num_nextn_predict_layers": 0}, "JackFram/llama-68m", "draft_model", None),
        ({**LLAMA, "num_lookahead_tokens": 6}, "head", "draft_model", 6),
        (speculators("eagle3", GREEDY), "RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3", 3),
        (speculators("eagle3", SAMPLE, GREEDY), "head", "eagle3", 3),
        (speculators("eagle3", SAMPLE, default="tree"), "head", "eagle3", 5),
        (speculators("eagle3"), "head", "eagle3", None),
        (speculators("eagle", GREEDY), "head", "eagle", 3),
        (speculators("peagle", GREEDY), "head", "eagle3", 3),
        (speculators("mtp", GREEDY), "head", "mtp", 3),
        (speculators("medusa", GREEDY), "head", "medusa", 3),
        (speculators("independent", GREEDY), "head", "draft_model", 3),
        ({"speculators_model_type": "eagle3"}, "head", "eagle3", None),
    ],
)
def test_the_method_and_the_number_of_drafts(config, name, method, number):
    expected = {"method": method} if number is None else {"method": method, "num_speculative_tokens": number}
    assert speculative_fields(config, name) == expected


def test_a_method_that_is_not_supported_is_an_error_with_those_that_are():
    with pytest.raises(ValueError, match="speculators_model_type 'dflash' is not supported; supported: eagle, eagle3,"):
        speculative_fields(speculators("dflash", GREEDY))


@pytest.mark.parametrize("number", [0, -1, 2.5, "3", True])
def test_a_wrong_number_of_drafts_is_an_error(number):
    with pytest.raises(ValueError, match=f"number of drafts must be at least 1, got {number!r}"):
        speculative_fields({"model_type": "medusa", "num_heads": number})
    with pytest.raises(ValueError, match="number of drafts must be at least 1"):
        speculative_fields(speculators("eagle3", {**GREEDY, "speculative_tokens": number}))


def test_a_served_speculator_stands_for_its_target_with_it():
    fields = {"model": "RedHatAI/head", "method": "eagle3", "num_speculative_tokens": 3}
    assert speculators_target(speculators("eagle3", GREEDY), "RedHatAI/head") == ("qwen/target", fields)


def test_other_models_stand_for_themselves():
    assert speculators_target(LLAMA, "meta-llama/Llama-2-7b") is None
    assert speculators_target({"medusa_num_heads": 2}, "FasterDecoding/medusa-vicuna-7b-v1.3") is None


@pytest.mark.parametrize("verifier", [None, ""])
def test_a_served_speculator_without_a_target_is_an_error_with_a_way_out(verifier):
    with pytest.raises(ValueError, match=r"""serve the target with --speculative-config '\{"model": "a/head"\}'"""):
        speculators_target(speculators("eagle3", GREEDY, verifier=verifier), "a/head")
    with pytest.raises(ValueError, match="does not name its target"):
        speculators_target({"speculators_model_type": "eagle3", "speculators_config": None}, "a/head")
