"""KV compression by brute force: which keys each head keeps, and logits with a mask for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.config.kv_compression import KVCompressionOptions
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.worker.model_runner import ModelRunner

BLOCK_SIZE = 16


def key_scores(options: KVCompressionOptions, q: Tensor, k: Tensor) -> list[list[float]]:
    """The score of each key by KV head. q: [heads, queries, dim], k: [kv_heads, tokens, dim]; both end together."""
    tokens, dim = k.shape[1:]
    window, group = options.window, len(q) // len(k)
    if options.method == "streaming_llm":
        return [[math.inf if t < options.sinks else float(t) for t in range(tokens)] for _ in k]
    scores = []
    for kv_head, keys in enumerate(k):
        of_head = [0.0] * tokens
        for head in range(kv_head * group, (kv_head + 1) * group):
            plain = [0.0] * (tokens - window)
            for position in range(tokens - window, tokens):
                attention = (keys[: position + 1] @ q[head, position - tokens] / math.sqrt(dim)).softmax(0)
                power = 2 if options.method == "kv_compress" else 1
                for t, weight in enumerate(attention.tolist()[: tokens - window]):
                    plain[t] += weight**power / window
            reach = options.kernel_size // 2
            for t in range(tokens - window):
                near = plain[max(0, t - reach) : t + reach + 1]
                pooled = sum(near) / options.kernel_size if options.pooling == "avg" else max(near)
                of_head[t] += pooled / group
        for t in (*range(options.sinks), *range(tokens - window, tokens)):
            of_head[t] = math.inf
        scores.append(of_head)
    return scores


def kept_tokens(
    options: KVCompressionOptions, scores: Sequence[Sequence[list[float]]], num_blocks: int
) -> list[list[list[int]]]:
    """The tokens of full blocks that each KV head of each layer keeps. scores: by layer, KV head and token."""
    best = [
        [
            sorted(range(len(of_head) // BLOCK_SIZE * BLOCK_SIZE), key=lambda t, s=of_head: (-s[t], t))
            for of_head in layer
        ]
        for layer in scores
    ]
    worth = {
        (layer, head, b): sum(scores[layer][head][t] for t in tokens[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE])
        for layer, heads in enumerate(best)
        for head, tokens in enumerate(heads)
        for b in range(len(tokens) // BLOCK_SIZE)
    }
    least = int(options.safeguard * num_blocks)

    def share(members: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Keep the best blocks of these heads."""
        blocks = [key for key in worth if key[:2] in members]
        blocks.sort(key=lambda key: (-(math.inf if key[2] < least else worth[key]), key))
        kept = [key[:2] for key in blocks[: num_blocks * len(members)]]
        return {member: kept.count(member) for member in members}

    layers, heads = range(len(scores)), range(len(scores[0]))
    counts = {(layer, head): num_blocks for layer in layers for head in heads}
    if options.method == "adakv":
        for layer in layers:
            counts |= share([(layer, head) for head in heads])
    if options.method == "kv_compress":
        counts = share(list(counts))
    if options.method == "pyramidkv":
        fewest = math.ceil((options.sinks + options.window) / BLOCK_SIZE)
        held = [len(layer[0]) // BLOCK_SIZE for layer in best]
        last = max(min(fewest, num_blocks), num_blocks / options.steepness, 2 * num_blocks - max(held))
        step = (2 * num_blocks - 2 * last) / (len(scores) - 1)
        sums = [0]
        for layer in layers:
            sums.append(round(sum(2 * num_blocks - last - step * i for i in range(layer + 1))))
            counts |= {(layer, head): min(held[layer], sums[-1] - sums[-2]) for head in heads}
        for layer in layers:  # what some layers do not have is given to the first ones that have more
            missing = len(scores) * num_blocks - sum(counts[other, 0] for other in layers)
            counts |= {(layer, head): min(held[layer], counts[layer, 0] + missing) for head in heads}
    return [[sorted(best[layer][head][: counts[layer, head] * BLOCK_SIZE]) for head in heads] for layer in layers]


@dataclass
class MaskedModel:
    """A model of transformers whose queries behind some points see only some keys before them.

    media: what the model gets besides the text. num_tokens: only ids below it are generated. points: where the text was
    compressed, and by layer and KV head, the tokens of full blocks before that which are seen behind it.
    """

    model: Any
    media: dict[str, Tensor] = field(default_factory=dict)
    num_tokens: int | None = None
    points: list[tuple[int, list[list[list[int]]]]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)  # [heads, tokens, dim] by layer, of the last forward
    keys: list[Tensor] = field(default_factory=list)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        q, k, v, layer = q[0], k[0], v[0], module.layer_idx
        self.queries.append(q)
        self.keys.append(k)
        tokens, group = q.shape[1], len(q) // len(k)
        seen = torch.ones(len(k), tokens, tokens, dtype=torch.bool).tril()
        for end, kept in self.points:
            for head, of_head in enumerate(kept[layer]):
                removed = sorted(set(range(end // BLOCK_SIZE * BLOCK_SIZE)) - set(of_head))
                seen[head, end:, removed] = False
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
        scores = scores.masked_fill(~seen.repeat_interleave(group, 0), -math.inf)
        return (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1)[None], None

    @torch.inference_mode()
    def logits(self, text: list[int]) -> Tensor:
        from transformers import AttentionInterface

        AttentionInterface.register("masked", self.attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation({"text_config": "masked"} if self.media else "masked")
        self.queries, self.keys = [], []
        try:
            media = dict(self.media)
            if (kinds := media.get("mm_token_type_ids")) is not None:  # of the prompt; text follows
                media["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(text) - kinds.shape[1]))
            return self.model(torch.tensor([text]), **media).logits[0]
        finally:
            self.model.set_attn_implementation(before)

    def compress(self, options: KVCompressionOptions, text: list[int], num_blocks: int) -> None:
        self.logits(text)
        before, last = self.points[-1] if self.points else (0, None)
        behind, held, scores = list(range(before // BLOCK_SIZE * BLOCK_SIZE, len(text))), [], []
        for layer, (q, k) in enumerate(zip(self.queries, self.keys, strict=True)):
            groups = q.chunk(len(k))
            held.append([(last[layer][head] if last else []) + behind for head in range(len(k))])
            heads = zip(groups, k, held[-1], strict=True)
            scores.append([key_scores(options, queries, keys[None, seen])[0] for queries, keys, seen in heads])
        chosen = kept_tokens(options, scores, num_blocks)
        kept = [
            [[seen[i] for i in of_head] for seen, of_head in zip(*layers, strict=True)]
            for layers in zip(held, chosen, strict=True)
        ]
        self.points.append((len(text), kept))

    def generate(
        self, options: KVCompressionOptions, prompt: list[int], count: int, ratio: float, first: int = 0
    ) -> list[int]:
        """The likeliest tokens, compressed behind the prompt, or later behind the first `first` tokens, and after each
        interval."""
        self.points, text, held, before = [], list(prompt), 0, 0
        first = max(first, len(prompt))
        for _ in range(count):
            length = len(text)
            logits = self.logits(text)[-1]
            behind = length - first
            if behind == 0 or (behind > 0 and options.interval and behind % options.interval == 0):
                held += length // BLOCK_SIZE - before // BLOCK_SIZE
                before, kept = length, options.kept_blocks(length, BLOCK_SIZE, ratio)
                if kept is not None and kept < held:
                    self.compress(options, text, kept)
                    held = kept
            text.append(int(logits[: self.num_tokens].argmax()))
        return text[len(prompt) :]


@torch.inference_mode()
def compressed_logits(
    runner: ModelRunner, text: list[int], num_prompt: int, num_blocks: int, chunks: Sequence[int], row: int = 0
) -> Tensor:
    """The logits behind each token of `text` whose first `num_prompt` tokens are compressed, which end with a chunk."""
    count, full = -(-num_prompt // BLOCK_SIZE), num_prompt // BLOCK_SIZE
    blocks = [7 * i % 61 + 1 for i in range(61)]
    new = NewRequest("r", row, text, len(text), 0, SamplingParams(), 0)
    runner.batch.install(new)
    edits = BlockTableEdits([0] * count, [row] * count, list(range(count)), blocks[:count])
    found, end = [], 0
    for index, size in enumerate(chunks):
        step = SchedulerOutput(index, [new] if index == 0 else [], [row], [size], edits)
        end += size
        if end == num_prompt:
            step.compressions.append((0, num_blocks, 0))
        runner.batch.edit_block_tables(step)
        flat = runner.batch.flatten(step)
        found.append(runner.model.logits(runner.forward(runner.staging.stage(flat, flat.size, step, {})[0])))
        edits = BlockTableEdits()
        if end == num_prompt:  # of the tokens to come
            first, last = num_blocks + count - full, -(-len(text) // BLOCK_SIZE) - full + num_blocks
            more = last - first
            edits = BlockTableEdits([0] * more, [row] * more, list(range(first, last)), blocks[count : count + more])
    return torch.cat(found)
