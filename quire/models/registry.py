"""Which architectures there are, by the name in a checkpoint's config.json."""

import difflib

from quire.models.architectures.llama import llama
from quire.models.architectures.mistral import mistral
from quire.models.architectures.qwen import qwen2, qwen3
from quire.models.spec import Architecture, DecoderSpec, HfConfig

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def spec_of(config: HfConfig) -> DecoderSpec:
    """The spec of a checkpoint's config. Raises ValueError naming what is unsupported or missing."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            try:
                return ARCHITECTURES[name](config)
            except KeyError as missing:
                raise ValueError(f"config.json of a {name} lacks {missing}") from missing
    near = difflib.get_close_matches(names[0], ARCHITECTURES, n=1) if names else []
    raise ValueError(
        f"architecture {', '.join(names) or '(none named in config.json)'} is not supported; supported: "
        f"{', '.join(sorted(ARCHITECTURES))}" + (f"; the nearest is {near[0]}" if near else "")
    )
