"""The options of pictures and other media."""

from dataclasses import dataclass
from typing import Any

from quire.messages.media import EncoderLimits
from quire.options.declaration import ConfigError, at_least, option

MODALITIES = ("image", "video", "audio")
CACHE_SIZE = 16_384  # embeddings


@dataclass(frozen=True)
class MultiModalConfig:
    """Pictures and other media."""

    limit_mm_per_prompt: dict[str, Any] = option({}, json=True)
    mm_processor_kwargs: dict[str, Any] = option({}, json=True)
    allowed_local_media_path: str | None = None
    allowed_media_domains: list[str] = option([])
    max_num_encoder_input_tokens: int | None = option(None, size=True)
    encoder_cache_size: int | None = option(None, size=True)
    enable_prompt_embeds: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_encoder_input_tokens", "encoder_cache_size")
        for name, count in self.limit_mm_per_prompt.items():
            if name not in MODALITIES or isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"limit_mm_per_prompt must give numbers for {', '.join(MODALITIES)}, got "
                                  f"{self.limit_mm_per_prompt!r}")  # fmt: skip

    def limits(self, step_tokens: int, longest_chunk: int) -> EncoderLimits:
        """step_tokens: the most tokens of a step. longest_chunk: of these, the most of one request."""
        budget = self.max_num_encoder_input_tokens or step_tokens
        capacity = self.encoder_cache_size or max(CACHE_SIZE, budget)
        return EncoderLimits(budget, capacity, longest_chunk, exact=self.max_num_encoder_input_tokens is not None)
