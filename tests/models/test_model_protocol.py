"""The worker asks of a model what the protocol says: a model that keeps nothing runs like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import quire.worker.assembly.loading
from quire.attention.base import AttentionBackend
from quire.checkpoints.hub import bundled_model
from quire.layers.attention_spec import CacheShape
from quire.layers.forward_state import ForwardState, pick
from quire.messages.sampling_params import SamplingParams
from quire.models.model import LoadedModel, Model
from quire.ops import Kernels, Target
from quire.parallel.pipeline import Stage
from support.engines import generate, make_llm, runner_of, tokens_of

VOCAB = 4096  # that of the bundled model, whose tokenizer and config the engine reads


class Bigrams(Model):
    """The next token depends on the last one alone, so there is nothing to keep of the tokens before it."""

    def __init__(self) -> None:
        self.kernels = Kernels(Target(torch.device("cpu"), torch.float32))
        self.vocab_size, self.rotary, self.num_parameters = VOCAB, [], VOCAB * 8
        self.num_token_ids, self.stage = VOCAB, Stage(range(1))
        self.kv_specs: list[Any] = []
        self.cache_shapes: list[CacheShape] = []
        self.table = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
        self.bound: list[int] = []

    def bind_cache(self, backends: Sequence[AttentionBackend], memory: Sequence[Tensor]) -> None:
        assert not backends
        self.bound.append(len(memory))

    def embed(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        return self.table[ids]

    def forward(
        self, x: Tensor, state: ForwardState, rows: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        assert not state.plans
        return pick(x, rows).roll(1, dims=-1)

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        return hidden @ self.table.T

    def continuation(self, token: int, count: int) -> list[int]:
        made = [token]
        for _ in range(count):
            made.append(int((self.table[made[-1]].roll(1) @ self.table.T).argmax()))
        return made[1:]


@pytest.fixture
def bigrams(monkeypatch: pytest.MonkeyPatch) -> Bigrams:
    model = Bigrams()
    monkeypatch.setattr(quire.worker.assembly.loading, "load_model", lambda *args, **options: LoadedModel(model))
    return model


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"enforce_eager": True}], ids=str)
def test_a_model_that_keeps_nothing_generates(bigrams, options):
    llm = make_llm(bundled_model(), max_num_batched_tokens=48, **options)
    prompts = [[7 + i] * length for i, length in enumerate([1, 16, 17, 90])]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in range(2):  # the second time, nothing may be found in the prefix cache
        made = generate(llm, prompts, params)
        assert tokens_of(made) == [bigrams.continuation(prompt[-1], 20) for prompt in prompts]
        assert [output.num_cached_tokens for output in made] == [0] * len(prompts)
    stats = llm.core.stats
    assert (stats.kv_cache_usage, stats.prefix_hits, stats.preemptions) == (0, 0, 0)
    assert bigrams.bound == [0]
    assert not len(runner_of(llm).batch.block_tables)
