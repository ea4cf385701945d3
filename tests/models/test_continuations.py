"""The recorded continuations, with which most tests compare, are those that transformers computes."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from support.checkpoints import ALL_VARIANTS
from support.continuations import recorded, recorded_with


@pytest.mark.sampled(126)
@pytest.mark.parametrize("variant", list(ALL_VARIANTS))
def test_recorded_continuations_equal_those_that_transformers_computes(references, variant):
    if recorded_with(variant) != version("transformers"):
        pytest.skip("they were recorded with another version of transformers")
    known = recorded(variant, references.key(variant))
    assert known is not None, "run tests/data/record_continuations.py: the variant has changed"
    computed = references.compute(variant)
    assert len(computed) == len(known)
    for continuation, (token_ids, certain) in zip(computed, known, strict=True):
        until = min(certain, continuation.certain)  # an almost tie may be one or none, by the processor's rounding
        assert token_ids[:until] == continuation.token_ids[:until]


def test_all_variants_are_recorded(references):
    if recorded_with("llama") == version("transformers"):
        assert all(recorded(variant, references.key(variant)) for variant in ALL_VARIANTS)


def test_a_key_changes_with_the_recipe(references, monkeypatch):
    kind, config, writing = ALL_VARIANTS["llama"]
    before = references.key("llama")
    monkeypatch.setitem(ALL_VARIANTS, "llama", (kind, {**config, "rms_norm_eps": 1e-4}, writing))
    assert references.key("llama") != before
    assert recorded("llama", references.key("llama")) is None
