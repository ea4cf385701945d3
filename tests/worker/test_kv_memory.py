"""Blocks as bytes: a request goes on from blocks that were copied, or that came from another engine."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import quire.attention.selection
from quire.config.engine import EngineConfig
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.ops.cpu.build import library
from quire.parallel.mesh import Mesh
from quire.worker.kv_memory import KVMemory
from quire.worker.worker import Worker

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = random.Random(0).choices(range(5, 60), k=33)
SAID, MORE = 4, 5  # tokens of output before a request is moved, and after it
MAX_MODEL_LEN, BLOCK = 96, 16
BLOCKS_OF_A_TABLE = MAX_MODEL_LEN // BLOCK
CPU = torch.device("cpu")
Tables = list[list[int]]  # block ids of one request, in each KV group

# Backend, model, and options: grouped queries, KV groups with windows, latents; types and cells.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("cpu", "qwen3", {}),
    ("cpu", "qwen3", {"dtype": "bfloat16"}),
    ("cpu", "qwen3", {"kv_cache_dtype": "int8"}),
    ("cpu", "gemma3", {}),
    ("cpu", "gemma3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    ("cpu", "deepseek_v3", {}),
    ("cpu", "deepseek_v3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    ("reference", "gemma3", {"dtype": "bfloat16"}),
    ("reference", "qwen3", {"kv_cache_dtype": "fp8"}),
    ("reference", "deepseek_v3", {"kv_cache_dtype": "int8"}),
    ("triton", "gemma3", {}),
    ("triton", "qwen3", {"dtype": "bfloat16"}),
    ("triton", "deepseek_v3", {"kv_cache_dtype": "int8"}),
]


class Engine:
    """A worker that is told step by step what to run, and in which blocks."""

    def __init__(self, path: Path, backend: str, options: dict[str, Any]) -> None:
        settings = {
            "dtype": "float32",
            "max_num_seqs": 2,
            "num_gpu_blocks_override": 128,
            "max_model_len": MAX_MODEL_LEN,
        }
        config = EngineConfig.create(model=str(path), attention_backend=backend, **{**settings, **options})
        self.worker = Worker(config, path, MAX_MODEL_LEN, Mesh())
        self.memory = self.worker.kv_memory
        self.num_groups = len(self.worker.kv_cache.specs)
        self._step_ids = itertools.count()

    def tables(self, seed: int) -> Tables:
        """Block ids in random order; two seeds have none in common."""
        count = self.num_groups * BLOCKS_OF_A_TABLE
        ids = random.Random(seed).sample(range(1 + seed * count, 1 + (seed + 1) * count), count)
        return [ids[i : i + BLOCKS_OF_A_TABLE] for i in range(0, count, BLOCKS_OF_A_TABLE)]

    def generate(self, tokens: list[int], num_computed: int, tables: Tables, count: int) -> list[int]:
        """The next tokens of a request, of which `num_computed` tokens have their keys and values in the tables."""
        edits = BlockTableEdits()
        for group, table in enumerate(tables):
            for index, block_id in enumerate(table):
                edits.groups.append(group)
                edits.rows.append(0)
                edits.indices.append(index)
                edits.block_ids.append(block_id)
        new = NewRequest("request", 0, tokens, len(PROMPT), num_computed, GREEDY, 0)
        generated = self._run([new], len(tokens) - num_computed, edits)
        while len(generated) < count:
            generated += self._run([], 1, BlockTableEdits())
        return generated

    def _run(self, new: list[NewRequest], num_tokens: int, edits: BlockTableEdits) -> list[int]:
        step = SchedulerOutput(next(self._step_ids), new, [0], [num_tokens], edits)
        self.worker.runner.submit(step)
        output = self.worker.runner.sample(step.step_id)()
        return output.sampled_token_ids[0]


def flat(tables: Tables) -> list[int]:
    return [block_id for table in tables for block_id in table]


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("backend", "variant", "options"), CASES, ids=str)
def test_a_request_goes_on_from_moved_blocks_with_the_same_tokens(checkpoints, monkeypatch, backend, variant, options):
    if backend == "triton":
        triton = pytest.importorskip("quire.attention.triton.attention_backend")
        monkeypatch.setattr(quire.attention.selection, "BACKENDS", [triton.TritonAttention])
    if backend == "cpu" and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    path = checkpoints.path(variant)
    engine, other = Engine(path, backend, options), Engine(path, backend, options)
    first, copies, received = engine.tables(0), engine.tables(1), other.tables(2)
    uninterrupted = engine.generate(PROMPT, 0, engine.tables(3), SAID + MORE)
    assert len(set(uninterrupted)) > 2, "the model makes sense of its cache"
    said = engine.generate(PROMPT, 0, first, SAID)
    assert said == uninterrupted[:SAID]

    engine.memory.copy_blocks(flat(first), flat(copies))
    data = bytes(engine.memory.read(flat(first)))
    assert len(data) == len(flat(first)) * engine.worker.kv_cache.rank_bytes[0]
    engine.memory.write(flat(first), bytes(len(data)))
    other.memory.write(flat(received), data)

    text = PROMPT + said
    expected = uninterrupted[SAID:]
    assert engine.generate(text, len(text) - 1, copies, MORE) == expected
    assert other.generate(text, len(text) - 1, received, MORE) == expected
    assert engine.generate(text, len(text) - 1, first, MORE) != expected, "the first blocks were overwritten"


def filled_memory(num_blocks: int = 9) -> KVMemory:
    """Each block is full of its own number; the null block is as it was made."""
    memory = KVMemory(num_blocks, 192, CPU)
    for block_id in range(1, num_blocks):
        memory.blocks[block_id] = block_id
    return memory


def numbers(memory: KVMemory) -> list[int]:
    assert all(block.unique().numel() == 1 for block in memory.blocks)
    return memory.blocks[:, 0].tolist()


def test_only_the_targets_of_a_copy_change():
    memory = filled_memory()
    memory.copy_blocks([2, 3, 2], [8, 1, 5])
    assert numbers(memory) == [0, 3, 2, 3, 4, 2, 6, 7, 2]
    memory.copy_blocks([], [])
    assert numbers(memory) == [0, 3, 2, 3, 4, 2, 6, 7, 2]


def test_blocks_change_places_in_one_copy():
    memory = filled_memory()
    memory.copy_blocks([1, 2, 3], [2, 3, 1])
    assert numbers(memory) == [0, 3, 1, 2, 4, 5, 6, 7, 8]


def test_what_is_read_is_a_copy_in_the_order_of_the_block_ids():
    memory = filled_memory()
    data = memory.read([7, 2])
    memory.blocks.fill_(255)
    assert data.shape == (2, 192)
    assert bytes(data) == bytes([7] * 192 + [2] * 192)
    assert memory.read([]).shape == (0, 192)


@pytest.mark.parametrize(
    "form", [bytes, bytearray, memoryview, lambda array: array], ids=["bytes", "bytearray", "memoryview", "array"]
)
def test_blocks_are_written_from_anything_that_holds_bytes(form):
    memory, data = filled_memory(), filled_memory().read([4, 6])
    memory.write([1, 8], form(data))
    data.fill(0)
    assert numbers(memory) == [0, 4, 2, 3, 4, 5, 6, 7, 6]
    memory.write([], b"")


def test_data_of_another_size_is_refused():
    memory = filled_memory()
    with pytest.raises(ValueError, match="2 blocks of 192 bytes cannot be filled with 383 bytes"):
        memory.write([1, 2], bytes(383))
    assert numbers(memory) == list(range(9))


@pytest.mark.parametrize("block_id", [0, -1, 9])
def test_the_null_block_and_blocks_that_do_not_exist_are_refused(block_id):
    memory = filled_memory()
    for call in (
        lambda: memory.copy_blocks([block_id], [1]),
        lambda: memory.copy_blocks([1], [block_id]),
        lambda: memory.read([1, block_id]),
        lambda: memory.write([block_id], bytes(192)),
    ):
        with pytest.raises(ValueError, match=f"block {block_id} is not one of the blocks 1 to 8"):
            call()
    assert numbers(memory) == list(range(9))


def test_the_null_block_is_zero_whatever_the_memory_held_before():
    for _ in range(8):
        used = torch.full((9, 192), 255, dtype=torch.uint8)
        del used  # an allocator gives the same memory again, as a rule
        assert KVMemory(9, 192, CPU).blocks[0].eq(0).all()


def test_memory_that_was_never_touched_costs_nothing():
    process = psutil.Process()
    before = process.memory_info().rss
    memory = KVMemory(1 << 14, 1 << 18, CPU)  # 4 GiB
    assert memory.blocks[0].eq(0).all()
    assert process.memory_info().rss - before < 64 << 20
