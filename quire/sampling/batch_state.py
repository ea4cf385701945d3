"""The running requests as tensors, for the sampler and the logits processors to read."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchState:
    """Tokens, counters and block tables of the running requests, on the device that samples. A request has one row.

    A device may run asynchronously. Then the host cannot read these values without waiting, but the kernels that it
    launches read and write them in launch order. In that order, for the rows of a step:

    - When the step samples, `token_ids[row, :num_tokens[row]]` are the prompt and the tokens sampled by earlier steps.
      The row's drafts follow, if it has any. `num_computed[row]` already includes the step's own tokens.
    - Then each sampled token is written after the tokens of its place, and `num_tokens[row]` includes the kept ones.
      `num_computed[row]` no longer includes drafts that were not accepted.
    - Cells past `num_tokens[row]`, and all cells of a row without a request, are arbitrary.

    Only the worker writes these tensors. On a CPU they are views of the arrays of InputBatch.
    """

    token_ids: Tensor  # [rows, max_model_len + 1], int32
    num_tokens: Tensor  # [rows], int64: known tokens of prompt and output
    num_computed: Tensor  # [rows], int64: tokens whose keys and values are in the cache, or will be after this step
    num_prompt: Tensor  # [rows], int64
    block_tables: Tensor  # [KV groups, rows, blocks], int32; entries past a request's last block are arbitrary
