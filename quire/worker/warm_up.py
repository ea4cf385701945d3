"""Runs steps of dummy requests at start, so that Triton compiles every kernel before the first request arrives.

The steps follow the path of real ones: staging of inputs, forward and sampling. A kernel has variants for ranges of
sizes (see the tiles in quire.ops.triton). Each range ends at no less than twice its start, so powers of two reach all
variants.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

import torch

from quire.layers.step_inputs import StepSize
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest, SchedulerOutput, TokenMasks
from quire.worker.compression import CompressedRows, CompressingStaging
from quire.worker.model_runner import SCORED_AT_ONCE
from quire.worker.runner import Runner

_EPOCH = -1  # a step that is skipped must not make the runner skip the scheduler's steps, which begin at epoch 0
_GREEDY = SamplingParams(temperature=0)
_SCORED = SamplingParams(temperature=0, prompt_logprobs=0)


def warm_up(runner: Runner[Any], most_tokens: int) -> None:
    """Run steps of up to `most_tokens` tokens. They store into the null block of the cache."""
    batch = runner.batch
    limits = len(batch.num_tokens), batch.max_model_len, most_tokens
    steps = (_texts if runner.pools else _steps)(*limits)
    if isinstance(runner.staging, CompressingStaging):
        steps = chain(steps, _compressed(runner.staging.rows, *limits))
    runner.check_start(_first(runner))
    masks = TokenMasks([0], memoryview(b"\xff" * 4 * -(-batch.vocab_size // 32)))
    for step_id, step in enumerate(steps):
        step.step_id = step_id
        runner.submit(step)
        runner.sample(step_id, masks if len(step.rows) == 1 else None)()
    if runner.pools:
        return
    _verify_drafts(runner)
    if runner.model.adapters is not None:  # a step with few tokens, and one with many
        for tokens in sorted({1, min(most_tokens, 128)}):
            size = StepSize(tokens, len(batch.num_tokens), adapted=True)
            runner.forward.agree(size)
            runner.forward(runner.staging.stage_dummy(size))


def _first(runner: Runner[Any]) -> SchedulerOutput:
    """Return a prompt of a few different tokens, which reads only its own entries from the cache."""
    length = min(8, runner.batch.max_model_len, runner.batch.vocab_size)
    step = _step([1], [PoolingParams() if runner.pools else _GREEDY])
    [request] = step.new_requests
    request.token_ids = list(range(length))
    request.num_prompt_tokens = length
    step.num_tokens = [length]
    return step


def _verify_drafts(runner: Runner[Any]) -> None:
    """Launch the kernels that verify drafts. They do not depend on the drafts or their number."""
    state = runner.staging.state
    kernels = runner.staging.kernels
    logits = torch.zeros(1, runner.batch.vocab_size, device=state.token_ids.device)
    zeros = torch.zeros(2, dtype=torch.int64, device=logits.device)
    kernels.count_kept(state.token_ids, zeros[:1], zeros[:1], zeros[:1], zeros)
    kernels.accept_or_resample(logits, logits, zeros[:1], zeros[:1], zeros[:1])


def _steps(most_requests: int, max_model_len: int, most_tokens: int) -> Iterator[SchedulerOutput]:
    """Yield steps with prompts, prompts with logprobs, one token per request, and all kinds of sampling parameters."""
    for lengths in _prompts(most_requests, max_model_len, most_tokens):
        yield _step(lengths, [_GREEDY])
        if sum(lengths) <= 2 * SCORED_AT_ONCE:
            yield _step(lengths, [_SCORED])
    for requests in _sizes(min(most_requests, most_tokens)):
        yield _step([1] * requests, [_GREEDY])
    # Requests with token rules have float32 logits. All sampling limits share the kernels that select tokens.
    rules: tuple[dict[str, Any], ...] = {}, {"logit_bias": {0: 1.0}}
    sampling: tuple[dict[str, Any], ...] = {"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}
    for rule, options, logprobs in product(rules, sampling, (None, 1)):
        params = SamplingParams(**rule, **options, logprobs=logprobs)
        yield _step([1], [params])
        if most_requests > 1:
            yield _step([1, 1], [params, _GREEDY])


def _compressed(
    rows: CompressedRows, most_requests: int, max_model_len: int, most_tokens: int
) -> Iterator[SchedulerOutput]:
    """Yield a compressed prompt, then tokens after compressed prompts, alone and together with other prompts."""
    length = 2 * rows.block_size + rows.eviction.options.window
    if length > min(max_model_len, most_tokens):
        return
    step = _step([length], [_GREEDY])
    step.compressions.append((0, 1, 0))
    yield step
    for requests in _sizes(min(most_requests, most_tokens)):
        yield _step([1] * requests, [_GREEDY])
        rows.pretend(requests)
        yield SchedulerOutput(0, [], list(range(requests)), [1] * requests, epoch=_EPOCH)
    for lengths in _prompts(most_requests - 1, max_model_len, most_tokens - 1) if most_requests > 1 else ():
        yield _step([1], [_GREEDY])
        rows.pretend(1)
        step = _step([1, *lengths], [_GREEDY])
        del step.new_requests[0]
        yield step
    rows.forget(slice(None))


def _texts(most_requests: int, max_model_len: int, most_tokens: int) -> Iterator[SchedulerOutput]:
    """Yield steps with pooled texts."""
    for lengths in _prompts(most_requests, max_model_len, most_tokens):
        yield _step(lengths, [PoolingParams()])


def _prompts(most_requests: int, max_model_len: int, most_tokens: int) -> Iterator[list[int]]:
    """Yield the prompt lengths of a step, for steps of all sizes."""
    for tokens in _sizes(min(most_tokens, most_requests * max_model_len)):
        whole, rest = divmod(tokens, max_model_len)
        yield [max_model_len] * whole + [rest] * (rest > 0)


def _sizes(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def _step(lengths: Sequence[int], params: Sequence[SamplingParams | PoolingParams]) -> SchedulerOutput:
    """Return a step that computes the whole prompts of new requests. params: repeated if there are fewer than requests.

    The first token of a longer prompt counts as cached, because some attention backends treat steps of whole prompts
    differently.
    """
    requests = []
    for row, length in enumerate(lengths):
        given = params[row % len(params)]
        known = int(length > 1)
        sampling, pooling = (given, None) if isinstance(given, SamplingParams) else (None, given)
        name = f"warm-up-{row}"
        tokens = [0] * length
        requests.append(NewRequest(name, row, tokens, length, known, sampling, seed=0, pooling_params=pooling))
    counts = [length - request.num_computed_tokens for length, request in zip(lengths, requests, strict=True)]
    return SchedulerOutput(0, requests, list(range(len(requests))), counts, epoch=_EPOCH)
