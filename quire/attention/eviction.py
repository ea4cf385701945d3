"""Chooses the keys that a compressed cache keeps: scores of keys, budgets of heads, and the selection."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from quire.config.kv_compression import KVCompressionOptions


class Eviction:
    """Keeps the keys with the highest scores, in whole blocks for each KV head. Subclasses set each head's budget.

    The score of a key is its attention weight for the text's last queries, averaged over neighbouring keys and over the
    query heads of its KV head (SnapKV, arXiv:2404.14469).
    """

    def __init__(self, options: KVCompressionOptions, block_size: int) -> None:
        self.options = options
        self.block_size = block_size

    def scores(self, q: Tensor, k: Tensor, missing: Tensor, scale: float, soft_cap: float | None) -> Tensor:
        """q: [window, heads, head_dim], the last queries. k: [tokens, kv_heads, head_dim] -> [kv_heads, tokens]. Keys
        that are always kept have an infinite score. missing: how many of the first keys a head does not have,
        [kv_heads]; their score is minus infinity."""
        options, (window, heads, dim), (tokens, kv_heads, _) = self.options, q.shape, k.shape
        rows = q.float().view(window, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        future = torch.ones(window, window, dtype=torch.bool, device=q.device).triu(1)
        pool = avg_pool1d if options.pooling == "avg" else max_pool1d
        of_heads = []
        absent = torch.arange(tokens, device=q.device) < missing[:, None]
        for queries, keys, gone in zip(
            rows, k.unbind(1), absent, strict=True
        ):  # one by one, since attention takes much memory
            logits = queries @ keys.float().T * scale  # [group, window, tokens]
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            logits[..., tokens - window :].masked_fill_(future, float("-inf"))
            logits.masked_fill_(gone, float("-inf"))
            weights = self.weigh(logits.softmax(-1))[:, : tokens - window]  # [group, tokens before the window]
            of_heads.append(pool(weights, options.kernel_size, 1, options.kernel_size // 2).mean(0))
        scores = torch.stack(of_heads)
        return self._bounded(torch.nn.functional.pad(scores, (0, window), value=float("inf")), missing)

    def _bounded(self, scores: Tensor, missing: Tensor) -> Tensor:
        """Return the scores with infinite values for keys that are always kept or missing."""
        places = torch.arange(scores.shape[1], device=scores.device) - missing[:, None]
        return scores.masked_fill(places < self.options.sinks, float("inf")).masked_fill(places < 0, float("-inf"))

    def weigh(self, attention: Tensor) -> Tensor:
        """attention: [..., window, tokens] -> [..., tokens]"""
        return attention.mean(-2)

    def choose(self, scores: Tensor, num_tokens: int, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return the number of full blocks that each head keeps, [layers, kv_heads], and their tokens in order,
        [layers, kv_heads, tokens of full blocks]. The rest of a head's row is filled with num_tokens.

        scores: [layers, kv_heads, num_tokens]. num_blocks: the average number of blocks that a head keeps.
        """
        size = self.block_size
        num_tokens -= num_tokens % size
        ordered, tokens = scores[..., :num_tokens].sort(dim=-1, descending=True, stable=True)
        counts = self.counts(ordered.view(*ordered.shape[:-1], -1, size).mean(-1), num_blocks)
        kept = torch.arange(num_tokens, device=scores.device) < counts[..., None] * size
        return counts, tokens.masked_fill(~kept, num_tokens).sort(dim=-1).values

    def counts(self, blocks: Tensor, num_blocks: int) -> Tensor:
        """Return the number of blocks of each head, [layers, kv_heads]; the average is num_blocks.

        blocks: the scores of each head's blocks, the block of the best tokens first: [layers, kv_heads, blocks].
        """
        return torch.full(blocks.shape[:2], num_blocks, device=blocks.device)

    def shared_counts(self, blocks: Tensor, num_blocks: int) -> Tensor:
        """Return the numbers of blocks of heads that share a budget: the best blocks among all heads are kept. blocks:
        [..., heads, blocks] -> [..., heads]"""
        fewest = torch.isposinf(blocks).sum(-1, keepdim=True).clamp(min=int(self.options.safeguard * num_blocks))
        index = torch.arange(blocks.shape[-1], device=blocks.device)
        scores = blocks.masked_fill(index < fewest, float("inf")).flatten(-2)
        best = scores.topk(blocks.shape[-2] * num_blocks, dim=-1).indices
        return torch.zeros_like(scores).scatter_(-1, best, 1.0).view_as(blocks).sum(-1).long()


class SnapKV(Eviction):
    """Gives all heads the same budget (SnapKV)."""


class AdaKV(Eviction):
    """The heads of a layer share a budget (Ada-KV, arXiv:2407.11550)."""

    def counts(self, blocks: Tensor, num_blocks: int) -> Tensor:
        return self.shared_counts(blocks, num_blocks)


class KVCompress(Eviction):
    """The heads of all layers share a budget, and scores use squared attention (KV-Compress, arXiv:2410.00161)."""

    def weigh(self, attention: Tensor) -> Tensor:
        return attention.square().mean(-2)

    def counts(self, blocks: Tensor, num_blocks: int) -> Tensor:
        return self.shared_counts(blocks.flatten(0, 1), num_blocks).view(blocks.shape[:2])


class PyramidKV(Eviction):
    """The layers' budgets decrease linearly from the first to the last (PyramidKV, arXiv:2406.02069)."""

    def counts(self, blocks: Tensor, num_blocks: int) -> Tensor:
        layers, kv_heads, most = blocks.shape
        fewest = self.options.fewest_blocks(0, self.block_size)
        last = max(min(fewest, num_blocks), num_blocks / self.options.steepness, 2 * num_blocks - most)
        budgets = torch.linspace(2 * num_blocks - last, last, layers, dtype=torch.float64, device=blocks.device)
        ends = budgets.cumsum(0).round().long()  # the sums are rounded, so that the differences have the right total
        wanted = torch.diff(ends, prepend=ends.new_zeros(1))
        # A layer may have too few blocks left for its budget. Then the blocks that it cannot use go to the first of
        # the other layers.
        held = torch.isneginf(blocks[:, 0]).logical_not().sum(-1)
        counts = torch.minimum(wanted, held)
        room = held - counts
        more = (layers * num_blocks - counts.sum() - room.cumsum(0) + room).clamp(min=0)
        return (counts + torch.minimum(more, room))[:, None].expand(layers, kv_heads)


class StreamingLLM(Eviction):
    """Keeps the first and the last tokens (StreamingLLM, arXiv:2309.17453), at their original positions."""

    def scores(self, q: Tensor, k: Tensor, missing: Tensor, scale: float, soft_cap: float | None) -> Tensor:
        return self._bounded(torch.arange(len(k), dtype=torch.float32, device=k.device).repeat(k.shape[1], 1), missing)


METHODS: dict[str, type[Eviction]] = {
    "kv_compress": KVCompress,
    "adakv": AdaKV,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "streaming_llm": StreamingLLM,
}
