"""Measures the losses and gains of KV compression: perplexity, needles in a haystack, and concurrent requests.

    python -m benchmarks.kv_compression inputs --model MODEL --file inputs.json
    python -m benchmarks.kv_compression quality --model MODEL --file inputs.json --json found.json
    python -m benchmarks.kv_compression speed --json speed.json

`inputs` writes token ids, so that benchmarks/peers/kvpress_quality.py measures the same texts in another environment:
texts of Python's documentation (pydoc_data), or for the bundled model, new texts like those of its training
(tools/demo_corpus.py). `quality` prints a row for each method and ratio:

- the perplexity of the tokens after a compressed text, relative to that without compression, in per cent;
- how many of the needles found without compression are still found. A needle is a sentence with a number at a random
place in a text, and the prompt ends with a question about it.

The first part of a prompt is computed once. Its cache is restored for each variant, which computes the last 144 tokens
of the prompt, compresses it, and continues.

`continuous` also compresses while a text grows, see the function.

`speed` runs the same requests through an engine with a small pool, with and without compression, and reports how many
run at once and the tokens per second.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.attention.eviction import METHODS
from quire.messages.step import NewRequest, SchedulerOutput

RATIOS = (2, 4, 8, 16)
LAST = 144  # the last tokens of a prompt, computed again by each variant
BEHIND = 256  # tokens after a text, whose perplexity is measured
ANSWER = 6  # tokens
CITIES = "Lisbon Oslo Vienna Porto Ghent Turin Riga Bern Lyon Cork Graz Malmo".split()


def library(tokenizer: Any, is_bundled: bool) -> list[int]:
    if is_bundled:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
        from demo_corpus import documents

        return list(tokenizer.encode("".join(islice(documents("held out: kv compression"), 1000))))
    text = "\n\n".join(text for _, text in sorted(topics.items()) if len(text) > 4000)
    return list(tokenizer.encode(re.sub(r"[ \t]+", " ", text)))


def make_inputs(ids: list[int], tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    length = options.length
    num_texts = options.texts
    num_needles = options.needles
    dice = random.Random(1)
    needles = []
    room = (len(ids) - length - BEHIND) // num_texts
    texts = [ids[i * room : i * room + length + BEHIND] for i in range(num_texts)]
    for i in range(num_needles):
        count = options.needle_lengths[i % len(options.needle_lengths)]
        start = dice.randrange(len(ids) - count)
        lines = tokenizer.decode(ids[start : start + count]).split("\n")
        city = dice.choice(CITIES)
        number = str(dice.randrange(1000, 9999))
        lines.insert(int((i + 0.5) / num_needles * len(lines)), f"\nThe secret number of {city} is {number}.\n")
        question = f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"
        needles.append({"prompt": list(tokenizer.encode("\n".join(lines) + question)), "answer": number})
    return {"length": length, "texts": texts, "needles": needles}


class Variants:
    """An engine whose runner is driven directly, with one request in row 0."""

    def __init__(self, model: str | None, longest: int, dtype: str) -> None:
        blocks = -(-longest // 16)
        self.llm = LLM(
            model,
            dtype=dtype,
            max_model_len=longest,
            num_gpu_blocks_override=blocks + 2,
            max_num_seqs=2,
            kv_compression={"ratio": 4},
        )
        self.runner: Any = self.llm.core.executor.runner
        self.rows = self.runner.staging.rows
        self.batch = self.runner.batch
        self.all_blocks = torch.arange(1, blocks + 1, dtype=torch.int32).numpy()
        self.options = self.rows.eviction.options

    @torch.inference_mode()
    def run(self, count: int, num_kept_blocks: int | None = None) -> Tensor:
        """Return the hidden states of the next tokens. If the prompt is to be compressed, these are its last tokens."""
        compressions = [] if num_kept_blocks is None else [(0, num_kept_blocks, 0)]
        step = SchedulerOutput(0, [], [0], [count], compressions=compressions)
        flat = self.batch.flatten(step)
        return self.runner.forward(self.runner.staging.stage(flat, flat.size, step, {})[0])  # type: ignore[no-any-return]

    def begin(self, prompt: list[int]) -> None:
        self.batch.install(NewRequest("r", 0, prompt, len(prompt), 0, SamplingParams(), 0))
        self._plain()
        for start in range(0, len(prompt) - LAST, 512):
            self.run(min(512, len(prompt) - LAST - start))
        self.saved = self.rows.backend.slices.clone()
        self.prompt = prompt

    def _plain(self) -> None:
        self.rows.num_kept[0] = self.rows.num_removed[0] = self.rows.most_kept[0] = 0
        self.rows.counts[0] = 0
        self.batch.block_tables[0, 0] = self.all_blocks[: self.batch.block_tables.shape[2]]

    def end(self, method: str | None, ratio: float) -> Tensor:
        """Compress the prompt; a method of None keeps all of it. Returns the logits after it, [1, vocab]."""
        self.rows.backend.slices.copy_(self.saved)
        self._plain()
        count = len(self.prompt)
        kept = None
        self.batch.num_computed[0] = count - LAST
        if method is not None:
            options = replace(self.options, method=method, ratio=ratio)
            kept = options.kept_blocks(count, 16)
            self.rows.eviction = METHODS[method](options, 16)
        hidden = self.run(LAST, kept)
        if kept is not None:
            first = kept + (count % 16 > 0)
            used = -(-count // 16)
            fresh = self.all_blocks[used:]
            self.batch.block_tables[0, 0, first : first + len(fresh)] = fresh
        return self.runner.model.logits(hidden[-1:])  # type: ignore[no-any-return]

    def append(self, tokens: list[int]) -> Tensor:
        """Return the logits after each of these tokens."""
        known = int(self.batch.num_computed[0])
        self.batch.token_ids[0, known : known + len(tokens)] = tokens
        self.batch.num_tokens[0] = known + len(tokens)
        return self.runner.model.logits(self.run(len(tokens)))  # type: ignore[no-any-return]


def variants() -> Iterator[tuple[str | None, float]]:
    yield None, 1
    for method in METHODS:
        for ratio in RATIOS:
            yield method, ratio


@torch.inference_mode()
def quality(engine: Any, inputs: Any, decode: Any) -> dict[str, Any]:
    """engine: has the same begin, end and append as Variants. decode: token ids -> text."""
    losses: dict[str, list[float]] = {}
    for text in inputs["texts"]:
        prompt = text[: inputs["length"]]
        behind = text[inputs["length"] :]
        engine.begin(prompt)
        for method, ratio in engine.variants():
            logits = torch.cat([engine.end(method, ratio), engine.append(behind[:-1])]).float()
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(behind))
            losses.setdefault(f"{method} {ratio}", []).append(loss.item())
        print(f"{len(losses['None 1'])} texts", flush=True)
    found: dict[str, list[bool]] = {}
    for needle in inputs["needles"]:
        engine.begin(needle["prompt"])
        for method, ratio in engine.variants():
            logits = engine.end(method, ratio)
            answer = []
            for _ in range(ANSWER):
                answer.append(int(logits[-1].argmax()))
                logits = engine.append(answer[-1:])
            found.setdefault(f"{method} {ratio}", []).append(needle["answer"] in decode(answer))
        print(f"{len(found['None 1'])} needles", flush=True)
    return {"losses": losses, "found": found}


def table(result: dict[str, Any]) -> str:
    """Return the rows of a Markdown table."""
    base = torch.tensor(result["losses"]["None 1"])
    lines = [f"perplexity without compression: {base.mean().exp():.2f}"]
    hits = [i for i, hit in enumerate(result["found"].get("None 1", [])) if hit]
    lines += [f"needles found without compression: {len(hits)} of {len(result['found'].get('None 1', []))}", ""]
    methods = dict.fromkeys(name.split()[0] for name in result["losses"] if not name.startswith("None"))
    lines += ["| method | " + " | ".join(f"{r} ×" for r in RATIOS) + " |", "|---" * (len(RATIOS) + 1) + "|"]
    for method in methods:
        cells = []
        for ratio in RATIOS:
            loss = torch.tensor(result["losses"][f"{method} {ratio}"])
            cell = f"{100 * ((loss - base).mean().exp() - 1):+.2f} %"
            if hits:
                kept = sum(result["found"][f"{method} {ratio}"][i] for i in hits)
                cell += f", {kept}"
            cells.append(cell)
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("inputs", "quality", "continuous", "speed", "table"))
    parser.add_argument("--model", help="default: the bundled model")
    parser.add_argument("--file", type=Path, help="the inputs")
    parser.add_argument("--json", type=Path, help="where results go, or come from for `table`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=6000, help="tokens of a text that is compressed")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--needles", type=int, default=36)
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[2000, 4000])
    options = parser.parse_args()
    if options.what == "table":
        print(table(json.loads(options.json.read_text())))
        return
    if options.what == "continuous":
        print(continuous(options.model, options.dtype, options.length, options.texts, 4))
        return
    if options.what == "speed":
        result = speed()
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result))
        return
    if options.what == "inputs":
        tokenizer = LLM(options.model, max_model_len=64, max_num_seqs=1, load_format="auto").get_tokenizer()
        made = make_inputs(library(tokenizer, options.model is None), tokenizer, options)
        options.file.write_text(json.dumps(made))
        return
    inputs = json.loads(options.file.read_text())
    longest = max(map(len, [*inputs["texts"], *(needle["prompt"] for needle in inputs["needles"])])) + 64
    engine = Variants(options.model, longest, options.dtype)
    engine.variants = variants  # type: ignore[attr-defined]
    tokenizer = engine.llm.get_tokenizer()
    result = quality(engine, inputs, tokenizer.decode)
    if options.json:
        options.json.write_text(json.dumps(result))
    print(table(result))


def continuous(model: str | None, dtype: str, length: int, num_texts: int, ratio: float) -> str:
    """Return rows of Markdown with the effect of compression in intervals, on texts of 200 prompt tokens and `length`
    output tokens.

    The output is fixed, as if another core had generated it. The engine computes it in chunks over the same caches.
    Each chunk ends where the cache would have been compressed. Each chunk gives logits after all its tokens.
    """
    rows = ["| method | interval | blocks | perplexity |", "|---|---|---|---|"]
    longest = 200 + length
    base = 0.0
    ids = list[int]()
    for method, interval in (("", 0), ("kv_compress", 0), *product(METHODS, (128, 256, 512))):
        options = {"method": method, "ratio": ratio, "interval": interval} if method else {}
        llm = LLM(
            model,
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=1,
            enable_prefix_caching=False,
            num_gpu_blocks_override=longest // 16 + 2,
            kv_compression=options,
        )
        if not ids:
            ids = library(llm.get_tokenizer(), model is None)
        runner: Any = llm.core.executor.runner
        pool = llm.core.scheduler.kv.pool
        run = runner.forward.run
        model_logits = runner.model.logits
        losses = list[float]()
        held = 0
        logits = list[Tensor]()

        def observed(
            inputs: Any, wanted: Any = None, run: Any = run, model_logits: Any = model_logits, seen: Any = logits
        ) -> Any:
            hidden = run(inputs)
            seen.append(model_logits(hidden))
            return hidden if wanted is None else hidden[wanted]

        runner.forward.run = observed
        for i in range(num_texts):
            start = i * (len(ids) - longest) // num_texts
            text = ids[start : start + longest]
            logits.clear()
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            request = llm.processor.process(f"{i}", text[:200], params).core_requests[0]
            request.output_token_ids = text[200:-1]
            llm.core.add_request(request)
            while llm.core.has_unfinished:
                llm.core.step()
            known = torch.cat(logits)[199:].float()
            losses.append(torch.nn.functional.cross_entropy(known, torch.tensor(text[200:])).item())
        runner.forward.run = run
        request = llm.processor.process("own", text[:200], params).core_requests[0]
        llm.core.add_request(request)
        while llm.core.has_unfinished:
            llm.core.step()
            held = max(held, pool.num_usable - pool.num_free)
        llm.core.shutdown()
        mean = sum(losses) / len(losses)
        base = base or mean
        change = f"{math.exp(mean):.3f}" if not method else f"{100 * (math.exp(mean - base) - 1):+.2f} %"
        rows.append(f"| {method or 'none'} | {interval or ''} | {held} | {change} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


PROMPT, OUTPUT = 3072, 48  # tokens
POOL = 16  # uncompressed requests that fit into the pool
SHAPE = {  # the KV cache dominates: 12 KB per token, with only 12 MB of weights
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
}


def speed(rounds: int = 2) -> dict[str, Any]:
    """Return for each engine how many requests run at once, and the tokens per second while all of them decode."""
    pool = POOL * -(-(PROMPT + OUTPUT) // 16)
    result = dict[str, Any]()
    for name, compression in (("whole", {}), ("4 x", {"method": "kv_compress", "ratio": 4})):
        llm = LLM(
            load_format="dummy",
            hf_overrides=SHAPE,
            max_model_len=PROMPT + OUTPUT,
            max_num_seqs=96,
            max_num_batched_tokens=8192,
            num_gpu_blocks_override=pool + 1,
            enable_prefix_caching=False,
            kv_compression=compression,
        )
        most = 0
        rates = []
        for attempt in range(rounds):
            core = llm.core
            dice = random.Random(attempt)
            for i in range(96):
                prompt = [dice.randrange(300) for _ in range(PROMPT)]
                params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
                core.add_request(llm.processor.process(f"{attempt}/{i}", prompt, params).core_requests[0])
            running = core.scheduler.running
            seconds = 0.0
            tokens = 0
            count = 0
            # Requests are admitted while there is room. Only steps with the maximum number of requests, all decoding,
            # are counted. Steps after a preemption or with prompts are not.
            while core.has_unfinished and count < 24:
                started = time.perf_counter()
                computed = core.scheduler.stats.computed_tokens
                core.step()
                elapsed = time.perf_counter() - started
                computed = core.scheduler.stats.computed_tokens - computed
                if computed == len(running) and len(running) >= most > 0:
                    seconds = seconds + elapsed
                    tokens = tokens + computed
                    count = count + 1
                if computed <= len(running):
                    most = max(most, len(running))
            rates.append(tokens / seconds)
            core.abort_requests(list(core.scheduler.requests))
            while core.has_unfinished:
                core.step()
        result[name] = {"requests": most, "tokens_per_second": rates, "preemptions": core.scheduler.stats.preemptions}
        core.shutdown()
    return result


if __name__ == "__main__":
    main()
