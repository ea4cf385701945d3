"""Measures the gain from drafts with Qwen3-0.6B's shapes, with real head sizes and the acceptance of trained heads.

    python -m benchmarks.replayed_drafts [--head eagle3 medusa] [--dtype bfloat16 int8] [--streams 1 4 16] [--json FILE]
    python -m benchmarks.replayed_drafts --rates 0.9 --rates 0.7 --rates 0.5 --streams 1 2 4 8 16 32

Weights are dummies, so acceptance is replayed: by default at the rates of the bundled model's first heads, or at the
rates in --rates, each of which applies if the drafts before it were accepted. Making and verifying drafts costs as much
as with real weights. An engine with the head and one without alternate. Prints the median of the rounds' throughput
ratios: above 1, speculation is faster. Processor time is disturbed less by other programs, but does not show waiting.
--plot draws the ratios, from this run or a file of --json.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure  # no pyplot: no display, no global state

from benchmarks.guard import CONFIG
from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model

QWEN3 = CONFIG | {"num_hidden_layers": 28}
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": CONFIG["vocab_size"],
        "draft_vocab_size": 32_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
    },
    "medusa": {"model_type": "medusa", "medusa_num_heads": 5, "medusa_num_layers": 1},
}
NAMES = {"eagle3": "EAGLE-3", "medusa": "Medusa"}
COLOURS = "#2563a8", "#e08a1e", "#3f8f4f", "#c22f2f"
# The share of correct drafts at each position, with the bundled model's first heads at temperature 0. The current
# EAGLE-3 head is better (docs/speculation.md).
RIGHT = {"eagle3": (0.925, 0.877, 0.789, 0.724, 0.653), "medusa": (0.781, 0.607, 0.466, 0.389, 0.357)}


def conditional(right: Sequence[float]) -> list[float]:
    """Return the share of correct drafts at each position, given that all earlier drafts are correct."""
    return [share / before for share, before in zip(right, (1.0, *right), strict=False)]


def make_llm(dtype: str, streams: int, head: str | None = None, drafts: int = 5, adaptive: bool = True) -> LLM:
    """Return an engine with dummy weights. dtype: bfloat16, or int8 for quantized weights."""
    options: dict[str, Any] = {"quantization": "int8"} if dtype == "int8" else {}
    if head is not None:
        options["speculative_config"] = {
            "method": "replay",
            "draft_method": head,
            "model": folder(HEADS[head]),
            "num_speculative_tokens": drafts,
            "acceptance_rates": conditional(RIGHT[head])[:drafts],
            "adaptive": adaptive,
        }
    return LLM(
        folder(QWEN3),
        load_format="dummy",
        dtype="bfloat16",
        tokenizer=str(bundled_model()),
        max_model_len=1024,
        max_num_seqs=max(16, streams),
        enable_prefix_caching=False,
        **options,
    )


def folder(config: dict[str, Any]) -> str:
    path = tempfile.mkdtemp()
    (Path(path) / "config.json").write_text(json.dumps(config))
    return path


def set_rates(llm: LLM, rates: Sequence[float]) -> None:
    """Replay different rates from now on."""
    replayed = llm.core.executor.runner.staging.count_kept  # type: ignore[attr-defined]
    most = len(replayed.rates) - 1
    all_rates = [*rates, *(most * [rates[-1]])][:most]
    replayed.rates = torch.tensor([*all_rates, 0.0])


def run(llm: LLM, streams: int, tokens: int, seed: int) -> tuple[float, float]:
    """Return tokens per second of wall time and of processor time, including the time of the prompts, which are
    short."""
    dice = random.Random(seed)
    prompts = [{"prompt_token_ids": [dice.randint(3, 4000) for _ in range(32)]} for _ in range(streams)]
    params = [
        SamplingParams(temperature=0, seed=dice.randint(0, 1 << 30), max_tokens=tokens, ignore_eos=True)
        for _ in range(streams)
    ]
    wall = time.perf_counter()
    processors = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    wall = time.perf_counter() - wall
    processors = time.process_time() - processors
    return streams * tokens / wall, streams * tokens / processors


def measure(plain: LLM, speculative: LLM, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    stats = speculative.core.stats.speculation
    assert stats is not None
    before = stats.drafts, stats.draft_tokens, stats.accepted_tokens
    walls: list[tuple[float, float]] = []
    processors: list[tuple[float, float]] = []
    for number in range(rounds):
        order = (plain, speculative) if number % 2 else (speculative, plain)
        speeds = {id(llm): run(llm, streams, tokens, number) for llm in order}
        for pairs, kind in ((walls, 0), (processors, 1)):
            pairs.append((speeds[id(plain)][kind], speeds[id(speculative)][kind]))
    stats = speculative.core.stats.speculation
    assert stats is not None
    after = stats.drafts, stats.draft_tokens, stats.accepted_tokens
    drafts, drafted, accepted = (new - old for new, old in zip(after, before, strict=True))
    return {
        "streams": streams,
        "plain": median(plain for plain, _ in walls),
        "speculative": median(speculative for _, speculative in walls),
        "ratio": median(speculative / plain for plain, speculative in walls),
        "ratio of processor time": median(speculative / plain for plain, speculative in processors),
        "drafts": drafted / max(1, drafts),
        "tokens_of_a_step": 1 + accepted / max(1, drafts),
        "ratios": [round(speculative / plain, 3) for plain, speculative in walls],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8"], choices=["bfloat16", "int8"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rates", type=float, nargs="+", action="append", help="replay these rates; may be repeated")
    parser.add_argument("--drafts", type=int, default=5, help="the most drafts of a request in a step; default: 5")
    parser.add_argument("--fixed", action="store_true", help="that many drafts in every step, whether it pays or not")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a request; default: 96")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file; with --rounds 0, read them")
    parser.add_argument("--plot", type=Path, help="draw the ratios to this PNG file")
    options = parser.parse_args()
    results = measure_all(options) if options.rounds else json.loads(options.json.read_text())
    if options.json and options.rounds:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        draw(options.plot, results)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    print(
        "dtype     head    rates            streams  plain tok/s  speculative  ratio  by CPU s  drafts  tokens a step"
    )
    for dtype in options.dtype:
        plain = make_llm(dtype, max(options.streams))
        for head in options.head:
            speculative = make_llm(dtype, max(options.streams), head, options.drafts, not options.fixed)
            for llm in plain, speculative:
                run(llm, 1, 8, 0)
            for rates in options.rates or [conditional(RIGHT[head])]:
                set_rates(speculative, rates)
                for streams in options.streams:
                    found = measure(plain, speculative, streams, options.tokens, options.rounds)
                    results.append({"dtype": dtype, "head": head, "rates": rates} | found)
                    shown = " ".join(f"{rate:.2f}" for rate in rates[:3])
                    print(
                        f"{dtype:8}  {head:6}  {shown:15}  {streams:7}  {found['plain']:11.1f}  "
                        f"{found['speculative']:11.1f}  {found['ratio']:5.2f}  "
                        f"{found['ratio of processor time']:8.3f}  {found['drafts']:6.1f}  "
                        f"{found['tokens_of_a_step']:13.2f}  {found['ratios']}",
                        flush=True,
                    )
            del speculative
    return results


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Draw a panel for each head and weight type: the gain by the number of streams, with a line for each
    acceptance."""
    top = 1.05 * max(result["ratio"] for result in results)
    panels = list(dict.fromkeys((result["head"], result["dtype"]) for result in results))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for (head, dtype), axis in zip(panels, figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], strict=True):
        of_panel = [result for result in results if (result["head"], result["dtype"]) == (head, dtype)]
        rates = list(dict.fromkeys(tuple(result["rates"]) for result in of_panel))
        for colour, rate in zip(COLOURS, rates, strict=False):
            points = sorted((r["streams"], r["ratio"]) for r in of_panel if tuple(r["rates"]) == rate)
            label = f"{rate[0]:.0%} of the drafts" if len(set(rate)) == 1 else "as the bundled model's head"
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
        axis.axhline(1, color="#666666", lw=1, ls="--")
        axis.set_xscale("log", base=2)
        axis.set(title=f"{NAMES[head]}, {dtype}", xlabel="requests at a time", ylim=(0, top))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_ylabel("tokens per second, with drafts / without")
    first.legend(title="accepted", fontsize=8, title_fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
