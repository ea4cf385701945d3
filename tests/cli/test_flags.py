"""Flags are made from config.py, and a file can hold them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.main import build_parser
from quire.config.engine import OPTIONS, ConfigError, EngineConfig, ServerConfig


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def test_every_option_has_a_flag_with_its_help(capsys):
    with pytest.raises(SystemExit):
        parse("serve", "--help-all")
    text = capsys.readouterr().out
    for options in OPTIONS.values():
        for name in options:
            flag = name.replace("_", "-")
            assert f"--{flag}" in text or f"--[no-]{flag}" in text or name == "model"
    assert "--cpu-offload-gb" not in text


def test_help_lists_the_usual_options(capsys):
    with pytest.raises(SystemExit):
        parse("serve", "--help")
    text = capsys.readouterr().out
    assert "--max-model-len" in text
    assert "--host" in text
    assert "--mamba-block-size" not in text
    assert "Web pages (CORS)" not in text
    assert 20 <= len(re.findall(r"^  --", text, re.MULTILINE)) <= 27
    assert re.search(r"--help-all lists 1\d\d more\.", text)


def test_a_command_with_few_options_lists_all_of_them(capsys):
    with pytest.raises(SystemExit):
        parse("pull", "--help")
    text = capsys.readouterr().out
    assert "--revision" in text
    assert "--help-all" not in text


def test_flags_become_options():
    given = parse(
        "serve",
        "some/model",
        "--port",
        "0",
        "--api-key",
        "a",
        "b",
        "--request-timeout",
        "2.5",
        "--max-model-len",
        "4K",
        "--no-enable-prefix-caching",
        "--hf-overrides",
        '{"a": 1}',
        "--pipeline-parallel-size",
        "2",
        "--pipeline-layers",
        "3",
        "1",
    )
    assert given.model == "some/model"
    assert server_options(given) == {"port": 0, "api_key": ["a", "b"], "request_timeout": 2.5}
    assert engine_options(given) == {
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": 1},
        "pipeline_parallel_size": 2,
        "pipeline_layers": [3, 1],
    }


def test_what_may_be_left_open_can_be_switched_on_and_off():
    assert engine_options(parse("serve")) == {}
    assert engine_options(parse("serve", "--async-scheduling")) == {"async_scheduling": True}
    assert engine_options(parse("serve", "--no-async-scheduling")) == {"async_scheduling": False}


def test_a_file_holds_options_and_the_command_line_wins(tmp_path: Path):
    file = tmp_path / "quire.yaml"
    lines = ["model: some/model", "port: 9000", "max-model-len: 4K", "block_size: 32", "served-model-name: small"]
    file.write_text("\n".join([*lines, "request-timeout: 5"]))
    given = parse("serve", "--config", str(file), "--port", "1")
    engine = EngineConfig.create(**engine_options(given))
    assert (engine.model.max_model_len, engine.cache.block_size) == (4096, 32)
    assert given.model == "some/model"
    config = ServerConfig.create(**server_options(given))
    assert (config.port, config.served_model_name, config.request_timeout) == (1, ["small"], 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 1", "unknown option 'max_modle_len'; did you mean 'max_model_len'"),
        ("- 1", "must hold options"),
        ("a: [", "is not valid YAML"),
        ("block_size: many", "block_size must be of type int, got 'many'"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_is_wrong(tmp_path: Path, text, message):
    file = tmp_path / "quire.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(**engine_options(parse("generate", "--config", str(file))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": -1}, "port must be an integer of at least 0"),
        ({"ssl_keyfile": "a"}, "ssl_keyfile and ssl_certfile belong together"),
        ({"request_timeout": "soon"}, "request_timeout must be of type float or None"),
        ({"drain_timeout": -1.0}, "drain_timeout must be a number of seconds"),
        ({"prot": 1}, "unknown option 'prot'; did you mean 'port'"),
    ],
)
def test_wrong_options_of_the_server_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig.create(**options)
