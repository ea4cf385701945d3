"""Counts the bytes that a rank sends to others for each axis, in real layers and scaled to the shapes of real models.

    python -m benchmarks.bytes_of_axes [--ranks 4]

The layers of a small model of the same architecture run on one rank, whose communicators record the messages and
exchange nothing (`count`). quire/planner/exchanges.py has formulas for the same bytes, which
tests/bench/test_bytes_of_axes.py compares with the counts. The table applies the formulas to the real shapes, in
bfloat16.

Bytes are counted as a rank sends them in a ring. For a tensor of n bytes and N ranks, a reduce-scatter or an all-gather
sends n (N - 1) / N bytes, an all-reduce twice as many, and a message to one rank n.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.context_parallel import sent_by_heads, sent_by_ring
from quire.config.engine import EngineConfig
from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MoESpec
from quire.layers.step_inputs import StepSize
from quire.models.registry import spec_of
from quire.models.spec import DecoderSpec
from quire.parallel.mesh import Communicator, Mesh
from quire.planner.exchanges import Axes, Sent, boundary, ends, exchange, expected_exchange, layer
from quire.worker.worker import Worker

__all__ = ["Axes", "Sent", "boundary", "ends", "exchange", "layer"]  # tests import them from here
BYTES = 2  # per element, in bfloat16
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "norm_topk_prob": True,
    },
    "Falcon-7B": {
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "vocab_size": 65024,
        "num_attention_heads": 71,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "bias": False,
        "alibi": False,
    },
}
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "num_hidden_layers": 3,
}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a small model of the same architecture."""
    return {name: SMALL.get(name, value) for name, value in config.items()}


@dataclass(frozen=True)
class Counting(Communicator):
    """Exchanges nothing, and counts the bytes that it would send. Results have the right shapes."""

    counted: Counter[str] = field(default_factory=Counter)

    def _count(self, values: float) -> None:
        if values:
            self.counted.update(calls=1, values=values)  # type: ignore[call-arg]

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count(2 * x.numel() * (self.size - 1) / self.size)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count(x.numel() * (self.size - 1) / self.size)
        start, stop = self.share(len(x))
        return x[start:stop]

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        self._count(total * len(x) * (self.size - 1) / self.size)
        return x.new_zeros(len(x), total)

    def all_gather_rows(self, x: Tensor, total: int) -> Tensor:
        self._count(total * x.shape[1] * (self.size - 1) / self.size)
        return x.new_zeros(total, x.shape[1])

    def minimum(self, value: int) -> int:
        return value

    def total(self, value: int) -> int:
        return value

    def send(self, x: Tensor, to: int) -> Any:
        self._count(x.numel())

    def receive(self, x: Tensor, source: int) -> None:
        x.zero_()

    @property
    def sent(self) -> Sent:
        return Sent(self.counted["calls"], self.counted["values"])


def count(config: Mapping[str, Any], axes: Axes, tokens: int, stage: int = 0) -> tuple[Sent, Sent]:
    """Count the bytes in a whole model. Returns (bytes that a rank sends to its tensor group in a step, to other
    stages).

    tokens: the tokens of the step, which are all sampled; a multiple of axes.tp.
    """
    groups = Counting(0, axes.tp), Counting(stage, axes.pp)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = EngineConfig.create(
            model=folder,
            load_format="dummy",
            device="cpu",
            max_num_seqs=tokens,
            num_gpu_blocks_override=tokens + 1,
            tensor_parallel_size=axes.tp,
            enable_sequence_parallel=axes.divides_tokens,
            enforce_eager=True,
            pipeline_parallel_size=axes.pp,
        )
        mesh = Mesh(1, size=axes.tp * axes.pp, tp=groups[0], pp=groups[1])
        runner = Worker(options, Path(folder), 64, mesh).runner
    for group in groups:
        group.counted.clear()
    with torch.inference_mode():
        hidden = runner.forward(runner.staging.stage_dummy(StepSize(tokens, tokens, 1)))
        if runner.model.stage.has_head:
            runner.model.logits(hidden)
    return groups[0].sent, groups[1].sent


def of_experts(spec: DecoderSpec, replicas: int) -> list[str]:
    mlp = spec.mlps[0]
    if not isinstance(mlp, MoESpec):
        return []
    sent = expected_exchange(mlp, spec.hidden_size, replicas)
    whole = sent * sum(isinstance(m, MoESpec) for m in spec.mlps)
    at = sentence(sent, "a layer")
    return [f"| ep, {replicas} replicas | {at} | {whole.calls} | {whole.values * BYTES / 1024:,.0f} | {GSHARD} |"]


def of_contexts(spec: DecoderSpec, ranks: int) -> list[str]:
    """Return the bytes that prefill context parallelism sends per token of a step. Each of the `ranks` ranks computes
    an equal share of the tokens. The formulas are in benchmarks/context_parallel.py; tests compare them with the
    implementation."""
    mixer = spec.mixers[0]
    assert isinstance(mixer, AttentionSpec)
    heads = mixer.num_heads
    kv_heads = mixer.num_kv_heads
    dim = mixer.head_dim
    ways = [("stripes", 2 * (ranks - 1), sent_by_ring(1, ranks, ranks, heads, dim, dim), RING)]
    if kv_heads % ranks == 0:
        ways.append(("heads", 3, sent_by_heads(1, ranks, ranks, heads, kv_heads, dim), ULYSSES))
    table = []
    for way, calls, size, literature in ways:
        sent = Sent(calls, size / ranks / BYTES)
        whole = sent * spec.num_layers
        numbers = f"{sentence(sent, 'a layer')} | {whole.calls} | {whole.values * BYTES / 1024:,.0f}"
        table.append(f"| pcp, {ranks} ranks, {way} | {numbers} | {literature} |")
    return table


def sentence(sent: Sent, where: str) -> str:
    return f"{sent.calls} {where} | {sent.values * BYTES:,.0f}"


def rows(spec: DecoderSpec, ranks: int) -> list[str]:
    """Return the rows of a middle rank: its layers, and the boundary after them."""
    table = []
    for name, axes, literature in (
        (f"tp, {ranks} ranks", Axes(ranks), MEGATRON_PARALLEL if spec.residual == "parallel" else MEGATRON),
        (f"tp, {ranks} ranks, tokens divided", Axes(ranks, True), SEQUENCE),
        (f"pp, {ranks} stages", Axes(pp=ranks), GPIPE),
        (f"pp, {ranks} stages of {ranks} ranks", Axes(ranks, pp=ranks), SCATTER),
        (f"pp, {ranks} stages of {ranks} ranks, tokens divided", Axes(ranks, True, ranks), "nothing to gather"),
    ):
        of_layer = layer(spec, 0, axes)
        between = boundary(spec, axes)
        whole = of_layer * (spec.num_layers // axes.pp) + between
        at = sentence(between, "a boundary") if axes.pp > 1 else sentence(of_layer, "a layer")
        table.append(f"| {name} | {at} | {whole.calls} | {whole.values * BYTES / 1024:,.0f} | {literature} |")
    return table + OTHERS + of_experts(spec, ranks) + of_contexts(spec, ranks)


MEGATRON = "2 all-reduces in a layer forward ([Megatron-LM](https://arxiv.org/abs/1909.08053))"
MEGATRON_PARALLEL = "1 all-reduce instead of 2 ([Pope et al.](https://arxiv.org/abs/2211.05102))"
SEQUENCE = "as many bytes as all-reduces ([Korthikanti et al.](https://arxiv.org/abs/2205.05198))"
GPIPE = "one activation at a boundary ([GPipe](https://arxiv.org/abs/1811.06965))"
SCATTER = "1/tp on each link, then an all-gather ([Narayanan et al.](https://arxiv.org/abs/2104.04473))"
GSHARD = (
    "2 all-to-alls in a layer ([GShard](https://arxiv.org/abs/2006.16668)); a token once to each rank "
    "([DeepSeek-V3](https://arxiv.org/abs/2412.19437))"
)
RING = "queries and results go around ([Yang et al.](https://arxiv.org/abs/2411.01783), pass-Q)"
ULYSSES = "all-to-alls of heads, 1/N of the bytes ([Ulysses](https://arxiv.org/abs/2309.14509))"
OTHERS = ["| dp, without experts | 0 | 0 | 0 | 0 | replicas share no request |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a tensor group, and stages of a pipeline")
    options = parser.parse_args()
    for name, config in MODELS.items():
        spec = spec_of(config)
        further = ends(spec, Axes(options.ranks))
        print(f"{name}: hidden size {spec.hidden_size:,}, {spec.num_layers} layers\n")
        print("| axis | calls | bytes of a token there | calls in a step | KiB of a token in a step | literature |")
        print("|---|---|---|---|---|---|", *rows(spec, options.ranks), sep="\n")
        print(
            f"\nAt the ends of the model, {further.calls} more calls of tp with {further.values * BYTES:,.0f} bytes: "
            "the sum of the embeddings of all tokens, and the logits of those that are sampled from.\n"
        )


if __name__ == "__main__":
    main()
