"""`LLM.llm_engine`, as in vLLM: counts of unfinished requests, and facts about the model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.text.hf_tokenizer import HFTokenizer

if TYPE_CHECKING:
    from quire.engine.llm import LLM


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model. max_model_len: the context length in tokens. vocab_size: can exceed the tokenizer's."""

    model: str
    tokenizer: str
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    seed: int | None

    def get_vocab_size(self) -> int:
        return self.vocab_size


class LLMEngine:
    """A read-only view of an LLM."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        options = llm.config.model
        model = options.model or "quire-demo"
        self.model_config = ModelFacts(
            model,
            options.tokenizer or model,
            getattr(torch, llm.dtype),
            llm.max_model_len,
            llm.processor.vocab_size,
            options.seed,
        )

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished sequences. A request has up to n of them."""
        return self._llm.output_processor.num_unfinished

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_tokenizer(self) -> HFTokenizer:
        return self._llm.get_tokenizer()
