"""The heads of drafters, by the method of speculative_config and, for the method mtp, by the model's architecture."""

from quire.models.heads.eagle import eagle
from quire.models.heads.eagle3 import eagle3
from quire.models.heads.head import HeadMaker
from quire.models.heads.medusa import medusa
from quire.models.heads.mlp_speculator import mlp_speculator
from quire.models.heads.mtp import deepseek_mtp, mimo_mtp, qwen_mtp

HEADS: dict[str, HeadMaker] = {"eagle": eagle, "eagle3": eagle3, "medusa": medusa, "mlp_speculator": mlp_speculator}
MTP_HEADS: dict[str, HeadMaker] = {
    "DeepseekV32ForCausalLM": deepseek_mtp,
    "DeepseekV3ForCausalLM": deepseek_mtp,
    "Glm4MoeForCausalLM": deepseek_mtp,
    "GlmMoeDsaForCausalLM": deepseek_mtp,
    "MiMoForCausalLM": mimo_mtp,
    "Qwen3NextForCausalLM": qwen_mtp,
    "Qwen3_5ForCausalLM": qwen_mtp,
    "Qwen3_5ForConditionalGeneration": qwen_mtp,
    "Qwen3_5MoeForCausalLM": qwen_mtp,
    "Qwen3_5MoeForConditionalGeneration": qwen_mtp,
}
