"""Beam search for a request: use_beam_search in completions and chats."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.engine.async_llm import AsyncLLM
from quire.engine.beam_search import BeamSearchOutput, BeamSearchSequence, beam_steps
from quire.engine.processor import ProcessedRequest, Prompt
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.messages.sampling_params import BeamSearchParams, SamplingParams

_FAILED = ("abort", "error", "bad_request", "overloaded")


class BeamSearch:
    """The search for a request's prompts.

    running: the one-token requests that run now.
    """

    def __init__(
        self, llm: AsyncLLM, requests: Sequence[ProcessedRequest], params: BeamSearchParams, skip_special_tokens: bool
    ) -> None:
        """requests: one per prompt. Raises ValueError for a width that needs more logprobs than max_logprobs, and for
        prompts with media."""
        if 2 * params.beam_width > llm.processor.max_logprobs:
            raise ValueError(
                f"n={params.beam_width} beams need the logprobs of {2 * params.beam_width} tokens; "
                f"max_logprobs is {llm.processor.max_logprobs}"
            )
        if any(request.core_requests[0].media for request in requests):
            raise ValueError("use_beam_search cannot be used with pictures, other media or embeddings")
        self._llm = llm
        self._requests = requests
        self._params = params
        self._skip_special_tokens = skip_special_tokens
        self._number = 0  # number of the next request
        self.running: list[ProcessedRequest] = []

    async def run(self) -> AsyncGenerator[RequestOutput]:
        """Yield the complete output of each prompt, with the beams as completions, best first. A failed step ends the
        whole search."""
        ends = frozenset(self._llm.processor.eos_token_ids)
        starts = [(request.prompt_token_ids, request.core_requests[0].cache_salt) for request in self._requests]
        steps = beam_steps(starts, self._params, self._llm.max_model_len, ends)
        outputs: list[RequestOutput] | None = None
        while True:
            try:
                prompts, sampling = next(steps) if outputs is None else steps.send(outputs)
            except StopIteration as end:
                found: list[BeamSearchOutput] = end.value
                break
            outputs = await self._step(prompts, sampling)
            completions = [output.outputs[0] for output in outputs]
            failed = next((one for one in completions if one.finish_reason in _FAILED), None)
            if failed is not None:
                for request in self._requests:
                    ending = CompletionOutput(0, "", [], None, None, failed.finish_reason, failed.stop_reason)
                    yield RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [ending], True)
                return
        for request, search in zip(self._requests, found, strict=True):
            beams = [self._completion(index, beam, request, ends) for index, beam in enumerate(search.sequences)]
            yield RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, beams, True)

    async def _step(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
        first = self._requests[0]
        made = []
        for prompt in prompts:
            name = f"{first.request_id}-{self._number}"
            self._number += 1
            one = first.core_requests[0]
            made.append(self._llm.processor.process(name, prompt, sampling, one.priority, False, one.adapter))
            await asyncio.sleep(0)  # let other requests run
        self.running = made
        outputs: dict[str, RequestOutput] = {}
        async with aclosing(self._llm.run(made)) as coming:
            async for output in coming:
                outputs[output.request_id] = output
        return [outputs[request.request_id] for request in made]

    def _completion(
        self, index: int, beam: BeamSearchSequence, request: ProcessedRequest, ends: frozenset[int]
    ) -> CompletionOutput:
        token_ids = beam.tokens[len(request.prompt_token_ids) :]
        said = token_ids[:-1] if beam.finish_reason == "stop" and token_ids[-1] in ends else token_ids
        text = self._llm.frontend.tokenizer.decode(said, self._skip_special_tokens)
        return CompletionOutput(index, text, token_ids, beam.cum_logprob, beam.logprobs, beam.finish_reason)
