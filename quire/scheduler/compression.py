"""The scheduler's part of KV compression: it sets how many blocks requests keep. Workers choose the keys."""

import sys
from collections.abc import Sequence

from quire.config.declaration import ConfigError
from quire.config.kv_compression import KVCompressionOptions
from quire.kv.manager import KVCacheManager
from quire.messages.step import SchedulerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import NextCompression, Request


class Compression:
    """Compresses the KV cache of a prompt once it has been computed, and again after each further `interval` of tokens.

    All heads together keep exactly as many blocks as are granted here, however they are divided among the heads. So
    workers need not report anything. The other blocks are freed as soon as the step with the last tokens is scheduled:
    all later steps run after the worker has moved the kept keys.

    A request with images is compressed at the end of its prompt or later, once the last window of its text contains no
    image. Then all queries that score keys are text, and a step that recomputes the window has nothing to encode.

    The lengths at which a request is compressed depend on its prompt alone. If it is preempted, or continued in another
    core, its tokens are recomputed and compressed at the same lengths. So its output stays the same.
    """

    def __init__(self, options: KVCompressionOptions, block_size: int) -> None:
        self.options = options
        self.block_size = block_size
        self.interval = -(-options.interval // block_size) * block_size

    def check(self, limits: SchedulerLimits) -> None:
        """Raises ConfigError if steps may be too small for a whole window."""
        room = min(limits.longest_chunk, limits.max_num_batched_tokens - limits.max_num_seqs + 1)
        if room < self.options.window:
            raise ConfigError(
                f"kv_compression: a step must have room for the window of {self.options.window} tokens of one request "
                f"and a token of each other one, but has room for {max(room, 0)} tokens; raise max_num_batched_tokens "
                "or long_prefill_token_threshold, or lower max_num_seqs"
            )

    def plan(self, request: Request) -> None:
        """Decide when a request without computed tokens is first compressed, and how many blocks it then keeps."""
        params = request.source.sampling_params
        if params is not None and params.kv_compression is not False:
            request.compression = NextCompression()
            behind_media = [item.place.end + self.options.window for item in request.source.media]
            self._aim(request, max([request.num_prompt_tokens, *behind_media]))

    def _aim(self, request: Request, num_tokens: int) -> None:
        """Find the first length at which compression frees blocks: `num_tokens`, or some intervals later."""
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
        """Return the start and number of the next tokens that a request computes in a step with room for `room` tokens.

        A step does not extend beyond the next compression, and the step before a compression contains all queries that
        score keys. If these tokens were sampled one by one, they are recomputed and see the same keys as before. known:
        an upper bound of the tokens that are known or in flight. If the exact number matters, the request waits for it.
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
        """Called when the last row of the step computes the request's tokens from `start` to `end`. If it is compressed
        after them, add this to the step. Returns how many tokens are recomputed for the compression."""
        if end != request.compression.at:
            return 0
        again = request.num_computed_tokens - start
        step.compressions.append((len(step.rows) - 1, request.compression.num_kept_blocks, again))
        return again

    def free_blocks(self, step: SchedulerOutput, requests: Sequence[Request], kv: KVCacheManager) -> None:
        """Free the blocks that compressed requests no longer keep after a step. The step itself still reads them, so
        this is called when the step is fully scheduled."""
        for index, num_kept_blocks, _ in step.compressions:
            request = requests[index]
            end = request.compression.at
            kv.drop_blocks(request, num_kept_blocks, (end - request.blocks.num_removed_tokens) // kv.block_size)
            self._aim(request, end + self.interval if self.interval else sys.maxsize)


class NoCompression:
    """Replaces Compression in an engine without KV compression."""

    def plan(self, request: Request) -> None: ...

    def span(self, request: Request, known: int, room: int) -> tuple[int, int]:
        computed = request.num_computed_tokens
        return computed, min(room, known - computed)

    def computed(self, request: Request, start: int, end: int, step: SchedulerOutput) -> int:
        return 0

    def free_blocks(self, step: SchedulerOutput, requests: Sequence[Request], kv: KVCacheManager) -> None: ...
