"""Text encoders (BART, T5): the decoder reads their output by cross-attention."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.multimodal.families.base import Config, Family


class Texts(Family):
    """A family without media: texts are given as prompts, see encoder_prompts.py."""

    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        self.config = config
        self.kinds = {}

    def beginning(self, generation_config: Mapping[str, Any]) -> list[int]:
        """Return the decoder's first tokens. Raises ValueError if the checkpoint does not define them."""
        given = {**self.config, **{name: value for name, value in generation_config.items() if value is not None}}
        start = given.get("decoder_start_token_id")
        start = given.get("bos_token_id") if start is None else start
        if start is None:
            raise ValueError("neither config.json nor generation_config.json has a decoder_start_token_id")
        forced = given.get("forced_bos_token_id")
        return [start] if forced is None else [start, forced]
