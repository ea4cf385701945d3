"""What the log says of a model when it is loaded, and of the server when it is ready."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.models.decoder import Decoder
from quire.models.load import load_model
from quire.parallel.mesh import Mesh
from quire.worker.assembly.loading import count_text
from quire.worker.memory import weights_in_memory
from support.checkpoints import FAMILIES, write_checkpoint
from support.gguf_files import write_gguf
from support.quantized import FORMATS, write_quantized
from support.reference import load
from support.server_process import Server

SOME = "llama gpt2 gemma3_text mixtral gpt_oss deepseek_v2".split()


def decoder(path: Path, **options: str) -> Decoder:
    """A model without a KV cache."""
    config = EngineConfig.create(dtype="float32", **options)
    return load_model(path, config, 128, torch.device("cpu"), Mesh(), show_progress=False).model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", [family for family in SOME if family in FAMILIES])
def test_parameters_are_counted_as_transformers_counts_them(checkpoints, family):
    path = checkpoints.path(FAMILIES[family][0])
    assert decoder(path).num_parameters == load(path).num_parameters()


@pytest.mark.parametrize("name", ["gptq", "awq", "int8-asymmetric"])
def test_codes_and_scales_of_a_quantized_checkpoint_count_as_what_they_stand_for(checkpoints, tmp_path: Path, name):
    quantized, dense = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS[name])
    assert decoder(quantized).num_parameters == load(dense).num_parameters()


def test_so_do_those_of_a_gguf_file_and_of_weights_that_are_quantized_when_they_are_loaded(tmp_path: Path):
    path = write_checkpoint(tmp_path / "llama")
    file = write_gguf(path, tmp_path / "model.gguf", "Q8_0")
    expected = load(path).num_parameters()
    assert decoder(file).num_parameters == expected
    small = decoder(path, quantization="int8")
    assert small.num_parameters == expected
    assert weights_in_memory(small) < 0.6 * weights_in_memory(decoder(path))


def test_memory_is_that_of_the_weights_and_little_more(tmp_path: Path):
    model = decoder(write_checkpoint(tmp_path / "llama"))
    weights = model.num_parameters * torch.float32.itemsize
    assert weights <= weights_in_memory(model) < 1.4 * weights  # panels are padded; there are tables of rotations


def test_small_weights_do_not_count_the_large_storage_in_which_they_lie(tmp_path: Path):
    wide = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = write_checkpoint(tmp_path / "llama", config=wide)
    model = decoder(path, quantization="int8")
    assert model.num_parameters < weights_in_memory(model) < 2 * model.num_parameters


@pytest.mark.parametrize(
    ("number", "text"), [(4_490_000, "4.49 M"), (134_515_008, "135 M"), (7.25e9, "7.25 B"), (9, "9")]
)
def test_a_count_is_written_for_people(number, text):
    assert count_text(int(number)) == text


@pytest.mark.slow
def test_the_log_of_a_start_names_model_size_context_cache_and_url(checkpoints):
    path = str(checkpoints.path("llama"))
    with Server(path, "--max-model-len", "128", "--num-gpu-blocks-override", "81", "--dtype", "float32") as server:
        size = r"[\d.,]+( M)? parameters, float32, [\d.]+ GiB in memory"
        assert re.search(rf"Model {path} loaded in [\d.]+ s: {size}, attention backend", server.log)
        cache = (
            r"KV cache: [\d.]+ GiB, 81 blocks of 16 tokens, room for 1,280 tokens: 10.0 requests of the full 128 tokens"
        )
        assert re.search(cache + re.escape(" (100 % of that memory is needed)"), server.log)
        assert f"Serving at {server.url}: model {path}, API {server.url}/v1, " in server.log
