"""Logprobs of mixed batches, in every mode, against one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.logprobs import LogprobUnpacker
from quire.kv.specs import attention_spec
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest
from quire.ops import Kernels, Target
from quire.sampling.logprobs import TopLogprobs
from quire.sampling.sampler import Sampler, SamplingBatch
from quire.worker.input_batch import InputBatch
from support.sampling import distribution, places, processed

VOCAB = 50
CPU = torch.device("cpu")


def test_the_own_token_comes_first_then_the_likeliest_and_ranks_count_from_one():
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.4], [3.0, 1.0, 2.0, 2.0]])
    top = TopLogprobs.of(scores, torch.tensor([2, 0]), 2)
    assert top.token_ids.tolist() == [[2, 1, 3], [0, 0, top.token_ids[1, 2]]]
    assert top.token_ids[1, 2] in (2, 3)
    assert torch.equal(top.logprobs, torch.tensor([[0.2, 0.5, 0.4], [3.0, 3.0, 2.0]]))
    assert top.ranks.tolist() == [3, 1]
    assert TopLogprobs.of(scores, torch.tensor([2, 3]), 0).token_ids.tolist() == [[2], [3]]
    assert TopLogprobs.of(scores, torch.tensor([2, 3]), 4).ranks.tolist() == [3, 2]  # equals share the better rank


def test_they_are_packed_and_unpacked_without_loss():
    scores = torch.randn(9, VOCAB).log_softmax(-1)
    tokens = torch.randint(0, VOCAB, (9,))
    top = TopLogprobs.of(scores, tokens, 6)
    halves = TopLogprobs.join([top.slice(0, 4, 7), top.slice(4, 9, 7)])
    for width in (1, 4, 7):
        unpacker = LogprobUnpacker(None)
        for start, stop in ((0, 4), (4, 9)):
            for place, made in enumerate(unpacker.unpack(halves.slice(start, stop, width).pack()), start):
                best = scores[place].argsort(descending=True).tolist()
                assert list(made) == list(dict.fromkeys([int(tokens[place]), *best[: width - 1]]))
                for token, logprob in made.items():
                    assert logprob.logprob == scores[place, token].item()
                    assert logprob.rank == best.index(token) + 1
                    assert logprob.decoded_token is None


def test_tokens_that_cannot_follow_are_not_among_the_likeliest():
    scores = torch.tensor([[0.0, -math.inf, -1.0, -math.inf, -math.inf]])
    packed = TopLogprobs.of(scores, torch.tensor([2]), 4).pack()
    assert {token: entry.logprob for token, entry in LogprobUnpacker(None).unpack(packed)[0].items()} == {2: -1, 0: 0}
    packed = TopLogprobs.of(scores, torch.tensor([3]), 3).pack()
    assert list(LogprobUnpacker(None).unpack(packed)[0]) == [3, 0, 2]
    named = TopLogprobs.of(scores, torch.tensor([0]), 2, torch.tensor([[1, 2]])).pack()
    assert list(LogprobUnpacker(None, likeliest=False).unpack(named)[0]) == [0, 1, 2]


def test_decoded_tokens_make_up_the_text_and_a_character_is_shown_where_it_ends():
    pieces = dict(enumerate([b"a", "ä".encode()[:1], "ä".encode()[1:], b" b", "€".encode()[:2], "€".encode()[2:]]))
    unpacker = LogprobUnpacker(pieces, partial="ä".encode()[:1])

    def unpack(*token_ids: int) -> list[str]:
        scores = torch.zeros(1, len(pieces))
        scores[0, list(token_ids[1:])] = torch.arange(len(token_ids) - 1, 0, -1.0)
        packed = TopLogprobs.of(scores, torch.tensor(token_ids[:1]), len(token_ids) - 1)
        [made] = unpacker.unpack(packed.pack())
        assert list(made) == list(token_ids)
        return [logprob.decoded_token for logprob in made.values()]

    assert unpack(2, 0, 1) == ["ä", "\ufffda", "\ufffd"]
    assert unpack(0, 1) == ["a", ""]
    assert unpack(1, 4) == ["", ""]
    assert unpack(2, 3) == ["ä", "\ufffd b"]
    assert unpack(4) == [""]
    unpacker.skip(5)
    assert unpack(3, 5) == [" b", "\ufffd"]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.8] * 4, [0.0, 0.7, 1.3, 0.0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode_reports_what_its_name_says_of_the_rows_that_ask(mode, temperatures, dtype):
    config = EngineConfig.create(max_num_seqs=8, logprobs_mode=mode)
    sampler = Sampler(Kernels(Target(CPU, torch.float32)), config, CPU)
    rows = InputBatch(8, 20, 16, [attention_spec([])], VOCAB)
    wishes: list[dict[str, Any]] = [
        {"logprobs": 5, "frequency_penalty": 1.5},
        {"repetition_penalty": 3.0},
        {"logprobs": 0, "logit_bias": {4: 3.0}, "top_k": 6},
        {"logprobs": -1, "allowed_token_ids": list(range(30))},
    ]
    params = [SamplingParams(temperature=t, **wish) for t, wish in zip(temperatures, wishes, strict=True)]
    for row, param in enumerate(params):
        new = NewRequest("r", row, [1, 2, 2, 9], 2, 0, param, 0)
        rows.install(new)
        sampler.processors.add(row, new)
    logits = (torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8)) * 2).to(dtype)
    some = np.arange(4)
    random = torch.tensor(temperatures).nonzero().squeeze(1)
    top_k = torch.tensor([p.top_k or VOCAB for p in params])
    batch = SamplingBatch(num_logprobs=rows.num_logprobs[some], places=places(rows, range(4)))
    if len(random):
        batch = replace(
            batch,
            random=random if len(random) < 4 else None,
            temperature=torch.tensor(temperatures)[random],
            seeds=random,
            output_positions=torch.full_like(random, 2),
            top_k=top_k[random],
        )
    tokens, top = sampler(logits.clone(), batch)
    assert top is not None
    assert top.token_ids.shape == (3, 1 + VOCAB)
    for line, row in enumerate((0, 2, 3)):
        made = logits[row].tolist()
        if mode.startswith("processed"):
            made = processed(made, [1, 2], [2, 9], params[row])
            if temperatures[row]:
                allowed = distribution(made, temperatures[row], int(top_k[row]), 1.0, 0.0)
                made = [x / temperatures[row] if p else -math.inf for x, p in zip(made, allowed, strict=True)]
        expected = torch.tensor(made)
        if mode.endswith("logprobs"):
            expected = expected.log_softmax(-1)
        token = int(tokens[row])
        assert top.token_ids[line, 0] == token
        torch.testing.assert_close(top.logprobs[line, 0], expected[token], rtol=1e-4, atol=1e-4)
        best = expected.sort(descending=True).values
        torch.testing.assert_close(top.logprobs[line, 1:], best, rtol=1e-4, atol=1e-4)
        assert int(top.ranks[line]) == int((expected > expected[token]).sum()) + 1
