"""Measures how well context-parallel ranks are used: on paper, by counted work and bytes, and measured on this machine

    python -m benchmarks.context_parallel [--plot FILE]
    python -m benchmarks.context_parallel --measure [--tokens N]

On paper, the time of a prompt is the sum of one rank's work over its chunks and layers. The pairs of a query and a
key that it computes, and the bytes that it sends, are counted by the functions below; a test compares them with the
implementation (tests/attention/test_context_counts.py). The simulated ring works like the implementation: one stream
computes, another one exchanges, and results are sent while the next queries are computed. Nothing else overlaps.
Efficiency is the time of one rank, which exchanges and copies nothing, divided by n times the time of n ranks.

--measure runs a small model with one thread for each rank, alone and on two ranks.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

# ---- counts for one rank and one layer


def seen_pairs(first: int, count: int, ranks: int = 1, rank: int = 0) -> int:
    """Return the number of query-key pairs: queries at the positions first to first + count - 1, keys in a rank's
    stripe.
    """
    last = first + count
    return _pairs_below(last, ranks, rank) - _pairs_below(first, ranks, rank)


def _pairs_below(position: int, ranks: int, rank: int) -> int:
    """Return the sum of (p - rank) // ranks + 1 over the positions from `rank` up to position - 1."""
    rounds, rest = divmod(max(0, position - rank), ranks)
    return ranks * rounds * (rounds + 1) // 2 + rest * (rounds + 1)


def sent_by_ring(own: int, total: int, ranks: int, heads: int, dim: int, out_dim: int, size: int = 2) -> int:
    """Return the bytes of this rank's queries, and of its results for other ranks' queries. own, total: tokens of a
    step."""
    return (ranks - 1) * own * heads * dim * size + (total - own) * heads * (out_dim * size + 4)


def sent_by_heads(own: int, total: int, ranks: int, heads: int, kv_heads: int, dim: int, size: int = 2) -> int:
    """Return the bytes of three all-to-alls: keys and values, queries, and results."""
    given = (ranks - 1) * own * (heads + 2 * kv_heads) // ranks * dim * size
    return given + (total - own) * heads // ranks * (dim * size + 4)


def sent_by_decoding(tokens: int, ranks: int, heads: int, dim: int, out_dim: int, size: int = 2) -> int:
    """Return the bytes of decode context parallelism: queries to all ranks of the group, and results for their
    heads."""
    return (ranks - 1) * tokens * heads * ((dim + out_dim) * size + 4)


# ---- time on paper


@dataclass(frozen=True)
class Model:
    """weights: the number of weights that multiply a token in a layer, over all tensor-parallel ranks."""

    name: str
    layers: int
    hidden: int
    weights: float
    heads: int
    kv_heads: int
    dim: int
    out_dim: int
    tp: int


@dataclass(frozen=True)
class Cluster:
    """Rates of H100s, per second. links: bytes in each direction of one GPU."""

    name: str
    link: float
    products: float = 600e12
    attention: float = 400e12
    memory: float = 2.7e12
    tensor_link: float = 350e9  # NVLink, for tensor parallelism
    latency: float = 15e-6  # of an exchange
    launch: float = 5e-6  # of a kernel, on the host


NVLINK = Cluster("NVLink, 350 GB/s", 350e9)
NETWORK = Cluster("400 Gb/s, 45 GB/s", 45e9)

MODELS = {
    "8B": Model("Llama-3.1-8B", 32, 4096, 218e6, 32, 8, 128, 128, 1),
    "70B": Model("Llama-3.1-70B, tp 8", 80, 8192, 856e6, 64, 8, 128, 128, 8),
    "405B": Model("Llama-3.1-405B, tp 8", 126, 16384, 3.18e9, 128, 8, 128, 128, 8),
    "V3": Model("DeepSeek-V3, tp 8", 61, 7168, 600e6, 128, 1, 576, 512, 8),
}


def seconds(model: Model, cluster: Cluster, tokens: int, chunk: int, ranks: int, way: str = "ring") -> float:
    """Return the time of a prompt. ranks: the number of prefill context-parallel ranks, each with model.tp GPUs. way:
    "ring" or "heads"."""
    total = 0.0
    for first in range(0, tokens, chunk):
        count = min(chunk, tokens - first)
        total += model.layers * _layer(model, cluster, first, count, ranks, way)
    return total


def _layer(model: Model, cluster: Cluster, first: int, count: int, ranks: int, way: str) -> float:
    """Return the time of one layer and one chunk."""
    own = count / ranks
    heads = model.heads // model.tp
    products = max(2 * model.weights * own / cluster.products, 2 * model.weights / cluster.memory) / model.tp
    sums = 0.0
    if model.tp > 1:
        sums = 2 * (2 * own * model.hidden * 2 * (model.tp - 1) / model.tp / cluster.tensor_link + cluster.latency)
    pairs = seen_pairs(first, count) / ranks  # equal on all ranks, to within a token
    attention = 2 * (model.dim + model.out_dim) * heads * pairs / cluster.attention
    if ranks == 1:
        return products + sums + attention
    if way == "heads":
        sent = sent_by_heads(int(own), count, ranks, heads, model.kv_heads // model.tp, model.dim)
        copied = 2 * count * (heads + model.kv_heads // model.tp) * 4 * model.dim / ranks  # before and after each
        exchanged = sent / cluster.link + 3 * cluster.latency
        return max(products + sums + attention + exchanged + copied / cluster.memory, 40 * cluster.launch)
    ring = _ring(model, cluster, own, heads, attention / ranks, ranks)
    return max(products + sums + ring, (30 + 12 * ranks) * cluster.launch)


def _ring(model: Model, cluster: Cluster, own: float, heads: int, attention: float, ranks: int) -> float:
    """attention: seconds for the queries of one rank."""
    query = own * heads * model.dim * 2
    result = own * heads * (model.out_dim * 2 + 4)
    # The queries of one rank are sorted, and their results are sorted back and packed.
    attention += (2 * query + 4 * result) / cluster.memory
    merged = (ranks + 1) * result / cluster.memory
    computed = attention
    arrivals = [(distance * (query / cluster.link + cluster.latency)) for distance in range(1, ranks)]
    exchanged = arrivals[-1]
    for arrival in arrivals:
        computed = max(computed, arrival) + attention
        exchanged = max(exchanged, computed) + result / cluster.link + cluster.latency
    return exchanged + merged


def efficiency(model: Model, cluster: Cluster, tokens: int, chunk: int, ranks: int, way: str) -> float:
    """chunk: the tokens of a step that each rank computes."""
    alone = seconds(model, cluster, tokens, 8192, 1)
    return alone / ranks / seconds(model, cluster, tokens, chunk * ranks, ranks, way)


K = 1 << 10
M = 1 << 20
CASES = [
    ("8B", NVLINK, 512 * K, 8, "ring"),
    ("8B", NVLINK, 512 * K, 8, "heads"),
    ("8B", NETWORK, M, 16, "ring"),
    ("70B", NETWORK, 512 * K, 8, "ring"),
    ("70B", NETWORK, M, 16, "ring"),
    ("V3", NETWORK, 512 * K, 8, "ring"),
    ("V3", NETWORK, M, 16, "ring"),
    ("405B", NETWORK, M, 16, "ring"),
]


def on_paper(plot: str | None) -> None:
    print(
        "| model | link between ranks | ranks | tokens | way | s | efficiency, % | at 600 TFLOP/s, % |\n"
        + "|---" * 8
        + "|"
    )
    for name, cluster, tokens, ranks, way in CASES:
        model = MODELS[name]
        faster = Cluster(cluster.name, cluster.link, attention=600e12)
        first, second = (efficiency(model, c, tokens, 4096, ranks, way) for c in (cluster, faster))
        took = seconds(model, cluster, tokens, 4096 * ranks, ranks, way)
        print(
            f"| {model.name} | {cluster.name} | {ranks} | {tokens // K}K | {way} | {took:,.1f} | {100 * first:.1f} "
            f"| {100 * second:.1f} |"
        )
    if plot is not None:
        draw(plot)


def draw(file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    lengths = [2**power * K for power in range(4, 11)]
    for axis, ranks in zip(axes, (8, 16), strict=True):
        for name, cluster, way in (
            ("8B", NVLINK if ranks == 8 else NETWORK, "ring"),
            ("8B", NVLINK, "heads"),
            ("70B", NETWORK, "ring"),
            ("V3", NETWORK, "ring"),
        ):
            if way == "heads" and ranks == 16:
                continue
            shares = [100 * efficiency(MODELS[name], cluster, n, min(4096, n // ranks), ranks, way) for n in lengths]
            axis.plot(lengths, shares, marker="o", label=f"{MODELS[name].name}, {way}, {cluster.name}")
        axis.axhline(92 if ranks == 8 else 87, color="gray", linestyle=":")
        axis.set(xscale="log", title=f"{ranks} ranks", xlabel="tokens of the prompt", ylim=(0, 105))
        axis.set_xticks(lengths, [f"{n // K}K" for n in lengths], minor=False)
        axis.minorticks_off()
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("efficiency, %")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"drawn to {file}")


# ---- measured


def measure(tokens: int, **options: Any) -> float:
    """Return the seconds of one prompt, in a separate process with one thread for each rank."""
    ranks = options.get("prefill_context_parallel_size", 1)
    code = f"import benchmarks.context_parallel as b; b.run({tokens}, {options!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": str(ranks)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def run(tokens: int, options: dict[str, Any]) -> None:
    from quire import LLM, SamplingParams

    sizes = {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1536,
        "head_dim": 64,
        "max_position_embeddings": 2 * tokens,
        "num_key_value_heads": options.pop("kv_heads"),
    }
    llm = LLM(
        load_format="dummy",
        hf_overrides=sizes,
        max_model_len=tokens + 16,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 << 30,
        **options,
    )
    prompt = [7 + i % 1000 for i in range(tokens)]
    params = SamplingParams(max_tokens=1)
    llm.generate([prompt[:2048]], params, use_tqdm=False)
    began = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    print(time.perf_counter() - began)
    llm.shutdown()


def measured(tokens: int) -> None:
    print("| way | tokens | one rank, s | two ranks, s | efficiency, % |\n" + "|---" * 5 + "|")
    for way, kv_heads in (("ring", 1), ("heads", 2)):
        alone = min(measure(tokens, kv_heads=kv_heads) for _ in range(4))
        both = min(measure(tokens, kv_heads=kv_heads, prefill_context_parallel_size=2) for _ in range(4))
        print(f"| {way} | {tokens:,} | {alone:.1f} | {both:.1f} | {100 * alone / both / 2:.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="a file for the plot")
    parser.add_argument("--measure", action="store_true", help="measure on this machine")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the measured prompt")
    arguments = parser.parse_args()
    if arguments.measure:
        measured(arguments.tokens)
    else:
        on_paper(arguments.plot)
