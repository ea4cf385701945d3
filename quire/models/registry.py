"""The supported architectures, by the name in a checkpoint's config.json."""

import difflib
import re

from quire.models.architectures.bert import bert, gte, modernbert, nomic_bert, roberta
from quire.models.architectures.cohere import cohere, cohere2
from quire.models.architectures.deepseek import deepseek
from quire.models.architectures.falcon import falcon
from quire.models.architectures.gemma import gemma, gemma2, gemma3, gemma3_multimodal
from quire.models.architectures.glm import glm, glm4, glm4_moe
from quire.models.architectures.gpt import gpt2, gpt_neox
from quire.models.architectures.gpt_oss import gpt_oss
from quire.models.architectures.llama import granite, internlm2, llama, minicpm, mistral, smollm3
from quire.models.architectures.mixtral import mixtral
from quire.models.architectures.olmo import olmo2, olmo3
from quire.models.architectures.opt import opt
from quire.models.architectures.phi import phi, phi3
from quire.models.architectures.qwen import mimo, qwen2, qwen2_moe, qwen3, qwen3_moe
from quire.models.architectures.stablelm import stablelm
from quire.models.spec import Architecture, DecoderSpec, HfConfig

ARCHITECTURES: dict[str, Architecture] = {
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "FalconForCausalLM": falcon,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_multimodal,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "InternLM2ForCausalLM": internlm2,
    "LlamaForCausalLM": llama,
    "MiMoForCausalLM": mimo,
    "MiniCPMForCausalLM": minicpm,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "OPTForCausalLM": opt,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "SmolLM3ForCausalLM": smollm3,
    "StableLmForCausalLM": stablelm,
    "YiForCausalLM": llama,
}
ENCODERS: dict[str, Architecture] = {  # with any head: BertModel, BertForSequenceClassification ...
    "Bert": bert,
    "Camembert": roberta,
    "Gte": gte,
    "ModernBert": modernbert,
    "New": gte,  # Alibaba-NLP's own name
    "NomicBert": nomic_bert,
    "Roberta": roberta,
    "XLMRoberta": roberta,
}
_HEADS = r"(Model|For(MaskedLM|SequenceClassification|TokenClassification|RewardModel))$"


def _architecture(name: str) -> Architecture | None:
    """The architecture of this name, or of its base model, if the name is that of a model without a head or with
    another one."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name == "HF_ColBERT":
        return bert
    base = re.sub(_HEADS, "", name)
    if base == name:
        return None
    return ENCODERS.get(base) or ARCHITECTURES.get(f"{base.removesuffix('Text')}ForCausalLM")


def spec_of(config: HfConfig) -> DecoderSpec:
    """The spec of a checkpoint's config. Raises ValueError for an unsupported architecture or a missing field."""
    names = config.get("architectures") or []
    for name in names:
        if (architecture := _architecture(name)) is not None:
            try:
                return architecture(config)
            except KeyError as missing:
                raise ValueError(f"config.json of a {name} lacks {missing.args[0]!r}") from missing
    near = difflib.get_close_matches(names[0], ARCHITECTURES, n=1, cutoff=0.4) if names else []
    raise ValueError(
        f"architecture {', '.join(names) or '(none named in config.json)'} is not supported; supported: "
        f"{', '.join(sorted([*ARCHITECTURES, *(f'{name}Model' for name in ENCODERS)]))}"
        + (f"; the nearest is {near[0]}" if near else "")
    )
