"""Default sampling parameters of GGUF models: those of the file, or for chats gentle ones."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from quire.checkpoints.errors import WeightError
from quire.checkpoints.gguf import read_gguf
from quire.checkpoints.gguf_models import gguf_generation_config
from quire.engine.processor import GGUF_CHAT_DEFAULTS
from support.engines import make_llm
from support.gguf_files import with_metadata, write_family, write_gguf


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(write_family(folder / "checkpoint", "qwen2"), folder / "model.gguf")


def values(params) -> dict[str, float]:
    return {name: getattr(params, name) for name in GGUF_CHAT_DEFAULTS}


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_chats_get_gentle_defaults_and_completions_neutral_ones(plain):
    processor = make_llm(plain).processor
    assert values(processor.default_sampling_params()) == NEUTRAL
    assert values(processor.default_sampling_params(chat=True)) == GGUF_CHAT_DEFAULTS
    assert processor.default_sampling_params(chat=True, temperature=0.2).temperature == 0.2
    assert processor.uses_chat_defaults


def test_a_files_own_recommendation_counts_for_both(plain, tmp_path):
    file = with_metadata(plain, tmp_path / "model.gguf", {"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    processor = make_llm(file).processor
    expected = {"temperature": 0.5, "top_p": 1.0, "top_k": 20}
    assert values(processor.default_sampling_params()) == pytest.approx(expected)
    assert values(processor.default_sampling_params(chat=True)) == pytest.approx(expected)
    assert not processor.uses_chat_defaults


@pytest.mark.parametrize("options", [{"generation_config": "vllm"}, {"override_generation_config": {"top_p": 1.0}}])
def test_options_take_precedence(plain, options):
    processor = make_llm(plain, **options).processor
    assert values(processor.default_sampling_params(chat=True)) == NEUTRAL


def test_a_checkpoint_without_recommendation_stays_neutral(checkpoints):
    processor = make_llm(checkpoints.path("llama")).processor
    assert values(processor.default_sampling_params(chat=True)) == NEUTRAL


def test_a_recommendation_of_a_wrong_type_is_named(plain, tmp_path):
    file = with_metadata(plain, tmp_path / "model.gguf", {"general.sampling.temp": "hot"})
    with pytest.raises(WeightError, match=r"general\.sampling\.temp must be a number, not of type str"):
        gguf_generation_config(read_gguf(file))


def test_the_keys_are_those_of_the_format():
    keys = gguf.constants.Keys.General
    assert keys.SAMPLING_TEMP == "general.sampling.temp"
    assert keys.SAMPLING_PENALTY_REPEAT == "general.sampling.penalty_repeat"
