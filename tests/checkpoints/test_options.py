"""Options of LLM(...) that are unknown, of the wrong kind, or ask for more than there is: the error names them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import psutil
import pytest

from quire.config.declaration import parse_size
from quire.config.engine import ConfigError, EngineConfig
from support.checkpoints import MAX_POSITIONS, Checkpoints
from support.engines import GREEDY, generate, make_llm, tokens_of


@pytest.fixture
def path(checkpoints: Checkpoints):
    return checkpoints.path("llama")


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("max_modle_len", "max_model_len"), ("block_sise", "block_size"), ("tensor_parallel", "tensor_parallel_size")],
)
def test_an_unknown_option_is_told_the_nearest_name(path, option, nearest):
    with pytest.raises(ConfigError, match=f"unknown option '{option}'; did you mean '{nearest}'"):
        make_llm(path, **{option: 1})


def test_an_option_like_nothing_is_just_unknown(path):
    with pytest.raises(ConfigError, match=r"unknown option 'xyzzy'$"):
        make_llm(path, xyzzy=1)


@pytest.mark.parametrize("option", ["max_num_partial_prefills", "enable_elastic_ep", "cpu_offload_gb"])
def test_an_option_of_vllm_that_is_not_there_yet_says_so(path, option):
    with pytest.raises(ConfigError, match=f"{option}.* is not supported by Quire yet"):
        make_llm(path, **{option: 0.5})


def test_code_of_a_checkpoint_is_never_run(path, caplog):
    make_llm(path, trust_remote_code=True)
    assert "trust_remote_code has no effect: code in checkpoints is never run" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": "16"}, "block_size must be of type int, got '16'"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": True}, "block_size must be of type int, got True"),
        ({"max_num_seqs": -1}, "max_num_seqs must be an integer of at least 1, got -1"),
        ({"max_model_len": 1.5}, "max_model_len must be of type int or None, got 1.5"),
        ({"dtype": "int8"}, "dtype must be one of 'auto', 'bfloat16', 'float16', .* got 'int8'"),
        ({"load_format": "zip"}, "load_format must be one of"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of 'fcfs', 'priority', got 'lifo'"),
        ({"generation_config": "mine"}, "generation_config='mine' must be 'auto', 'vllm' or a directory"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override must be an integer of at least 2, got 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"hf_overrides": "x"}, "hf_overrides: 'x' is not valid JSON"),
        ({"hf_overrides": ["x"]}, "hf_overrides must be of type dict"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_an_error_that_names_the_option(path, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(path, **options)


def test_a_length_beyond_the_models_positions_is_refused(path):
    make_llm(path, max_model_len=MAX_POSITIONS)
    with pytest.raises(ConfigError, match=f"max_model_len=257 is more than the {MAX_POSITIONS} positions of the model"):
        make_llm(path, max_model_len=MAX_POSITIONS + 1)


def test_without_a_length_it_is_the_models(path):
    assert make_llm(path, max_model_len=None).max_model_len == MAX_POSITIONS


def test_a_cache_too_small_for_one_request_says_what_to_change(path):
    message = "max_model_len=176 tokens needs 11 KV blocks, but there are 5; lower max_model_len or raise"
    with pytest.raises(ValueError, match=message):
        make_llm(path, num_gpu_blocks_override=6)
    with pytest.raises(ValueError, match="lower max_model_len or raise kv_cache_memory_bytes"):
        make_llm(path, kv_cache_memory_bytes=100_000)
    with pytest.raises(ValueError, match="lower max_model_len or raise kv_cache_memory_bytes"):
        make_llm(path, kv_cache_memory_bytes=1)


def test_a_cache_just_large_enough_serves_the_longest_request(path):
    llm = make_llm(path, num_gpu_blocks_override=12)
    [output] = generate(llm, [[5] * 100], GREEDY.clone(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 76


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_cache_memory_bytes": 2**50}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 2**40}, "num_gpu_blocks_override"),
    ],
)
def test_a_cache_larger_than_memory_says_what_to_lower(path, options, name):
    with pytest.raises(ConfigError, match=rf"{name} asks for a KV cache of [\d.]+ GiB, but only .* free; lower {name}"):
        make_llm(path, **options)


def test_where_hardly_any_memory_is_free_the_error_says_what_to_lower(path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=200_000))
    with pytest.raises(ValueError, match="lower max_model_len"):
        make_llm(path)


def test_a_step_smaller_than_the_batch_is_refused(path):
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)"):
        make_llm(path, max_num_batched_tokens=8, max_num_seqs=9)


def test_a_smaller_step_lowers_the_number_of_requests_that_run_at_once(path):
    assert make_llm(path, max_num_batched_tokens=8, max_num_seqs=None).config.scheduler.max_num_seqs == 8
    assert EngineConfig.create(max_num_batched_tokens=4096).scheduler.max_num_seqs == 256
    assert EngineConfig.create(max_num_seqs=1000).scheduler.tokens_of_a_step(gpu=False) == 1000


def test_pins_of_kernels_and_attention_that_cannot_be_met_are_errors(path):
    with pytest.raises(ValueError, match="no attention_backend 'flash'; there are: cpu, reference"):
        make_llm(path, attention_backend="flash")
    with pytest.raises(ValueError, match=r"attention_backend='cpu' cannot be used: .*multiple of 16, not 8"):
        make_llm(path, block_size=8)
    with pytest.raises(ValueError, match="rms_norm has no implementation 'fast'; it has: reference"):
        make_llm(path, kernels={"rms_norm": "fast"})
    with pytest.raises(ValueError, match="no such op: norm; there are: "):
        make_llm(path, kernels={"norm": "reference"})


def test_without_a_pin_a_backend_that_applies_is_taken(path):
    expected = tokens_of(generate(make_llm(path), ["a"]))
    assert tokens_of(generate(make_llm(path, attention_backend=None, block_size=8), ["a"])) == expected


def test_a_config_holds_the_defaults_of_what_was_not_said():
    config = EngineConfig.create(block_size=32)
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.model.model) == (32, 256, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2k", 2000), ("2K", 2048), ("1.5G", 3 * 2**29), ("1g", 10**9), (" 3M ", 3 * 2**20)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "4GB", "-1", "1e9", "four"])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        parse_size(text)
