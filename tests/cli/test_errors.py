"""Errors on the command line name flags as they were typed; those of `LLM(...)` name keywords."""

from __future__ import annotations

import shlex

import pytest

from quire.cli.main import main
from quire.config.engine import ConfigError, EngineConfig


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate hi --max-model-len 99999", "--max-model-len 99999 is more than the"),
        ("generate hi --max-num-seqs 0", "--max-num-seqs must be an integer of at least 1, got 0"),
        ("generate hi --max_num_seqs=0", "--max_num_seqs must be an integer of at least 1, got 0"),
        ("generate hi -tp 0", "-tp must be an integer of at least 1, got 0"),
        ("generate hi --gpu-memory-utilization 2", "--gpu-memory-utilization must be above 0"),
        ("generate hi --tensor-parallel-size 2 --device cuda", "--device cuda"),
        ("generate hi --max-tokens 0", "--max-tokens must be at least 1"),
        ("generate hi --temperature=-1", "--temperature must be non-negative"),
        (f"generate hi --sampling-seed {2**64}", "--sampling-seed must"),
        ("serve --port 65536", "--port must be at most 65535, got 65536"),
        ("serve --port 0 --ssl-keyfile /nowhere", "--ssl-keyfile and --ssl-certfile belong together"),
        ("chat --max-num-seqs -1", "--max-num-seqs must be"),
        ("bench throughput --requests /nowhere", "No such file or directory: '/nowhere'"),
    ],
)
def test_an_error_is_one_line_that_names_the_flag(line, message, capsys):
    assert main(shlex.split(line)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("quire: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_the_same_error_of_the_interface_in_python_names_the_keyword():
    with pytest.raises(ConfigError, match=r"^max_num_seqs must be an integer of at least 1, got 0$"):
        EngineConfig.create(max_num_seqs=0)


def test_flags_stand_for_names_only_where_a_name_is_meant():
    from quire.cli.errors import with_flags
    from quire.cli.main import build_parser

    parser = build_parser().parse_args(["serve"]).parser
    for text in ("cannot listen on 127.0.0.1:80: the port is taken", "the model has no chat template", "a seed"):
        assert with_flags(text, parser, []) == text
    assert with_flags("device='cuda' was asked for", parser, []) == "--device cuda was asked for"
    assert with_flags("take quantization=int8", parser, []) == "take --quantization int8"
    assert with_flags("did you mean 'port'?", parser, []) == "did you mean --port?"


def test_a_flag_is_spelled_as_it_was_typed(capsys):
    parser_knows = ["serve", "--no-enable-prefix-caching"]
    from quire.cli.errors import with_flags
    from quire.cli.main import build_parser

    parser = build_parser().parse_args(["serve"]).parser
    text = "enable_prefix_caching cannot be used"
    assert with_flags(text, parser, parser_knows) == "--no-enable-prefix-caching cannot be used"
    assert with_flags(text, parser, []) == "--enable-prefix-caching cannot be used"
