"""--torch-compile changes what fuses, not what is said."""

from __future__ import annotations

import pytest

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from support.engines import GREEDY, generate, make_llm


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "enable_sequence_parallel": True}, marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_model_says_the_same(checkpoints, references, options):
    llm = make_llm(checkpoints.path("gpt2"), torch_compile=True, **options)  # its layer norms are torch's
    expected = references.continuations("gpt2")[:6]
    params = GREEDY.clone(max_tokens=6)
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected], params), strict=True):
        said = min(6, continuation.certain)
        assert output.outputs[0].token_ids[:said] == continuation.token_ids[:said]
    llm.shutdown()


def test_without_a_compiler_it_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv("CXX", "missing-compiler")
    with pytest.raises(ConfigError, match="torch_compile needs a C"):
        LLM(torch_compile=True)
