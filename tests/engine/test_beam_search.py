"""LLM.beam_search against transformers' beam search, and a plain one where that counts lengths differently."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from quire.messages.sampling_params import BeamSearchParams
from support.checkpoints import EOS, Checkpoints
from support.engines import assert_nothing_is_left, make_llm
from support.reference import prompts

PROMPTS = [prompts(320, 8)[i] for i in (0, 1, 5, 7)]  # of 1, 15, 32 and 33 tokens


@torch.inference_mode()
def plain_beam_search(
    model: Any, prompt: list[int], width: int, max_tokens: int, ends: set[int], penalty: float
) -> list[tuple[list[int], float]]:
    """Every token of the vocabulary continues every beam; those that end one are set aside."""

    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / max(len(beam[0]) - len(prompt), 1) ** penalty

    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    completed: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        rows = model(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].log_softmax(-1).tolist()
        candidates = [
            ([*tokens, t], total + logprob)
            for (tokens, total), row in zip(beams, rows, strict=True)
            for t, logprob in sorted(enumerate(row), key=lambda pair: -pair[1])[: 2 * width]
        ]
        completed += [c for c in candidates if c[0][-1] in ends]
        beams = sorted((c for c in candidates if c[0][-1] not in ends), key=score, reverse=True)[:width]
    return sorted(completed + beams, key=score, reverse=True)[:width]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}], ids=["roomy", "tight"])
def test_without_an_end_it_is_transformers_beam_search(checkpoints: Checkpoints, references, width, options):
    llm, model = make_llm(checkpoints.path("llama"), **options), references.model("llama")
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True))
    assert_nothing_is_left(llm.core)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        made = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [s.tokens for s in output.sequences] == made.sequences.tolist()
        if width > 1:
            totals = [s.cum_logprob for s in output.sequences]
            assert totals == pytest.approx(made.sequences_scores.tolist(), abs=1e-3)
        for sequence in output.sequences:
            taken = [m[t].logprob for m, t in zip(sequence.logprobs, sequence.tokens[len(prompt) :], strict=True)]
            assert sum(taken) == pytest.approx(sequence.cum_logprob)
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
            assert sequence.finish_reason == "length"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_beams_that_end_are_set_aside_and_compared_by_length(checkpoints, references, tmp_path, penalty):
    ends = {EOS, *range(30, 320, 20)}
    path = tmp_path / "copy"
    shutil.copytree(checkpoints.path("llama"), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    llm, model = make_llm(path), references.model("llama")
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=5, max_tokens=10, length_penalty=penalty))
    reasons = set()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = plain_beam_search(model, prompt, 5, 10, ends, penalty)
        assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in expected]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([total for _, total in expected], abs=1e-3)
        for sequence in output.sequences:
            assert sequence.finish_reason == ("stop" if sequence.tokens[-1] in ends else "length")
            reasons.add(sequence.finish_reason)
    assert reasons == {"stop", "length"} if penalty == 2.5 else "stop" in reasons


def test_beams_end_at_the_models_longest_length(checkpoints):
    llm = make_llm(checkpoints.path("llama"), max_model_len=40)
    outputs = llm.beam_search([[5] * 39, [5] * 30], BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True))
    assert [[len(s.tokens) for s in output.sequences] for output in outputs] == [[40, 40], [40, 40]]


def test_prompts_may_have_any_form_and_beams_are_found_in_the_cache(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    text = "Once upon a time there was a small engine that could read a whole book in one night."
    [output] = llm.beam_search(text, params)
    assert llm.core.scheduler.stats.prefix_hits > 0
    ids = llm.get_tokenizer().encode(text)
    for form in (ids, [text], [{"prompt": text, "cache_salt": "a"}]):
        [other] = llm.beam_search(form, params)
        assert [s.tokens for s in other.sequences] == [s.tokens for s in output.sequences]
    assert all(s.tokens[: len(ids)] == ids for s in output.sequences)
    assert all(s.text.startswith(text) for s in output.sequences)


def test_a_beam_that_needs_more_logprobs_than_allowed_is_an_error_that_names_the_option(checkpoints):
    with pytest.raises(ValueError, match="beam_width=11 needs the logprobs of 22 tokens; max_logprobs is 20"):
        make_llm(checkpoints.path("llama")).beam_search(["a"], BeamSearchParams(beam_width=11, max_tokens=1))
    make_llm(checkpoints.path("llama"), max_logprobs=22).beam_search("a", BeamSearchParams(beam_width=11, max_tokens=2))
