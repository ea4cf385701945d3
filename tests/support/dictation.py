"""A logits processor with which a request says what its answer is: extra_args={"say": token ids}."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces

THOUGHT = "<think>\nIt is a city.\n</think>\n\nI will look."
CALLS = """
<tool_call>
{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>"""


class Dictation(LogitsProcessor):
    """The output is these tokens, and then end-of-sequence."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.texts: dict[int, list[int]] = {}

    def add(self, row: int, request: NewRequest) -> bool:
        self.texts[row] = (request.sampling.extra_args or {}).get("say", [])
        return bool(self.texts[row])

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        for index, row, position in zip(at.index, at.rows, at.num_output, strict=True):
            text = self.texts[row]
            if position < len(text):
                token_id = text[position]
                kept = logits[index, token_id].clone()
                logits[index] = -np.inf
                logits[index, token_id] = kept


class Parrot(Dictation):
    """The output is what the last user of a conversation with the bundled model said, and then end-of-sequence.

    Requests with extra_args={"say": ...} are left to Dictation.
    """

    def add(self, row: int, request: NewRequest) -> bool:
        if "say" in (request.sampling.extra_args or {}):
            return False
        begin_id, end_id, num_begin = 1, 2, 3  # <|im_start|>, <|im_end|>, tokens of "<|im_start|>user\n"
        prompt = request.token_ids[: request.num_prompt_tokens]
        end = max(index for index, token_id in enumerate(prompt) if token_id == end_id)
        begin = max(index for index, token_id in enumerate(prompt[:end]) if token_id == begin_id)
        self.texts[row] = [*prompt[begin + num_begin : end], end_id]
        return True
