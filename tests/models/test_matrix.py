"""Variants x ways x kernels: however the work is cut up or divided among ranks, the tokens are those of transformers.

A run goes one way with each family, by --sample-seed: it draws a variant and a way, and all ways come equally often.
`-m nightly` runs all other cases. The ranks are threads; the tests of each kind of parallelism start some processes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from support.checkpoints import ALL_VARIANTS, FAMILIES
from support.divisions import DIVISIONS, divided, has_divisible_contexts
from support.engines import make_llm
from support.families.experts import EXPERTS
from support.families.mixtures import MIXTURES
from support.families.published import PUBLISHED
from support.families.recent import RECENT_EXPERTS
from support.families.states import STATES
from support.reference import LENGTHS, Continuation
from support.staged_ranks import StagedExecutor
from support.ways import FIRST, WAYS, check

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WITH_EXPERTS = {
    *EXPERTS,
    *RECENT_EXPERTS,
    *MIXTURES,
    "gemma4-experts",
    *(name for name, (_, config, _) in {**PUBLISHED, **STATES}.items() if any(config.get(key) for key in COUNTS)),
}
RANKS: dict[str, dict[str, int | bool]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 3": {"tensor_parallel_size": 3},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 2, tp 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "tp 2, sequence parallel": {"tensor_parallel_size": 2, "enable_sequence_parallel": True},
    "tp 2, experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp 3, experts": {"tensor_parallel_size": 3, "enable_expert_parallel": True},
}
CONTEXTS = "contexts"
# All layers read the values of the first, or embeddings of the token ids.
UNDIVIDED = (
    "rwkv7",
    "rwkv7-other-widths",
    "gemma4",
    "gemma4-other-layers",
    "gemma3n",
    "gemma3n-other-sizes",
    "deepseek_v4",
    "iquestloopcoder",
)
NAMES = [*(way.__name__ for way in WAYS), *RANKS, CONTEXTS]
BY_NAME = {way.__name__: way for way in WAYS}


def is_possible(variant: str, way: str) -> bool:
    if way == CONTEXTS:
        return has_divisible_contexts(variant)
    options = RANKS.get(way, {})
    if "pipeline_parallel_size" in options and variant in UNDIVIDED:
        return False
    return "enable_expert_parallel" not in options or variant in WITH_EXPERTS


def kernels_of(variant: str, way: str) -> str:
    """The reference kernels in one case of eight: they are slower."""
    return "cpu" if zlib.crc32(f"{variant} {way}".encode()) % 8 else "reference"


def drawn(seed: int) -> set[tuple[str, str]]:
    """(variant, way): one for each family. Ways that few families can go are dealt first, each to several."""
    draw = random.Random(seed)
    families = draw.sample(sorted(FAMILIES), len(FAMILIES))
    chances = {way: [f for f in families if any(is_possible(v, way) for v in FAMILIES[f])] for way in NAMES}
    chosen: dict[str, str] = {}
    while len(chosen) < len(families):
        for way in sorted(NAMES, key=lambda way: len(chances[way])):
            free = [family for family in chances[way] if family not in chosen]
            if free:
                chosen[free[0]] = way
    return {
        (draw.choice([variant for variant in FAMILIES[family] if is_possible(variant, way)]), way)
        for family, way in chosen.items()
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" not in metafunc.fixturenames:
        return
    now = drawn(metafunc.config.getoption("sample_seed"))
    cases = []
    for variant in ALL_VARIANTS:
        for way in NAMES:
            if is_possible(variant, way):
                # Drafters on the device and divided contexts exclude each other.
                marks = [] if way == CONTEXTS else [pytest.mark.texts]
                if (variant, way) not in now:
                    marks.append(pytest.mark.nightly)
                kernels = kernels_of(variant, way)
                cases.append(pytest.param(variant, way, kernels, marks=marks, id=f"{variant}-{way}-{kernels}"))
    metafunc.parametrize(("variant", "way", "kernels"), cases)


def by_ranks(options: dict[str, int | bool], make: Callable[..., object], expected: list[Continuation]) -> None:
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        check(make(**options), expected[: len(LENGTHS) : 2])


def by_divided_contexts(variant: str, path: Path, kernels: str, expected: list[Continuation]) -> None:
    possible = [name for name, division in DIVISIONS.items() if division.is_possible(path)]
    division = possible[zlib.crc32(variant.encode()) % len(possible)]
    check(divided(path, division, backend=kernels), expected[: len(LENGTHS) : 2])


@pytest.mark.sampled(2)
def test_greedy_tokens_equal_transformers(checkpoints, references, variant, way, kernels):
    path, expected = checkpoints.path(variant), references.continuations(variant)
    if way == CONTEXTS:
        by_divided_contexts(variant, path, kernels, expected)
    elif way in RANKS:
        by_ranks(RANKS[way], partial(make_llm, path, kernels), expected)
    else:
        BY_NAME[way](partial(make_llm, path, kernels), expected[: len(LENGTHS)])


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_each_family_once_and_each_way_several_times(seed):
    sample = drawn(seed)
    assert sorted(ALL_VARIANTS[variant][0] for variant, _ in sample) == sorted(FAMILIES)
    ways = [way for _, way in sample]
    assert min(map(ways.count, NAMES)) >= 3
    assert max(map(ways.count, NAMES)) <= len(FAMILIES) / len(NAMES) + 2
    assert drawn(seed) == sample
    assert sample != drawn(seed + 1)


def test_every_family_goes_every_way_or_cannot():
    impossible = {(variant, way) for variant in FIRST for way in NAMES if not is_possible(variant, way)}
    without_experts = {variant for variant, way in impossible if way == "tp 2, experts"}
    assert {way for _, way in impossible} == {"pp 2", "pp 2, tp 2", "tp 2, experts", "tp 3, experts", CONTEXTS}
    assert {"llama", "gemma3", "rwkv7"} < without_experts
    assert not {"mixtral", "qwen3_moe", "deepseek_v3"} & without_experts
