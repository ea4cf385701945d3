"""What becomes of vLLM's options: the same on the command line, in a file and in Python."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest
import torch

from quire.cli.flags import engine_options
from quire.cli.main import build_parser, main
from quire.config.engine import GROUPS, OPTIONS, ConfigError, EngineConfig, ServerConfig, canonical_name
from quire.config.vllm import FOREIGN, NO_EFFECT, NOT_SUPPORTED, RETIRED, SHORT_FLAGS


def from_line(line: str) -> EngineConfig:
    return EngineConfig.create(**engine_options(build_parser().parse_args(["serve", *shlex.split(line)])))


def test_no_option_is_declared_and_listed_as_absent():
    declared = {name for config in GROUPS.values() for name in OPTIONS[config]}
    assert not declared & set(FOREIGN)
    assert not set(NO_EFFECT) & set(NOT_SUPPORTED)
    assert set(SHORT_FLAGS.values()) <= set(FOREIGN)
    assert {successor for successor, _ in RETIRED.values()} <= declared | {""}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": True, "tokenizer_mode": "auto", "pipeline_parallel_size": 1, "enable_lora": False},
        {"seed": None, "swap_space": 4, "cpu_offload_gb": 0.0, "disable_log_stats": True, "max_loras": None},
        {"trust_remote_code": True, "compilation_config": 3, "disable_cascade_attn": True, "worker_cls": "auto"},
        {"served_model_name": "small", "structured_outputs_config": {}, "distributed_executor_backend": "mp"},
    ],
)
def test_options_that_ask_for_nothing_are_accepted(options):
    assert EngineConfig.create(**options) == EngineConfig.create()


@pytest.mark.parametrize(
    "line",
    [
        "--enable-chunked-prefill --trust-remote-code some/model",
        "--no-enable-lora --tokenizer-mode auto -pp 1 -dp=1",
        "--enable-lora=false --enable_chunked_prefill true",
        "--swap-space 16 --max-seq-len-to-capture 8192 -O3 --no-monokernel",
        "--disable-log-requests --disable-cascade-attn --use-v2-block-manager --compilation-config 3",
    ],
)
def test_they_are_accepted_on_the_command_line(line):
    assert from_line(line) == EngineConfig.create()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enable_elastic_ep", True, "^enable_elastic_ep is not supported by Quire yet: the number of replicas is"),
        (
            "max_num_partial_prefills",
            2,
            r"^max_num_partial_prefills=2 is not supported by Quire yet \(supported: 1\): ",
        ),
        ("tokenizer_mode", "mistral", '(supported: "auto" and "hf" and "slow")'),
        ("preemption_mode", "swap", r"\(supported: \"recompute\"\)"),
        ("max_modle_len", 5, "^unknown option 'max_modle_len'; did you mean 'max_model_len'"),
        ("frobnicate", 1, "^unknown option 'frobnicate'$"),
        ("port", 8000, "port is an option of the server"),
        ("kv_cache_dtype", "fp8_e5m2", "^kv_cache_dtype='fp8_e5m2' is not supported by Quire yet$"),
        ("load_format", "tensorizer", "^load_format='tensorizer' is not supported by Quire yet$"),
    ],
)
def test_other_values_and_names_are_errors_that_say_why(name, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(**{name: value})


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("--enable-elastic-ep", 1, "--enable-elastic-ep is not supported by Quire yet"),
        ("-dpl 2", 1, "--data-parallel-size 1: there is no replica 1, which this machine would have"),
        ("--tool-parser-plugin file.py", 1, "--tool-parser-plugin file.py is not supported by Quire yet"),
        ("--max-modle-len 5", 2, "unknown option --max-modle-len; did you mean --max-model-len?"),
        ("--enable_chunked_prefil", 2, "did you mean --enable-chunked-prefill?"),
        ("--frobnicate=1", 2, "unknown option --frobnicate\n"),
        ("model another", 1, "model 'model' is no directory here"),
        ("--max-model-len many", 2, "'many' is no size"),
    ],
)
def test_errors_of_the_command_line_are_two_lines_at_most(line, status, message, capsys):
    with pytest.raises(SystemExit, match=f"^{status}$"):
        raise SystemExit(main(["serve", "--port", "0", *shlex.split(line)]))
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") <= 2
    assert printed.startswith(("quire: error: ", "quire serve: error: "))


def test_what_has_no_effect_is_said(caplog):
    with caplog.at_level(logging.WARNING, "quire"):
        EngineConfig.create(trust_remote_code=True, swap_space=4, disable_cascade_attn=False)
    assert [record.getMessage() for record in caplog.records] == [
        "trust_remote_code has no effect: code in checkpoints is never run",
        "swap_space has no effect: preempted requests are computed again",
    ]


def test_options_that_vllm_has_retired_are_taken_as_what_took_their_place(caplog):
    config = EngineConfig.create(num_scheduler_steps=10, rope_theta=1e6, hf_overrides={"a": 1}, rope_scaling={"b": 2})
    assert config.model.hf_overrides == {"rope_theta": 1e6, "a": 1, "rope_scaling": {"b": 2}}
    assert "num_scheduler_steps is retired" in caplog.text
    texts = {"rope_scaling": '{"b": 2}', "hf_overrides": '{"a": 1}'}
    assert EngineConfig.create(**texts).model.hf_overrides == {"rope_scaling": {"b": 2}, "a": 1}
    assert from_line("--rope-theta 1e6 --rope-scaling '{\"b\": 2}'").model.hf_overrides["rope_theta"] == 1e6


def test_flags_are_written_as_vllm_takes_them():
    assert from_line("-tp 2").parallel.tensor_parallel_size == 2
    assert from_line("--tensor_parallel_size=2").parallel.tensor_parallel_size == 2
    assert from_line("--max_model_len 32k --enforce-eager=true").model.max_model_len == 32_000
    assert from_line("--max_model_len 32K --enforce-eager=true").model.enforce_eager
    assert not from_line("--enable-prefix-caching False").cache.enable_prefix_caching
    assert from_line("-q int8 --dtype half").model.quantization == "int8"
    assert from_line("--hf-token").model.hf_token is None
    overrides = '--hf-overrides.rope.theta 1e6 --hf-overrides.list+ 1,2 --hf_overrides \'{"a": "b"}\''
    assert from_line(overrides).model.hf_overrides == {"rope": {"theta": 1e6}, "list": [1, 2], "a": "b"}


def test_fields_of_vllms_objects_can_be_given_one_by_one():
    fields = "-cc.cudagraph_mode=NONE -cc.mode 1 --compilation-config.cudagraph_capture_sizes+ 1,2"
    config = from_line(fields + " --compilation-config '{\"max_cudagraph_capture_size\": 8}'")
    assert (config.model.enforce_eager, config.model.torch_compile) == (True, True)
    assert (config.kernels.cudagraph_capture_sizes, config.kernels.max_cudagraph_capture_size) == ([1, 2], 8)
    assert from_line("--compilation-config 3") == from_line("--compilation-config.cudagraph_mode FULL")
    with pytest.raises(ConfigError, match="compilation_config has no field 'modes'"):
        from_line("-cc.modes 1")


def test_names_of_the_server_are_suggested_too():
    with pytest.raises(ConfigError, match="unknown option 'metrics_prefx'; did you mean 'metrics_prefix'"):
        EngineConfig.create(metrics_prefx="a")


def test_types_of_torch_are_types():
    assert EngineConfig.create(dtype=torch.float16).model.dtype == "float16"


def test_texts_stand_for_sizes_lists_and_objects_in_python_too():
    config = EngineConfig.create(max_model_len="32k", hf_overrides='{"a": 1}', logits_processors='["a:B"]', model=None)
    assert (config.model.max_model_len, config.model.hf_overrides) == (32_000, {"a": 1})
    assert config.sampling.logits_processors == ["a:B"]


def test_every_option_of_vllm_is_known():
    """tests/data/vllm_options.txt has the names of vLLM 0.33's command line."""
    names = (Path(__file__).parents[1] / "data" / "vllm_options.txt").read_text().split()
    declared = {name for config in (*GROUPS.values(), ServerConfig) for name in OPTIONS[config]}
    assert len(names) > 300
    assert [name for name in names if canonical_name(name) not in declared | set(FOREIGN) | {"log_level"}] == []
