"""On a CPU, an answer does not depend on what else runs: the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoints.hub import bundled_model
from quire.engine.llm import LLM
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.ops.cpu.build import library
from support.checkpoints import Checkpoints
from support.engines import assert_preempted, generate
from support.threads import thread_count

pytestmark = pytest.mark.texts

Answer = tuple[list[int], list[dict[int, float]]]

TEXT = Path(__file__).parents[1] / "data" / "demo_eval" / "heldout.txt"
MODELS = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
}


def engine(path: Path, **options: Any) -> LLM:
    if library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    return LLM(path, **{"dtype": "bfloat16", "enable_prefix_caching": False, **options})


def seeded(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 5, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2, **options}
    )


def greedy(tokens: int) -> SamplingParams:
    return seeded(tokens, temperature=0.0)


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """The token ids, and at each place the log-probabilities by token id."""
    made = []
    for output in outputs:
        [completion] = output.outputs
        assert completion.logprobs is not None
        places = [{token: entry.logprob for token, entry in place.items()} for place in completion.logprobs]
        made.append((list(completion.token_ids), places))
    return made


def assert_same(got: Answer, wanted: Answer, what: Any) -> None:
    different = [i for i, (a, b) in enumerate(zip(got[0], wanted[0], strict=True)) if a != b]
    assert not different, f"{what}: the tokens part at {different[0]}"
    changed = [i for i, (a, b) in enumerate(zip(got[1], wanted[1], strict=True)) if a != b]
    assert not changed, f"{what}: the log-probabilities part at {changed[0]}"


@pytest.fixture(scope="module")
def text() -> list[int]:
    return engine(bundled_model()).get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))


def check(
    path: Path,
    prompts: list[list[int]],
    tokens: int,
    threads: Sequence[int],
    batch: int,
    preempted: bool = True,
    **options: Any,
) -> None:
    """The first prompt's answers, greedy and seeded, alone and in all sorts of company.

    prompts: at least `batch` - 1. threads: the first count is that of the answers which all others are to equal.
    """
    prompt, ways = prompts[0], [greedy(tokens), seeded(tokens)]
    others = [(p, seeded(3 + 7 * i % tokens, seed=i)) for i, p in enumerate(prompts[1:batch])]
    room = {"max_num_seqs": max(batch, 2) + 1, **options}
    with thread_count(threads[0]):
        llm = engine(path, enforce_eager=True, **room)
        alone = [answers(generate(llm, [prompt], way))[0] for way in ways]
    for count in threads:
        with thread_count(count):
            llm = engine(path, **room)
            both = answers(generate(llm, [prompt, prompt], ways))
            for got, wanted in zip(both, alone, strict=True):
                assert_same(got, wanted, f"{count} threads, two at once")
            crowd = [*others[: batch // 2], (prompt, ways[1]), *others[batch // 2 :]]
            outputs = generate(llm, [p for p, _ in crowd], [way for _, way in crowd])
            assert_same(answers(outputs)[batch // 2], alone[1], f"{count} threads, a batch of {batch}")

            if count > threads[0] or len(threads) == 1:
                cut_up = {"max_num_batched_tokens": max(40, batch + 1), "enable_prefix_caching": True}
                chunks = engine(path, **{**room, **cut_up})
                outputs = generate(chunks, [prompt, *prompts[1:3]], [ways[0], *[seeded(9)] * 2])
                assert_same(answers(outputs)[0], alone[0], f"{count} threads, chunks")
                again = generate(chunks, [*prompts[1:3], prompt], [*[seeded(9)] * 2, ways[1]])
                assert again[-1].num_cached_tokens > 0
                assert_same(answers(again)[-1], alone[1], f"{count} threads, a cached prefix")

                if not preempted:
                    continue
                room_for_one, room_for_prompts = (len(prompt) + tokens) // 16 + 3, 2 * (len(prompt) // 16) + 5
                blocks = max(room_for_one, room_for_prompts)
                crowded = engine(path, **{**room, "num_gpu_blocks_override": blocks})
                got = answers(generate(crowded, [prompt, prompt], ways))
                assert_preempted(crowded)
                assert_same(got[0], alone[0], f"{count} threads, preempted")
                assert_same(got[1], alone[1], f"{count} threads, preempted")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["bfloat16", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("int4", "fp8 cache", "float16"))]
)
def test_an_answer_does_not_depend_on_what_else_runs(model: str, text: list[int]) -> None:
    prompts = [text[700 * i : 700 * i + n] for i, n in enumerate([600, 20, 333, 1, 64, 100, 17, 257])]
    check(bundled_model(), prompts, 40, [1, 3], 8, max_model_len=700, **MODELS[model])


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_long_answers_do_not_depend_on_what_else_runs(model: str, text: list[int]) -> None:
    prompts = [text[40 * i : 40 * i + 3 + 7 * i % 90] for i in range(64)]
    prompts[0] = text[5000:5100]
    check(bundled_model(), prompts, 1500, [1, 2, 4], 64, max_model_len=1616, **MODELS[model])
    if model == "bfloat16":
        check(bundled_model(), prompts, 1500, [3], 12, max_model_len=1616)


# Tiny models: experts of all kinds of routers, windows, latent attention, soft caps, sinks, ALiBi, layer norms.
FEW = ["mistral-window-20", "deepseek_v3"]
MORE = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "gemma2",
    "olmo2",
    "gpt2",
    "falcon-rw",
    "cohere",
    "phi",
]
slow = [pytest.mark.slow, pytest.mark.sampled(9)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", *(pytest.param(name, marks=slow) for name in ("float32", "float16"))])
@pytest.mark.parametrize("variant", [*FEW, *(pytest.param(name, marks=slow) for name in MORE)])
def test_that_holds_for_every_kind_of_layer(variant: str, dtype: str, checkpoints: Checkpoints) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 300, (n,), generator=generator).tolist() for n in (90, 5, 40, 1, 17, 33, 64, 100)]
    has_window = variant in ("mistral-window-20", "gpt_oss", "gemma2")  # which needs few blocks, too few to run out of
    check(checkpoints.path(variant), prompts, 24, [1, 2], 8, not has_window, dtype=dtype, max_model_len=128)
