"""Contexts that are divided among ranks, which are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from quire.attention.headwise import HeadwiseAttention
from quire.attention.stripes import StripedAttention
from quire.config.engine import ConfigError, EngineConfig, ModelConfig
from quire.engine.llm import LLM
from quire.models.description import describe
from quire.parallel.mesh import Communicator
from quire.worker.context import check_context
from support.checkpoints import ALL_VARIANTS
from support.engines import make_llm
from support.families.states import STATES
from support.staged_ranks import StagedExecutor


class Division(NamedTuple):
    """kind: how contexts are divided if that is not to be chosen."""

    pcp: int = 1
    dcp: int = 1
    tp: int = 1
    pp: int = 1
    kind: type | None = None

    @property
    def options(self) -> dict[str, int]:
        return {
            "prefill_context_parallel_size": self.pcp,
            "decode_context_parallel_size": self.dcp,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
        }

    def is_possible(self, path: Path) -> bool:
        spec = describe(path, ModelConfig()).spec
        shapes = [mixer.cache_shape(Communicator(0, self.tp)) for mixer in spec.mixers if mixer is not None]
        try:
            check_context(shapes, EngineConfig.create(**self.options).parallel)
        except ConfigError:
            return False
        by_heads = all(shape.value_dim is None and shape.num_kv_heads % self.pcp == 0 for shape in shapes)
        stages = 1 if spec.per_layer is not None else len(spec.indivisible)
        return stages >= self.pp and (by_heads or self.kind is not HeadwiseAttention)


DIVISIONS = {
    "dcp-2-of-tp-2": Division(dcp=2, tp=2),
    "dcp-2-of-tp-4": Division(dcp=2, tp=4),
    "dcp-4-of-tp-4": Division(dcp=4, tp=4),
    "pcp-2": Division(2),
    "pcp-2-by-heads": Division(2, kind=HeadwiseAttention),
    "pcp-2-over-stripes": Division(2, kind=StripedAttention),
    "pcp-3": Division(3),
    "pcp-2-and-tp-2": Division(2, tp=2),
    "pcp-2-and-dcp-2-of-tp-2": Division(2, 2, 2),
    "pcp-2-and-pp-2": Division(2, pp=2),
}
NOT_DIVISIBLE = ("llama4_text", "step1", "deepseek_v4", "glm5_next_text", "minimax_m3_vl_text", "bailing_moe_linear")


def has_divisible_contexts(variant: str) -> bool:
    return variant not in STATES and ALL_VARIANTS[variant][0] not in NOT_DIVISIBLE


def divided(path: Any, division: str, **options: Any) -> LLM:
    """An engine whose ranks are threads."""
    chosen, kind = DIVISIONS[division], DIVISIONS[division].kind
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        if kind is None:
            return make_llm(path, **chosen.options, **options)
        with mock.patch("quire.worker.assembly.backends.choose_context", return_value=kind):
            return make_llm(path, **chosen.options, **options)
