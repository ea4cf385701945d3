"""Measures how close the step times of `quire plan --fit` are to measured ones, for other prompts, batches and mixes.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_validation [--models smollm2-135m ...] [--seconds 60]

Steps are fitted in the same way as by `quire plan measure`. Then workloads with other numbers of requests and other
lengths run in the same engine. Both are repeated, interleaved, so that a slow period of the machine affects both. Times
are processor seconds of one thread, since other programs run on the machine. "Simulated" is the whole workload in the
planner's simulation, whose own scheduler chooses the steps. "Neighbours" is the difference between consecutive steps
with the same number of tokens, which shows the noise of the measurement.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import SHAPES, write_config
from quire.checkpoints.hub import bundled_model
from quire.cli.models.facts import facts_of
from quire.engine.llm import LLM
from quire.planner.devices import DEVICES
from quire.planner.fitted import VERSION, Fit, Fitted, Sample, shape_of
from quire.planner.layout import Layout
from quire.planner.measure import StepClock, machine_name, measure
from quire.planner.memory import kv_groups
from quire.planner.roofline import RooflineTimes
from quire.planner.simulate import Replica, simulate
from quire.planner.traffic import Arrival, Traffic

ROUNDS = 3
GOAL = 0.10
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100_000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {  # config and options
    "bundled": (None, {}),
    "smollm2-135m": (_SMOLLM2, {}),
    "smollm2-135m, int8": (_SMOLLM2, {"quantization": "int8"}),
    "qwen3-0.6b": (SHAPES["qwen3-0.6b"], {}),
}
OPTIONS = {"max_model_len": 1536, "max_num_seqs": 32, "enable_prefix_caching": False, "async_scheduling": False}
WORKLOADS = {  # requests, prompt tokens, output tokens; different from those in quire/planner/measure.py
    "3 streams": (3, (100, 300), (30, 60)),
    "11 requests": (11, (30, 700), (10, 60)),
    "27 requests": (27, (20, 400), (10, 50)),
    "5 long prompts": (5, (900, 1300), (8, 24)),
}


@dataclass
class Checked:
    """The measured steps of a workload, the seconds of each run of the whole workload, and its requests."""

    samples: list[Sample]
    seconds: list[float]
    requests: list[list[tuple[int, int]]]


def run(clock: StepClock, name: str, rng: random.Random) -> tuple[list[Sample], list[tuple[int, int]]]:
    count, prompts, outputs = WORKLOADS[name]
    requests = [(rng.randint(*prompts), rng.randint(*outputs)) for _ in range(count)]
    for prompt, output in requests:
        clock.add(rng, prompt, output)
    return list(clock.steps()), requests


def check(model: str, seconds: float) -> None:
    config, options = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        path = bundled_model() if config is None else write_config(Path(folder) / "model", config)
        llm = LLM(str(path), load_format="auto" if config is None else "dummy", **OPTIONS, **options)
        footprint = facts_of(path).footprint
    assert footprint is not None
    times = RooflineTimes(footprint, Layout(), DEVICES["H100"])
    rng = random.Random(1)
    samples = list[Sample]()
    checked = {name: Checked([], [], []) for name in WORKLOADS}
    for number in range(ROUNDS):
        samples += measure(llm, times.windows, seconds / ROUNDS, time.process_time, seed=number)
        clock = StepClock(llm, times.windows, time.process_time)
        for name, of_workload in checked.items():
            steps, requests = run(clock, name, rng)
            of_workload.samples += steps
            of_workload.seconds.append(sum(step.seconds for step in steps))
            of_workload.requests.append(requests)
        clock.close()
    limits = llm.core.scheduler.limits
    kv = llm.core.scheduler.kv
    fit = Fit(
        VERSION,
        model,
        machine_name(),
        shape_of(footprint),
        options.get("quantization"),
        times.windows,
        times.entries,
        times.score_operations,
        kv.pool.num_usable,
        kv.block_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        samples,
    )
    llm.shutdown()
    fitted = Fitted(fit)
    replica = Replica(limits, fit.blocks, kv_groups(footprint, limits.max_model_len), fit.block_size)
    for name, of_workload in checked.items():
        predicted = np.array([fitted.seconds(sample.work) for sample in of_workload.samples])
        measured = np.array([sample.seconds for sample in of_workload.samples])
        errors = np.abs(predicted / measured - 1)
        simulated = [
            simulate(Traffic([Arrival(0.0, *lengths) for lengths in requests]), replica, fitted).seconds
            for requests in of_workload.requests
        ]
        pairs = zip(of_workload.samples, of_workload.samples[1:], strict=False)
        equal = [a.seconds / b.seconds - 1 for a, b in pairs if a.work.tokens == b.work.tokens]
        total = predicted.sum() / measured.sum() - 1
        whole = sum(simulated) / sum(of_workload.seconds) - 1
        cells = [model, name, f"{len(measured)}", f"{np.median(measured) * 1e3:.1f}", f"{np.median(errors):.1%}"]
        cells += [f"{np.mean(errors <= GOAL):.0%}", f"{np.median(np.abs(equal)):.1%}", f"{total:+.1%}", f"{whole:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring the steps for the fit")
    arguments = parser.parse_args()
    print(f"{machine_name()}, one thread, processor seconds\n")
    columns = ["model", "workload", "steps", "ms a step, median", "error of a step, median", "within 10 %"]
    columns += ["neighbours", "sum of all steps", "simulated"]
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        check(model, arguments.seconds)


if __name__ == "__main__":
    main()
