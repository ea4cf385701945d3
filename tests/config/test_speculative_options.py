"""The option speculative_config."""

from __future__ import annotations

import logging
import shlex

import pytest

from quire.cli.flags import engine_options
from quire.cli.main import build_parser
from quire.config.engine import ConfigError, EngineConfig
from quire.config.speculative import SpeculativeOptions
from quire.config.vllm import SPECULATIVE_NO_EFFECT, SPECULATIVE_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngarm"}, "method must be one of ngram, suffix, custom_class, draft_model, .*, got 'ngarm'"),
        ({"method": "ngram"}, "num_speculative_tokens must be from 1 to 32, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 99}, "from 1 to 32, got 99"),
        ({"method": "suffix", "max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens must be of type int, got '3'"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_minn": 2}, "no field 'prompt_lookup_minn'"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min must be at least 1 and at most prompt_lookup_max",
        ),
        ({"method": "custom_class", "num_speculative_tokens": 3}, "needs model, the import path of the class"),
        ({"method": "replay", "num_speculative_tokens": 3}, "replay needs acceptance_rates"),
        ({"method": "replay", "num_speculative_tokens": 3, "acceptance_rates": [1.2]}, "numbers from 0 to 1"),
        (
            {"method": "replay", "draft_method": "ngram", "num_speculative_tokens": 3, "acceptance_rates": [0.5]},
            "acceptance_rates must be .* not for host methods",
        ),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(speculative_config=given)


def test_the_fields_that_are_left_out():
    ngram = SpeculativeOptions.read({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (4, 4)
    assert SpeculativeOptions.read({"method": "suffix"}).num_speculative_tokens == 24
    assert SpeculativeOptions.read({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}).method == "mtp"
    custom = SpeculativeOptions.read({"model": "package.module.Proposer", "num_speculative_tokens": 1})
    assert custom.method == "custom_class"


def test_replay_has_the_method_of_its_drafts():
    given = {"method": "replay", "num_speculative_tokens": 3, "acceptance_rates": [0.9, 0.8]}
    assert SpeculativeOptions.read(given).method == "replay"
    assert SpeculativeOptions.read({**given, "draft_method": "eagle3", "model": "head"}).method == "eagle3"
    assert SpeculativeOptions.read({**given, "model": "head"}).method is None  # its config says it


NEITHER = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", SPECULATIVE_NO_EFFECT)
def test_a_field_of_vllm_without_effect_is_said_in_the_log(name, caplog):
    with caplog.at_level(logging.WARNING, "quire"):
        config = EngineConfig.create(speculative_config={**NEITHER, name: 1, "model": None})
    assert config.scheduler.speculative_config == NEITHER
    assert [record.getMessage() for record in caplog.records] == [
        f"speculative_config: {name} has no effect: {SPECULATIVE_NO_EFFECT[name].reason}"
    ]


@pytest.mark.parametrize("name", SPECULATIVE_NOT_SUPPORTED)
def test_a_field_of_vllm_that_is_not_supported_is_refused_unless_it_asks_for_nothing(name, caplog):
    foreign = SPECULATIVE_NOT_SUPPORTED[name]
    with pytest.raises(ConfigError, match=f"{name}=0.7 is not supported by Quire: {foreign.reason}"):
        EngineConfig.create(speculative_config={**NEITHER, name: 0.7})
    with caplog.at_level(logging.WARNING, "quire"):
        for neutral in (None, False, *(foreign.accepted or ())):
            config = EngineConfig.create(speculative_config={**NEITHER, name: neutral})
            assert config.scheduler.speculative_config == NEITHER
    assert not caplog.records


def test_the_ways_of_accepting_drafts_that_change_answers_are_refused():
    for field, value in (
        ("rejection_sample_method", "synthetic"),
        ("acceptance_method", "typical_acceptance_sampler"),
        ("synthetic_acceptance_rates", [0.9, 0.5, 0.2]),
    ):
        with pytest.raises(ConfigError, match="only accepted where that leaves the distribution"):
            EngineConfig.create(speculative_config={**NEITHER, field: value})


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--spec-method ngram --spec-tokens 3", NEITHER),
        ("--spec_tokens=3 --speculative-config.method ngram", NEITHER),
        (
            "--spec-method suffix --spec-tokens 4 -sc '{\"num_speculative_tokens\": 4}'",
            {"method": "suffix", "num_speculative_tokens": 4},
        ),
        ("--spec-model some/head", {"model": "some/head"}),
        ("--spec-model a/b --speculative-max-model-len 9", {"model": "a/b", "max_model_len": 9}),
        (
            "--speculative-model [ngram] --num-speculative-tokens 3 --ngram-prompt-lookup-max 4",
            {"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        (
            "--speculative-model a/b --num-speculative-tokens 2 --speculative-draft-tensor-parallel-size 1",
            {"model": "a/b", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
        ),
    ],
)
def test_flags_that_set_a_field(line, fields):
    options = engine_options(build_parser().parse_args(["serve", *shlex.split(line)]))
    assert EngineConfig.create(**options).scheduler.speculative_config == fields


def test_flags_that_set_a_field_in_python():
    given = {"spec_method": "ngram", "spec_tokens": 3, "spec_model": None}
    assert EngineConfig.create(**given) == EngineConfig.create(speculative_config=NEITHER)
    assert EngineConfig.create(speculative_model="[ngram]", spec_tokens=2).scheduler.speculation.method == "ngram"


def test_flags_that_contradict_each_other_are_an_error():
    with pytest.raises(ConfigError, match="spec_tokens=4 contradicts another option: num_speculative_tokens=3"):
        EngineConfig.create(spec_tokens=4, speculative_config=NEITHER)
    with pytest.raises(ConfigError, match="contradicts another option: model='a'"):
        EngineConfig.create(spec_model="a", speculative_model="b")


def test_the_text_of_the_option_must_be_an_object():
    for wrong in (5, "5", "[1]"):
        with pytest.raises(ConfigError, match=r"speculative_config must be a JSON object, got (5|\[1\])"):
            EngineConfig.create(speculative_config=wrong)


def test_text_of_the_command_line_is_read():
    config = EngineConfig.create(speculative_config='{"method": "suffix", "num_speculative_tokens": 8}')
    assert config.scheduler.speculative_config["num_speculative_tokens"] == 8
