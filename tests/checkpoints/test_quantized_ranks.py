"""Ranks compute with the weights that a quantized checkpoint means, also where they divide groups and blocks of inputs.

The ranks are threads. What one rank says of each format is in test_quantized_checkpoints.py and test_gguf.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.checkpoints.formats.integers import GPTQ
from quire.layers.build import Builder
from quire.layers.linear import DenseWeight, inner_share
from quire.ops import Kernels, Target
from quire.parallel.mesh import Communicator
from support.checkpoints import write_checkpoint
from support.engines import (
    GREEDY,
    generate,
    logits_of_ranks,
    make_llm,
    runners_of_ranks,
    teacher_forced_logits,
    tokens_of,
)
from support.gguf_files import FURTHER_TYPES, TABLE_TYPES, TYPES, WIDE, write_gguf
from support.mxfp4 import write_mxfp4
from support.quantized import FORMATS, write_quantized
from support.reference import TIE, load, logits, prompts

pytestmark = pytest.mark.texts

TEXT = prompts(300, 9)[8][:60]


def check(made: Tensor, wanted: Tensor) -> None:
    """Logits are equal up to rounding, and greedy tokens are the same."""
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=2e-4)
    best = wanted.topk(2).values
    certain = best[:, 0] - best[:, 1] > TIE
    assert torch.equal(made.argmax(-1)[certain], wanted.argmax(-1)[certain])


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}
    return write_checkpoint(tmp_path_factory.mktemp("six_heads"), "llama", sizes)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_compute_with_exactly_the_weights_that_a_checkpoint_means(six_heads, tmp_path, name):
    """Two ranks have three heads of 16 inputs each: parts of groups of 32."""
    quantized, dense = write_quantized(six_heads, tmp_path, FORMATS[name])
    wanted = logits(load(dense), TEXT)
    for ranks in (2, 3):
        check(logits_of_ranks(runners_of_ranks(quantized, ranks), TEXT), wanted)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed-4-bits-act-order", "float8-block"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_so_do_ranks_that_share_experts(tmp_path, name, family):
    sizes = {"head_dim": 32, "num_key_value_heads": 1}  # all ranks keep the same KV head
    sizes |= {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = write_checkpoint(tmp_path / "source", family, sizes)
    quantized, dense = write_quantized(source, tmp_path, FORMATS[name])
    wanted = logits(load(dense), TEXT)
    for ranks in (2, 3):
        check(logits_of_ranks(runners_of_ranks(quantized, ranks), TEXT), wanted)


IN_EACH_RUN = ("Q4_K", "Q8_0")  # blocks of 256 and of 32


@pytest.mark.sampled(27)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in IN_EACH_RUN else pytest.mark.sampled(8))
        for kind in [*TYPES, *TABLE_TYPES, *FURTHER_TYPES]
    ],
)
def test_ranks_divide_the_blocks_of_gguf_files(tmp_path, kind):
    """256 inputs of four heads, in blocks of 32 or one of 256; and 512 of the MLP."""
    path = write_gguf(write_checkpoint(tmp_path / "source", "llama", WIDE), tmp_path / "model.gguf", kind)
    wanted = teacher_forced_logits(make_llm(path), TEXT)
    for ranks in (2, 3):
        check(logits_of_ranks(runners_of_ranks(path, ranks), TEXT), wanted)


def test_experts_in_mxfp4(tmp_path):
    path, _ = write_mxfp4(tmp_path)
    wanted = teacher_forced_logits(make_llm(path), TEXT)
    for ranks in (2, 3):
        check(logits_of_ranks(runners_of_ranks(path, ranks), TEXT), wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("option", "ranks"), [("int8", 2), ("int8", 3), ("int4", 2), ("int4", 3)])
def test_weights_that_are_quantized_at_load_stay_near(tmp_path, option, ranks):
    """With two ranks, int4 has the same groups of 128 inputs as with one. A row of int8 has a scale on each rank."""
    path = write_checkpoint(tmp_path, "llama", WIDE)
    exact = teacher_forced_logits(make_llm(path), TEXT)
    one = teacher_forced_logits(make_llm(path, quantization=option), TEXT)
    made = logits_of_ranks(runners_of_ranks(path, ranks, quantization=option), TEXT)
    if (option, ranks) == ("int4", 2):
        check(made, one)
    errors = [(some - exact).abs().mean() for some in (made, one)]
    assert errors[0] < 1.3 * errors[1]


def shares(size: int, ranks: int, method: object) -> list[tuple[int, int]]:
    kernels = Kernels(Target(torch.device("cpu"), torch.float32))
    builders = [Builder(kernels, Communicator(rank, ranks), lambda name: method) for rank in range(ranks)]
    return [inner_share(builder, size, "down") for builder in builders]


def test_ranks_get_whole_groups_of_the_inner_elements_of_an_mlp():
    llama_2 = shares(11008, 4, GPTQ(4, 128, 1))  # 86 groups
    assert [(stop - start) / 128 for start, stop in llama_2] == [21, 22, 21, 22]
    assert [start for start, _ in llama_2[1:]] == [stop for _, stop in llama_2[:-1]]
    assert shares(29568, 2, GPTQ(4, 128, 1)) == [(0, 115 * 128), (115 * 128, 29568)]  # of Qwen2-72B, 231 groups
    assert (
        shares(11008, 4, DenseWeight)
        == shares(11008, 4, GPTQ(4, -1, 1))
        == [(2752 * i, 2752 * i + 2752) for i in range(4)]
    )
    assert shares(96, 4, GPTQ(4, 32, 1)) == [(24 * i, 24 * i + 24) for i in range(4)]  # fewer groups than ranks


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gguf", pytest.param("gptq-act-order", marks=pytest.mark.nightly)])
def test_two_processes(tmp_path: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "source", "llama", WIDE)
    if name == "gguf":
        path = write_gguf(source, tmp_path / "model.gguf", "Q4_K")
    else:
        path, _ = write_quantized(source, tmp_path, FORMATS[name])
    said = []
    for ranks in (1, 2):
        llm = make_llm(path, tensor_parallel_size=ranks)
        said.append(tokens_of(generate(llm, [TEXT, TEXT[:9]], GREEDY.clone(max_tokens=16))))
        llm.shutdown()
    assert said[0] == said[1]
