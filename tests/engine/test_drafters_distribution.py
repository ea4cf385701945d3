"""Unseeded requests draw from the model's own distribution, whatever the drafter's is: chi-square tests of whole texts.

The probability of each text is computed from transformers' logits, in plain Python.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from support.checkpoints import Checkpoints
from support.drafters import Drafters
from support.engines import generate, make_llm, tokens_of
from support.late_device import run_late
from support.reference import References
from support.reference import logits as reference_logits
from support.sampling import chi_square, chi_square_bound, distribution, processed

PROMPT, LENGTH, COUNT = [5, 90, 41, 7, 200], 3, 3000
LETTERS = "[a-zA-Z ]"

CASES: dict[str, dict[str, Any]] = {
    "top-k": {"temperature": 1.5, "top_k": 4},
    "top-p": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "bias-and-penalties": {
        "temperature": 1.5,
        "top_k": 4,
        "logit_bias": {90: 5.0, 91: 5.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
    },
    "grammar": {"temperature": 2.0, "top_k": 5},
}


@pytest.fixture(scope="module")
def drafters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(checkpoints, tmp_path_factory)


def texts_of(model: Any, params: SamplingParams, allowed: list[bool]) -> dict[tuple[int, ...], float]:
    """The probability of each text of LENGTH tokens that can be drawn."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, probability in found.items():
            raw = reference_logits(model, PROMPT + list(text))[-1].tolist()
            raw = [x if may else float("-inf") for x, may in zip(raw, allowed, strict=True)]
            made = processed(raw, PROMPT, list(text), params)
            columns = distribution(made, params.temperature, params.top_k, params.top_p, params.min_p)
            longer |= {(*text, token): probability * p for token, p in enumerate(columns) if p}
        found = longer
    return found


def statistic(said: list[list[int]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom. Texts that are expected less than 5 times are one cell."""
    observed = Counter(map(tuple, said))
    assert observed.keys() <= expected.keys()
    often = [text for text, p in expected.items() if p * len(said) >= 5]
    counts, shares = [observed[text] for text in often], [expected[text] for text in often]
    counts.append(len(said) - sum(counts))
    shares.append(max(1 - sum(shares), 0.0) if len(often) < len(expected) else 0.0)
    return chi_square(counts, shares), len(often) - (shares[-1] == 0)


@pytest.mark.slow
@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("kind", "case", "late"),
    [
        ("similar", "bias-and-penalties", 0),
        ("same", "top-p", 0),
        pytest.param("similar", "grammar", 0, marks=pytest.mark.slow),
        *(
            pytest.param(kind, case, 0, marks=pytest.mark.sampled(12))
            for kind, case in (
                ("similar", "top-k"),
                ("similar", "top-p"),
                ("same", "top-k"),
                ("same", "bias-and-penalties"),
            )
        ),
        pytest.param("same", "grammar", 0, marks=pytest.mark.nightly),
        pytest.param("similar", "bias-and-penalties", 1, marks=pytest.mark.nightly),
        pytest.param("similar", "bias-and-penalties", 2, marks=pytest.mark.slow),
    ],
)
def test_texts_are_as_likely_as_the_model_makes_them(
    drafters: Drafters, references: References, kind: str, case: str, late: int
):
    """late: steps in flight on a device that works late; 0 for a device that works at once."""
    model = references.model("llama")
    grammar = StructuredOutputsParams(regex=LETTERS + "{40}") if case == "grammar" else None
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, structured_outputs=grammar, **CASES[case])
    config = drafters.config(kind, "llama", 2)
    llm = make_llm(drafters.target("llama"), speculative_config=config, seed=3, enable_prefix_caching=True)
    allowed = [True] * 320
    if grammar is not None:
        names = [llm.get_tokenizer().decode([token]) for token in range(300)]
        allowed = [bool(re.fullmatch(LETTERS + "+", name)) for name in names] + [False] * 20
    if late:
        run_late(llm, late)
    said = tokens_of(generate(llm, [PROMPT] * COUNT, params))
    value, freedom = statistic(said, texts_of(model, params, allowed))
    assert freedom >= 15
    stats = llm.core.stats.speculation
    accepted = stats.accepted_tokens / stats.draft_tokens
    assert (0.03 if grammar else 0.1) < accepted < (1.01 if kind == "same" and "top" in case else 0.95)
    assert value < chi_square_bound(freedom)


def test_a_wrong_distribution_is_found(references: References):
    """The same statistic tells the distribution of another temperature from the right one."""
    params = SamplingParams(max_tokens=LENGTH, temperature=1.5, top_k=4)
    expected = texts_of(references.model("llama"), params, [True] * 320)
    other = texts_of(references.model("llama"), params.clone(temperature=1.1), [True] * 320)
    drawn = torch.multinomial(torch.tensor(list(other.values())), COUNT, True, generator=torch.Generator()).tolist()
    keys = list(other)
    value, freedom = statistic([list(keys[i]) for i in drawn], expected)
    assert value > chi_square_bound(freedom)
