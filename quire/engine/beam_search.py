"""Beam search on top of the engine: at each step, every beam is a request for one token and the top logprobs.

Between the steps, the prefix cache holds the keys and values of a beam, except those of its last block.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from quire.engine.processor import Prompt, PromptFields
from quire.messages.outputs import Logprob, RequestOutput
from quire.messages.sampling_params import BeamSearchParams, SamplingParams


@dataclass
class BeamSearchSequence:
    """A beam, or a finished sequence.

    tokens: prompt and output. logprobs: one dict for each output token. cum_logprob: the log-probability of the output.
    text: of prompt and output. finish_reason: "stop" at end-of-sequence, else "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best sequences, best first; at most beam_width."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The search for one prompt."""

    salt: PromptFields  # the prompt's cache_salt, if it has one
    max_length: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


Generate = Callable[[list[Prompt], SamplingParams], list[RequestOutput]]


# Runs each prompt for one token with these parameters. Returns the outputs in the same order.
Steps = Generator[tuple[list[Prompt], SamplingParams], list[RequestOutput], list[BeamSearchOutput]]


def beam_search(
    prompts: Sequence[tuple[list[int], str | None]],
    params: BeamSearchParams,
    generate: Generate,
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> list[BeamSearchOutput]:
    """Run `beam_steps` with `generate`, which is LLM.generate."""
    steps = beam_steps(prompts, params, max_model_len, eos_token_ids)
    outputs: list[RequestOutput] | None = None
    while True:
        try:
            inputs = next(steps) if outputs is None else steps.send(outputs)
        except StopIteration as end:
            found: list[BeamSearchOutput] = end.value
            return found
        outputs = generate(*inputs)


def beam_steps(
    prompts: Sequence[tuple[list[int], str | None]],
    params: BeamSearchParams,
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> Steps:
    """Search all prompts together. The returned sequences have no text yet.

    prompts: token ids and cache salt of each. As in vLLM and transformers, the score of a sequence is its
    log-probability / length ** length_penalty, where the length counts the output with its end-of-sequence token. The
    search ends after max_tokens, or when no beams are left.
    """
    ends = frozenset() if params.ignore_eos else eos_token_ids
    sampling = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature)
    searches = []
    for token_ids, salt in prompts:
        longest = min(len(token_ids) + params.max_tokens, max_model_len)
        beams = [BeamSearchSequence(token_ids)]
        searches.append(_Search({} if salt is None else {"cache_salt": salt}, longest, beams))
    while growing := [s for s in searches if s.beams and len(s.beams[0].tokens) < s.max_length]:
        inputs: list[Prompt] = [
            {"prompt_token_ids": beam.tokens, **search.salt} for search in growing for beam in search.beams
        ]
        outputs = iter((yield inputs, sampling))
        for search in growing:
            candidates = []
            for beam in search.beams:
                [logprobs] = next(outputs).outputs[0].logprobs or []
                for token_id, logprob in logprobs.items():
                    total = beam.cum_logprob + logprob.logprob
                    longer = BeamSearchSequence([*beam.tokens, token_id], [*beam.logprobs, logprobs], total)
                    if token_id in ends:
                        longer.finish_reason = "stop"
                        search.completed.append(longer)
                    else:
                        candidates.append(longer)
            search.beams = _best(candidates, params)
            search.completed = _best(search.completed, params)  # worse ones can never be returned
    for search in searches:
        for beam in search.beams:
            beam.finish_reason = "length"
    return [BeamSearchOutput(_best(search.completed + search.beams, params)) for search in searches]


def _best(beams: list[BeamSearchSequence], params: BeamSearchParams) -> list[BeamSearchSequence]:
    """Return the best beams, best first; at most beam_width."""

    def score(beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / math.pow(max(len(beam.logprobs), 1), params.length_penalty)

    return sorted(beams, key=score, reverse=True)[: params.beam_width]
