"""The option speculative_config."""

from __future__ import annotations

import pytest

from quire.config import ConfigError, EngineConfig
from quire.options.speculative import SpeculativeOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngarm"}, "method must be one of ngram, suffix, custom_class, got 'ngarm'"),
        ({"num_speculative_tokens": 3}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens must be from 1 to 32, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 99}, "from 1 to 32, got 99"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens has the wrong type: '3'"),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_minn": 2}, "no field 'prompt_lookup_minn'"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min must be at least 1 and at most prompt_lookup_max",
        ),
        ({"method": "custom_class", "num_speculative_tokens": 3}, "needs model, the import path of the class"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(speculative_config=given)


def test_the_fields_that_are_left_out():
    ngram = SpeculativeOptions.read({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (4, 4)
    assert SpeculativeOptions.read({"method": "suffix"}).num_speculative_tokens == 24
    custom = SpeculativeOptions.read({"model": "package.module.Proposer", "num_speculative_tokens": 1})
    assert custom.method == "custom_class"


def test_text_of_the_command_line_is_read():
    config = EngineConfig.create(speculative_config='{"method": "suffix", "num_speculative_tokens": 8}')
    assert config.scheduler.speculative_config["num_speculative_tokens"] == 8
