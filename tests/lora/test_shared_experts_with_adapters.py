"""Replicas that share experts: requests with adapters of different replicas say what one engine says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import ConfigError, EngineConfig
from quire.messages.engine import EngineCoreRequest
from quire.messages.lora import Adapter
from support.adapters import NUM_TOKENS, adapted_tokens, modules_of, write_adapter
from support.engines import GREEDY, MAX_MODEL_LEN, make_llm
from support.shared_experts import SharedExperts

pytestmark = pytest.mark.texts

PROMPTS = [[5, 7, 9], [11, 3], [8] * 40, [2, 4, 6, 8], [60 - i for i in range(30)], [13]]


@pytest.fixture(scope="module")
def adapters(checkpoints, tmp_path_factory) -> list[Path]:
    """Adapters of all modules, experts and routers included."""
    llm = make_llm(checkpoints.path("qwen3_moe"), enable_lora=True)
    modules = modules_of(llm, embedding=False)
    assert any("experts.3." in module for module in modules)
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"adapter-{i}", modules, rank=4, seed=i) for i in range(3)]


def request(number: int, adapter: Path | None) -> EngineCoreRequest:
    named = None if adapter is None else Adapter(adapter.name, adapter.name, str(adapter))
    name, prompt = str(number), PROMPTS[number]
    return EngineCoreRequest(name, prompt, GREEDY, seed=0, max_tokens=NUM_TOKENS, adapter=named)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"all2all_backend": "allgather_reducescatter"},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 3, "max_loras": 1},
        {"prefill_context_parallel_size": 2},
    ],
)
def test_tokens_meet_the_adapters_of_their_requests_at_the_experts_of_other_replicas(checkpoints, adapters, more):
    """Each replica has two slots, and uses them for different adapters. Slots are reused in a second round."""
    path = checkpoints.path("qwen3_moe")
    first, second, third = adapters
    rounds: list[list[Any]] = [[first, None, second, second, None, first], [third, third, first, None, third, second]]
    llm = make_llm(path, enable_lora=True, max_loras=3)
    expected = [adapted_tokens(llm, PROMPTS, of_round) for of_round in rounds]
    assert expected[0] != expected[1]
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, "enable_expert_parallel": True}
    lora = {"enable_lora": True, "max_loras": 2, "data_parallel_size": 2}
    config = EngineConfig.create(model=str(path), **{**options, **lora, **more})
    replicas = SharedExperts(config, path)
    count = len(replicas.cores)
    for of_round, wanted in zip(rounds, expected, strict=True):
        asked = [request(number, adapter) for number, adapter in enumerate(of_round)]
        made = replicas.run([asked[core::count] for core in range(count)])
        assert {name: tokens for of_core in made for name, tokens in of_core.items()} == {
            str(number): tokens for number, tokens in enumerate(wanted)
        }


@pytest.mark.parametrize("backend", ["deepep_low_latency", "symmetric_memory"])
def test_kernels_that_send_no_adapters_are_refused(backend):
    options = {"enable_lora": True, "enable_expert_parallel": True, "data_parallel_size": 2}
    with pytest.raises(ConfigError, match="these kernels send no adapters with the tokens"):
        EngineConfig.create(all2all_backend=backend, dtype="bfloat16", **options)
