"""Steps that are padded and repeated from what was captured, as on a GPU, say what other steps say.

The device is a late one, which repeats the operations that were captured: with the memory that they were captured with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import quire.attention.selection
from quire.config.kernels import KernelConfig
from quire.layers.step_inputs import StepSize
from quire.messages.sampling_params import SamplingParams
from quire.worker.graphs import CapturedForward, graph_sizes
from support.checkpoints import Checkpoints
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.late_device import LateDevice, run_late
from support.reference import References
from support.triton_kernels import INSTALLED

pytestmark = pytest.mark.texts

VARIANTS = ["llama", "qwen3-mixed-windows-biases", "gemma2", "mixtral", "gpt2"]
TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40, "max_num_seqs": 12}


def counted(counter: Counter[str], call: Callable[[], None]) -> None:
    counter["count"] += 1
    call()


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_padded_steps_say_what_other_steps_say(checkpoints: Checkpoints, references: References, variant, options):
    llm = make_llm(checkpoints.path(variant), **options)
    device = run_late(llm, captured=True)
    forward, replays = device.runner.forward, Counter[str]()
    assert isinstance(forward, CapturedForward)
    device.runner.device.waits = 0
    for graph in forward._graphs.values():
        graph.replay = partial(counted, replays, graph.replay)
    expected = references.continuations(variant)[:16]
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected]), strict=True):
        continuation.check(output.outputs[0].token_ids)
    assert device.most_in_flight == 2
    if (
        llm.config.scheduler.speculation is None
    ):  # else there are fewer steps, and drafters upload more than once in each
        assert replays["count"] > 20
        assert not device.runner.device.waits


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
def test_padded_steps_of_the_attention_for_gpus(checkpoints, references, monkeypatch, interpreter):
    from quire.attention.triton.attention_backend import TritonAttention

    monkeypatch.setattr(quire.attention.selection, "BACKENDS", [TritonAttention])
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
    llm = make_llm(checkpoints.path("qwen3"), backend="triton", **options)
    run_late(llm, captured=True)
    expected = references.continuations("qwen3")[:5]
    params = GREEDY.clone(max_tokens=5)
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected], params), strict=True):
        said = min(5, continuation.certain)
        assert output.outputs[0].token_ids[:said] == continuation.token_ids[:said]


def test_prompt_logprobs_and_draws_are_the_same(checkpoints, references):
    prompts = [c.prompt for c in references.continuations("llama")[:12]]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=9 + i, logprobs=2, prompt_logprobs=i % 3)
        for i in range(len(prompts))
    ]
    plain = make_llm(checkpoints.path("llama"))
    late = make_llm(checkpoints.path("llama"), max_num_seqs=12, max_num_batched_tokens=64)
    run_late(late, captured=True)
    for a, b in zip(generate(plain, prompts, params), generate(late, prompts, params), strict=True):
        assert tokens_of([a]) == tokens_of([b])
        for theirs, ours in ((a.prompt_logprobs, b.prompt_logprobs), (a.outputs[0].logprobs, b.outputs[0].logprobs)):
            assert [None if at is None else at.keys() for at in theirs] == [
                None if at is None else at.keys() for at in ours
            ]


def test_what_cannot_be_captured_runs_all_the_same(checkpoints, references, monkeypatch, caplog):
    llm = make_llm(checkpoints.path("llama"), max_num_seqs=4, max_num_batched_tokens=64)

    def capture(self: Any, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr(LateDevice, "capture", capture)
    device = run_late(llm, captured=True)
    assert not device.runner.forward.num_graphs
    assert "Steps run without CUDA graphs: operation not permitted" in caplog.text
    assert "in capture\n" in caplog.text  # the traceback
    with pytest.raises(RuntimeError, match="the CUDA graphs cannot be captured: operation not permitted"):
        run_late(make_llm(checkpoints.path("llama"), require_cuda_graphs=True), captured=True)
    continuation = references.continuations("llama")[0]
    continuation.check(generate(llm, [continuation.prompt])[0].outputs[0].token_ids)


def test_the_late_device_finds_out_a_host_that_waits(checkpoints, monkeypatch):
    llm = make_llm(checkpoints.path("llama"))
    device = run_late(llm)
    real = device.runner.sampler.argmax

    def waits(logits: torch.Tensor) -> torch.Tensor:
        (logits > 0).nonzero()
        return real(logits)

    monkeypatch.setattr(device.runner.sampler, "argmax", waits)
    with pytest.raises(RuntimeError, match="the host waits for the device"):
        generate(llm, [[5, 6, 7]])


def test_sizes_are_kept_by_requests_and_tokens_for_each(checkpoints):
    device = run_late(make_llm(checkpoints.path("llama"), max_num_seqs=6))
    runner = device.runner
    forward = CapturedForward(runner.model, runner.forward.backends, runner.staging, 64, most_per_request=3)
    assert forward.fit(StepSize(3, 3, 1)) == StepSize(4, 4, 1)
    assert forward.fit(StepSize(9, 3, 3)) == StepSize(12, 4, 3)
    assert forward.fit(StepSize(6, 6)) == StepSize(32, 6)
    assert forward.fit(StepSize(10, 5, 2)) == StepSize(32, 6), (
        "there is no graph for more than four requests of two tokens each"
    )
    assert forward.fit(StepSize(65, 2)) == StepSize(65, 2)


def test_graphs_for_which_there_is_no_memory_are_left_out_the_largest_first(
    checkpoints, references, monkeypatch, caplog
):
    """There is memory for eight graphs."""
    real = LateDevice.capture
    captured = Counter[str]()

    def capture(self: Any, run: Any) -> Any:
        captured["count"] += 1
        if captured["count"] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, run)

    monkeypatch.setattr(LateDevice, "capture", capture)
    monkeypatch.setattr(LateDevice, "forget_graphs", lambda self: captured.clear())
    device = run_late(make_llm(checkpoints.path("llama"), max_num_seqs=32, max_num_batched_tokens=512), captured=True)
    forward = device.runner.forward
    assert 4 <= forward.num_graphs <= 8
    assert "CUDA graphs do not fit into the GPU's memory" in caplog.text
    assert forward.fit(StepSize(1, 1, 1)) == StepSize(1, 1, 1)
    assert forward.fit(StepSize(400, 3)) == StepSize(400, 3), "it runs eagerly"
    assert {size for sizes in forward._sizes.values() for size in sizes} == {*forward._graphs}


def test_options_choose_the_sizes():
    def tokens(**options):
        sizes = graph_sizes(KernelConfig(**options), most_requests=32, most_tokens=512, most_per_request=2)
        return {count: [size.tokens for size in of_count] for count, of_count in sizes.items()}

    assert tokens()[1] == [1, 2, 4, 8, 16, 24, 32]
    assert tokens()[0][-1] == 512
    chosen = tokens(cudagraph_capture_sizes=[4, 1, 100, 1])
    assert chosen == {1: [1, 4], 2: [4], 0: [1, 4, 100]}
    assert tokens(max_cudagraph_capture_size=8) == {1: [1, 2, 4, 8], 2: [2, 4, 8], 0: []}
