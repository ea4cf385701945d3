"""Requests of every kind, for tests that watch what an engine does while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams

_OPTIONS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 1}, {"seed": 3}, {"logprobs": 0}, {"logprobs": 5},
    {"logprob_token_ids": [3, 4]}, {"prompt_logprobs": 0}, {"prompt_logprobs": 3}, {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"bad_words": ["so be it"]}, {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": [3, 4]}, {"min_tokens": 2}, {"structured_outputs": {"regex": "[ab]+c"}},
    {"structured_outputs": {"choice": ["abracadabra", "abracadabrb"]}},
]  # fmt: skip


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **options})


def batches(most: int, max_model_len: int, thorough: bool) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
    """Prompts that run together, and their parameters: batches of up to `most` requests, prompts of lengths around
    blocks, cached prefixes, prompts longer than a step, several completions, and parameters alone, together and mixed
    with greedy ones. thorough: batches of all sizes, and each parameter by itself."""
    longest = max_model_len - 4
    for count in range(1, most + 1) if thorough else (1, 2, 3, most - 2, most):
        lengths = [1 + (7 * count + 16 * i) % 40 for i in range(count)]
        yield [[5 + i] * length for i, length in enumerate(lengths)], [_params(temperature=i % 3) for i in range(count)]
    for length in (1, 15, 16, 17, 31, 32, 33, 100, 128) if thorough else (16, 33):
        yield [[length % 50 + 3] * length], [_params(temperature=0)]
    for prompt in ([9] * longest, list(range(longest)), list(range(longest))):  # the last one finds cached blocks
        yield [prompt, prompt[:20], [7]], [_params(), _params(temperature=0), _params()]
    yield [[3, 4, 5]], [_params(n=most)]
    yield [[3, 4, 5]] * len(_OPTIONS), [_params(**option) for option in _OPTIONS]
    alone = [(option,) for option in (_OPTIONS if thorough else _OPTIONS[:3])]
    for chosen in (*combinations(_OPTIONS[:3], 2), _OPTIONS[:3], *alone):
        options = {name: value for option in chosen for name, value in option.items()}
        prompts = [[3, 4, 5], [6] * 20, [7]]
        if thorough:
            yield prompts, [_params(**options) for _ in prompts]
            yield prompts, [_params(temperature=0, **options) for _ in prompts]
        yield prompts, [_params(**options), _params(temperature=0), _params()]


def serve_everything(llm: LLM, thorough: bool = True) -> None:
    """Run all batches, then more requests than the engine takes at once, of which some are aborted."""
    limits = llm.core.scheduler.limits
    for prompts, params in batches(limits.max_num_seqs, limits.max_model_len, thorough):
        llm.generate(prompts, params, use_tqdm=False)
    for i in range(3 * limits.max_num_seqs):
        prompt = [i % 90 + 5] * (i * 13 % (limits.max_model_len - 30) + 1)
        llm.core.add_request(llm.processor.process(f"{i}", prompt, _params(max_tokens=25)).core_requests[0])
    for step in range(5000):
        if not llm.core.has_unfinished:
            break
        llm.core.step()
        if step % 3 == 0:
            llm.core.abort_requests([f"{step}"])
    assert not llm.core.has_unfinished
