"""Completes the outputs of a step's requests."""

from collections.abc import Sequence

from quire.messages.engine import EngineCoreOutput, FinishReason
from quire.messages.step import ModelRunnerOutput, Pooled
from quire.scheduler.request import Request


def add_logprobs(outputs: Sequence[EngineCoreOutput], requests: Sequence[Request], result: ModelRunnerOutput) -> None:
    """Add the logprobs of a step to the outputs of its requests that have new tokens."""
    by_id = {output.request_id: output for output in outputs if output.new_token_ids}
    for index, request in enumerate(requests):
        output = by_id.get(request.request_id)
        if output is not None:
            output.logprobs = result.logprobs.get(index)
            output.prompt_logprobs = result.prompt_logprobs.get(index)


def pooled_output(request: Request, pooled: Pooled) -> EngineCoreOutput:
    """Return the only output of a pooling request."""
    return EngineCoreOutput(request.request_id, [], FinishReason.STOP, None, request.num_cached_tokens, pooled=pooled)
