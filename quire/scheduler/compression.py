"""The part of the scheduler that compresses: it counts the blocks that requests keep. Workers choose the keys."""

import sys
from collections.abc import Sequence

from quire.config.declaration import ConfigError
from quire.config.kv_compression import KVCompressionOptions
from quire.kv.manager import KVCacheManager
from quire.messages.step import SchedulerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import NextCompression, Request


class Compression:
    """Compresses the KV cache of prompts when they have been computed, and again after each `interval` of more tokens.

    All heads together keep exactly as many blocks as are granted here, however they share them. So nothing needs to be
    reported by workers, and the other blocks go back to the pool as soon as the step is scheduled that computes the
    last tokens: all later steps are run after the worker has moved the kept keys.

    A request with pictures is compressed when the last window of its text has none, behind its prompt or later: only
    text scores keys then, and a step that computes the window again has nothing to encode.

    A request is compressed at numbers of tokens that follow from its prompt alone. One that is preempted, or continued
    in another core, computes its tokens anew, and is compressed at the same numbers. So it goes on with the same
    tokens.
    """

    def __init__(self, options: KVCompressionOptions, block_size: int) -> None:
        self.options = options
        self.block_size = block_size
        self.interval = -(-options.interval // block_size) * block_size

    def check(self, limits: SchedulerLimits) -> None:
        """Raises ConfigError if steps may have no room for a whole window."""
        room = min(limits.longest_chunk, limits.max_num_batched_tokens - limits.max_num_seqs + 1)
        if room < self.options.window:
            raise ConfigError(
                f"kv_compression: a step must have room for the window of {self.options.window} tokens of one request "
                f"and a token of each other one, but has room for {max(room, 0)} tokens; raise max_num_batched_tokens "
                "or long_prefill_token_threshold, or lower max_num_seqs"
            )

    def plan(self, request: Request) -> None:
        """Decide when a request is compressed first of which nothing is computed, and how many blocks it keeps then."""
        params = request.source.sampling_params
        if params is not None and params.kv_compression is not False:
            request.compression = NextCompression()
            behind_media = [item.place.end + self.options.window for item in request.source.media]
            self._aim(request, max([request.num_prompt_tokens, *behind_media]))

    def _aim(self, request: Request, num_tokens: int) -> None:
        """Find the first number of tokens at which the request loses blocks: this one, or some intervals more."""
        assert request.source.sampling_params is not None
        chosen = request.source.sampling_params.kv_compression
        ratio = chosen.get("ratio") if isinstance(chosen, dict) else None
        while num_tokens < request.max_total_tokens:
            held = (num_tokens - request.blocks.num_removed_tokens) // self.block_size
            kept = self.options.kept_blocks(num_tokens, self.block_size, ratio)
            if kept is not None and kept < held:
                request.compression.at = num_tokens
                request.compression.num_kept_blocks = kept
                return
            if not self.interval:
                break
            num_tokens += self.interval
        request.compression.at = sys.maxsize

    def span(self, request: Request, known: int, room: int) -> tuple[int, int]:
        """Where the next tokens start that a request computes in a step with room for so many, and their number.

        A step has none beyond the next compression, and before it, all queries that score keys. After tokens that were
        sampled one by one, these are computed again: they see the same keys as before. known: how many tokens are known
        or in flight, at most. The request waits if it cannot tell.
        """
        computed = request.num_computed_tokens
        end = request.compression.at
        window = self.options.window
        if known < end:
            return computed, min(room, known - computed)
        if request.num_in_flight_samples:
            return computed, 0
        start = min(computed, end - window)
        if end - start <= room:
            return start, end - start
        return computed, max(0, min(room, end - window - computed))

    def computed(self, request: Request, start: int, end: int, step: SchedulerOutput) -> int:
        """The last row of the step computes the request's tokens from `start` to `end`. If it is compressed behind
        them, tell the worker. Returns how many tokens are computed again for that."""
        if end != request.compression.at:
            return 0
        again = request.num_computed_tokens - start
        step.compressions.append((len(step.rows) - 1, request.compression.num_kept_blocks, again))
        return again

    def free_blocks(self, step: SchedulerOutput, requests: Sequence[Request], kv: KVCacheManager) -> None:
        """Free the blocks that are not kept of the requests that are compressed behind a step. The step itself still
        reads them, so this is called when it is complete."""
        for index, num_kept_blocks, _ in step.compressions:
            request = requests[index]
            end = request.compression.at
            kv.drop_blocks(request, num_kept_blocks, (end - request.blocks.num_removed_tokens) // kv.block_size)
            self._aim(request, end + self.interval if self.interval else sys.maxsize)


class NoCompression:
    """Takes the place of Compression in an engine that compresses no cache."""

    def plan(self, request: Request) -> None: ...

    def span(self, request: Request, known: int, room: int) -> tuple[int, int]:
        computed = request.num_computed_tokens
        return computed, min(room, known - computed)

    def computed(self, request: Request, start: int, end: int, step: SchedulerOutput) -> int:
        return 0

    def free_blocks(self, step: SchedulerOutput, requests: Sequence[Request], kv: KVCacheManager) -> None: ...
