"""Which tokens a step generates: sampling, speculation and structured outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.mechanisms.engine import Arrival, engine, run
from benchmarks.mechanisms.plot import BLUE, GREEN, GREY, ORANGE, RED, axes, label_bars
from quire import SamplingParams, StructuredOutputsParams

DRAWS = 4000
PROMPT = "The hare was very"
STORIES = ["Once upon a time", "A fox and a crow", "The little hare", "Emma lived in a small house with a red door."]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["fox", "crow", "bear"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


def measure_sampling() -> Any:
    """Count how often each of the most likely tokens is drawn with 4,000 seeds, in three settings."""
    llm = engine(max_num_seqs=64, max_logprobs=4096)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, temperature=1, logprobs=4096), use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    logprobs = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    likeliest = sorted(logprobs, key=lambda token: -logprobs[token])[:8]
    found = {}
    for title, settings in {
        "temperature 1": {"temperature": 1.0},
        "temperature 0.5": {"temperature": 0.5},
        "top_k 3": {"temperature": 1.0, "top_k": 3},
    }.items():
        outputs = llm.generate(
            [PROMPT] * DRAWS,
            [SamplingParams(max_tokens=1, seed=seed, **settings) for seed in range(DRAWS)],
            use_tqdm=False,
        )
        drawn = [output.outputs[0].token_ids[0] for output in outputs]
        allowed = likeliest[:3] if "top_k" in settings else list(logprobs)
        weights = {token: math.exp(logprobs[token] / settings["temperature"]) for token in allowed}
        total = sum(weights.values())
        found[title] = {
            "expected": [weights.get(token, 0) / total for token in likeliest],
            "drawn": [drawn.count(token) for token in likeliest],
        }
    texts = [llm.get_tokenizer().decode([token]) for token in likeliest]
    return {"prompt": PROMPT, "draws": DRAWS, "tokens": texts, "settings": found}


def draw_sampling(data: Any, figure: Figure) -> None:
    for place, (title, found) in enumerate(data["settings"].items(), 1):
        part = axes(figure, "", "share of the draws" if place == 1 else "", title, (1, 3, place))
        numbers = range(len(data["tokens"]))
        shares = [count / data["draws"] for count in found["drawn"]]
        part.bar(numbers, shares, 0.75, color=BLUE, label=f"{data['draws']:,} seeds")
        part.plot(numbers, found["expected"], "D", color=ORANGE, markersize=5, label="softmax")
        part.set_xticks(numbers, [repr(text.strip()) for text in data["tokens"]], rotation=60, ha="right")
        part.grid(axis="x", visible=False)
        part.set_ylim(0, 0.36)
    figure.axes[0].legend(loc="upper right")


def measure_speculative_decoding() -> Any:
    """Count the steps that four stories of 200 tokens take, and the accepted drafts at each position."""
    found = {}
    for title, config in {
        "none": {},
        "n-gram": {"method": "ngram", "prompt_lookup_min": 2},
        "suffix": {"method": "suffix"},
        "draft model": {"method": "draft_model", "model": "quire-demo/draft"},
        "Medusa": {"method": "medusa", "model": "quire-demo/medusa"},
        "EAGLE-3": {"method": "eagle3", "model": "quire-demo/eagle3"},
    }.items():
        options = {**config, "num_speculative_tokens": 5, "adaptive": False} if config else {}
        llm = engine(max_num_seqs=1, enable_prefix_caching=False, speculative_config=options)
        steps = 0
        drafts = [0] * 5
        kept = [0] * 5
        for story in STORIES:
            parts = [parts[0] for parts in run(llm, [Arrival(0, story, story, 200)])]
            steps += len(parts)
            for part in parts:
                for position in range(part.drafts):
                    drafts[position] += 1
                    kept[position] += part.sampled > position + 1
        found[title] = {"steps": steps, "drafts": drafts, "kept": kept}
        llm.shutdown()
    return {"tokens": 200 * len(STORIES), "methods": found}


def draw_speculative_decoding(data: Any, figure: Figure) -> None:
    methods = data["methods"]
    left = axes(figure, "", "tokens in a step", place=(1, 2, 1))
    left.bar(list(methods), [data["tokens"] / found["steps"] for found in methods.values()], 0.6)
    label_bars(left, form="{:.2f}")
    left.tick_params(axis="x", rotation=40)
    left.grid(axis="x", visible=False)
    right = axes(figure, "position of the draft", "kept, % of the drafts there", place=(1, 2, 2))
    for (name, found), color in zip(list(methods.items())[1:], (GREY, ORANGE, RED, GREEN, BLUE), strict=True):
        shares = [100 * kept / max(1, drafts) for kept, drafts in zip(found["kept"], found["drafts"], strict=True)]
        right.plot(range(1, 6), shares, "o-", label=name, color=color, markersize=4)
    right.set_xticks(range(1, 6))
    right.set_ylim(0, 150)
    right.set_yticks(range(0, 101, 25))
    right.legend(fontsize=8, ncols=2, loc="upper left")


def measure_structured_outputs() -> Any:
    """Return how many tokens the mask of each output token allowed; None if the grammar forced the token."""
    llm = engine(max_num_seqs=1)
    scheduler = llm.core.scheduler
    allowed = list[int | None]()
    masks = scheduler.masks.wait
    counts = list[int]()

    def remember() -> Any:
        made = masks()
        counts.append(int(np.unpackbits(np.frombuffer(made.bits, np.uint8)).sum()) if made else 0)
        return made

    scheduler.masks.wait = remember  # type: ignore[method-assign]
    params = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "seed": 4, "temperature": 1}
    for parts in run(llm, [Arrival(0, "a", PROMPT, 80, params={**params, "ignore_eos": False})]):
        if parts[0].sampled:
            allowed += [counts.pop(0), *[None] * (parts[0].sampled - 1)]
    del scheduler.masks.wait  # type: ignore[method-assign]
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=80, **params), use_tqdm=False)
    pieces = [llm.get_tokenizer().decode([token]) for token in output.outputs[0].token_ids]
    return {"schema": SCHEMA, "text": output.outputs[0].text, "pieces": pieces, "allowed": allowed}


def draw_structured_outputs(data: Any, figure: Figure) -> None:
    part = axes(figure, "", "tokens that the mask allows")
    pieces = data["pieces"]
    allowed = data["allowed"]
    sampled = [(index, count) for index, count in enumerate(allowed) if count is not None]
    forced = [index for index, count in enumerate(allowed) if count is None]
    bars = part.bar(*zip(*sampled, strict=True), 0.75, color=BLUE, label="sampled under its mask")
    part.bar_label(bars, [f"{count / 1000:.1f}k" if count > 999 else count for _, count in sampled], fontsize=8)
    part.bar(forced, [1.25] * len(forced), 0.75, color=GREEN, label="forced: not sampled")
    part.set_yscale("log")
    part.set_ylim(0.8, 30_000)
    part.set_xticks(range(len(pieces)), [piece.replace(" ", "\u00b7") for piece in pieces], rotation=60, ha="right")
    part.grid(axis="x", visible=False)
    part.legend(loc="upper right", ncols=2)
