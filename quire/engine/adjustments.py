"""Lists the options that an engine chooses or changes by itself, and why."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.config.engine import EngineConfig
from quire.engine.machine import Machine
from quire.models.description import ModelDescription
from quire.models.precision import type_name
from quire.ops import Target
from quire.scheduler.limits import SchedulerLimits
from quire.worker.plan import RankPlan


@dataclass(frozen=True)
class Adjustment:
    """An option whose value the engine has chosen or changed. given: the user's value, None if it was not set."""

    option: str
    given: Any
    used: Any
    reason: str

    @property
    def text(self) -> str:
        before = "" if self.given is None else f" instead of {self.given}"
        return f"{self.option} is {self.used}{before}: {self.reason}"


def adjustments_of(
    given: EngineConfig,
    description: ModelDescription,
    limits: SchedulerLimits,
    machine: Machine,
    target: Target,
    threads: int,
) -> Iterator[Adjustment]:
    """given: the options as the user set them."""
    model = given.model
    if model.dtype == "auto":
        reason = "the default on every device"
        if target.narrow is not None:
            reason = f"the default for quantized GGUF files on CPUs, with {type_name(target.narrow)} in the KV cache"
        yield Adjustment("dtype", None, type_name(target.dtype), reason)
    if model.max_model_len == -1:
        yield Adjustment("max_model_len", "auto", limits.max_model_len, "or less, if the KV cache has no room for it")
    elif model.max_model_len is None:
        yield Adjustment("max_model_len", None, limits.max_model_len, "the longest text of the model")
    if machine.is_cpu and given.kernels.threads is None:
        reason = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else machine.reason
        yield Adjustment("threads", None, threads, reason)
    yield from _tokens_of_a_step(given, limits, machine)
    yield from _steps_in_flight(given, limits, machine)
    if not description.spec.is_encoder and not description.spec.cached and given.cache.enable_prefix_caching:
        yield Adjustment("enable_prefix_caching", True, False, "the model has no KV cache")


def _tokens_of_a_step(given: EngineConfig, limits: SchedulerLimits, machine: Machine) -> Iterator[Adjustment]:
    asked = given.scheduler.max_num_batched_tokens
    used = limits.max_num_batched_tokens
    name = "max_num_batched_tokens"
    if limits.whole_prompts and used != asked:
        yield Adjustment(name, asked, used, "the longest prompt is computed in one step")
    elif asked is None:
        reason = machine.reason if machine.is_measurable else f"the default on {'CPUs' if machine.is_cpu else 'GPUs'}"
        yield Adjustment(name, None, used, reason)


def _steps_in_flight(given: EngineConfig, limits: SchedulerLimits, machine: Machine) -> Iterator[Adjustment]:
    speculation = given.scheduler.speculation
    if given.scheduler.async_scheduling is not None:
        return
    if limits.stages > 1:
        reason = "each stage of the pipeline has a step"
    elif speculation is not None and not speculation.on_device:
        reason = "proposers on the host need the results of a step before the next one"
    elif machine.is_cpu:
        reason = "on a CPU, a step is done when it has been submitted"
    else:
        reason = "a GPU computes a step while the next one is scheduled"
    yield Adjustment("async_scheduling", None, limits.depth > 1, reason)


def adjustments_of_rank(config: EngineConfig, rank: RankPlan) -> Iterator[Adjustment]:
    """config: the options as the engine uses them."""
    least = config.cache.block_size
    if rank.shape_block_size != least:
        reason = "each block keeps a recurrent state"
        yield Adjustment("block_size", least, rank.shape_block_size, reason)
    if rank.block_size != rank.shape_block_size:
        reason = "ranks divide the tokens of a block"
        yield Adjustment("block_size", rank.shape_block_size, rank.block_size, reason)
    pinned = config.kernels.attention_backend
    used = sorted({group.backend.name for group in rank.groups})
    if pinned is not None and used and not any(name.startswith(pinned.lower()) for name in used):
        reason = "the nearest backend of Quire that can be used here"
        yield Adjustment("attention_backend", pinned, ", ".join(used), reason)
