"""The part of the scheduler that compresses: it counts the blocks that prompts keep. Workers choose the keys."""

from collections.abc import Sequence

from quire.kvcache.manager import KVCacheManager
from quire.messages.step import SchedulerOutput
from quire.options.declaration import ConfigError
from quire.options.kv_compression import KVCompressionOptions
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request


class Compression:
    """Compresses the KV cache of prompts when they have been computed.

    All heads together keep exactly as many blocks as are granted here, however they share them. So nothing needs to be
    reported by workers, and the other blocks go back to the pool as soon as the step is scheduled that computes the end
    of the prompt: all later steps are run after the worker has moved the kept keys.

    A request that is preempted, or continued in another core, computes its prompt anew, compresses it as before, and
    computes its output over the compressed prompt. So it goes on with the same tokens.
    """

    def __init__(self, options: KVCompressionOptions, block_size: int) -> None:
        self.options, self.block_size = options, block_size

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
        """Decide how many blocks a new request's prompt keeps."""
        params = request.source.sampling_params
        chosen = None if params is None else params.kv_compression
        if params is None or chosen is False:
            return
        ratio = chosen.get("ratio") if isinstance(chosen, dict) else None
        request.num_kept_blocks = self.options.kept_blocks(request.num_prompt_tokens, self.block_size, ratio) or 0

    def limit(self, request: Request, count: int) -> int:
        """How many of its next `count` tokens a request computes in a step: none beyond the end of its prompt, and the
        last part of a prompt has all queries that score keys."""
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left <= 0:
            return count
        return left if count >= left else max(0, min(count, left - self.options.window))

    @staticmethod
    def free_blocks(step: SchedulerOutput, requests: Sequence[Request], kv: KVCacheManager) -> None:
        """Free the blocks that are not kept of the prompts that end with a step. The step itself still reads them, so
        this is called when it is complete."""
        for index, num_kept_blocks in step.compressions:
            request = requests[index]
            kv.drop_blocks(request, num_kept_blocks, request.num_prompt_tokens // kv.block_size)
