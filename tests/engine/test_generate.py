"""LLM.generate, chat and stream: prompts in every form, what ends a completion, and what the outputs say."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.checkpoints import EOS, Checkpoints
from support.engines import GREEDY, assert_nothing_is_left, generate, make_llm, tokens_of

pytestmark = pytest.mark.texts

SHORT = GREEDY.clone(max_tokens=8)
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> LLM:
    return make_llm(checkpoints.path("llama"))


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    return generate(llm, [prompt], params)[0].outputs[0]


# ---- prompts


def test_prompts_of_every_form_say_the_same(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    forms: list[Any] = [
        TEXT,
        ids,
        tuple(ids),
        {"prompt": TEXT},
        {"prompt_token_ids": ids},
        {"prompt": TEXT, "cache_salt": "s"},
    ]
    outputs = generate(llm, forms, SHORT)
    assert all(made == tokens_of(outputs)[0] for made in tokens_of(outputs))
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [TEXT, None, None, TEXT, None, TEXT]


def test_one_prompt_needs_no_list(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    for prompt in (TEXT, ids, {"prompt": TEXT}):
        [output] = llm.generate(prompt, SHORT, use_tqdm=False)
        assert output.prompt_token_ids == ids
        assert output.finished


def test_outputs_are_in_the_order_of_the_prompts_whatever_finishes_first(llm):
    params = [GREEDY.clone(max_tokens=count) for count in (20, 1, 9)]
    outputs = generate(llm, ["a", "bc", "def"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 9]
    assert [output.prompt for output in outputs] == ["a", "bc", "def"]


def test_no_prompts_are_no_outputs(llm):
    assert llm.generate([], SHORT, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ValueError, "the prompt is empty"),
        ({"prompt_token_ids": []}, ValueError, "the prompt is empty"),
        ([5, 320], ValueError, "token id 320 is out of vocabulary; the model has 320 tokens"),
        ([-1, 5], ValueError, "token id -1 is out of vocabulary; the model has 320 tokens"),
        ([5] * 176, ValueError, "the prompt has 176 tokens.*max_model_len is 176"),
        ({"prompt": TEXT, "multi_modal_data": {"image": [0]}}, ValueError, "this model takes text only"),
        ({"prompt": TEXT, "negative_prompt": TEXT}, ValueError, "'negative_prompt' is not supported by Quire yet"),
        ({}, ValueError, "needs 'prompt'"),
        ({"prompt": 7}, ValueError, "needs 'prompt'"),
        ({"prompt_token_ids": "abc"}, TypeError, "got str"),
        ({"prompt_token_ids": [1, "a"]}, TypeError, "must contain only integers"),
        ({"prompt_token_ids": [1, True]}, TypeError, "must contain only integers"),
        ({"prompt": TEXT, "cache_salt": ""}, ValueError, "cache_salt must be a non-empty string"),
        ("a lone surrogate \ud800", ValueError, r"U\+D800"),
    ],
)
def test_a_prompt_that_is_wrong_is_an_error_before_anything_runs(llm, prompt, error, message):
    with pytest.raises(error, match=message):
        llm.generate(["fine", prompt], SHORT, use_tqdm=False)
    assert not llm.core.has_unfinished


def test_something_that_is_no_prompt_is_an_error_that_says_so(llm):
    with pytest.raises(TypeError, match="a prompt must be a string, token ids or a dict, got float"):
        llm.generate([1.5], SHORT, use_tqdm=False)


def test_there_are_as_many_parameters_and_priorities_as_prompts(llm):
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [SHORT], use_tqdm=False)
    with pytest.raises(ValueError, match="1 prompts but 2 priorities"):
        llm.generate(["a"], SHORT, use_tqdm=False, priority=[1, 2])
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
        llm.generate(["a"], [{"temperature": 0}], use_tqdm=False)


def test_priorities_decide_who_waits(checkpoints):
    llm = make_llm(checkpoints.path("llama"), scheduling_policy="priority", max_num_seqs=1)
    order = []
    requests = llm._process(["a", "b", "c"], SHORT, [2, 0, 1])
    for output in llm._run(requests):
        if output.finished:
            order.append(output.prompt)
    assert order == ["b", "c", "a"]


def test_a_cache_salt_keeps_prefixes_apart(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    ids = list(range(10, 60))
    for salt, cached in (("a", 0), ("b", 0), ("a", 48), ("b", 48)):
        [output] = generate(llm, [{"prompt_token_ids": ids, "cache_salt": salt}], SHORT)
        assert output.num_cached_tokens == cached


def test_a_forgotten_prefix_cache_is_empty(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    ids = list(range(10, 60))
    assert [generate(llm, [ids], SHORT)[0].num_cached_tokens for _ in range(2)] == [0, 48]
    llm.reset_prefix_cache()
    assert generate(llm, [ids], SHORT)[0].num_cached_tokens == 0


# ---- what ends a completion


def test_max_tokens_ends_with_length(llm):
    for count in (1, 2, 17):
        completion = one(llm, TEXT, GREEDY.clone(max_tokens=count))
        assert len(completion.token_ids) == count
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_without_max_tokens_the_model_goes_on_to_its_longest_length(llm):
    completion = one(llm, [5] * 100, GREEDY.clone(max_tokens=None))
    assert len(completion.token_ids) == 76
    assert completion.finish_reason == "length"
    assert len(one(llm, [5] * 175, GREEDY.clone(max_tokens=None)).token_ids) == 1
    assert len(one(llm, [5] * 170, GREEDY.clone(max_tokens=100)).token_ids) == 6


@pytest.fixture(scope="module")
def free_run(llm: LLM) -> list[int]:
    """The tokens that nothing stops; the first ten differ from each other."""
    for start in range(10, 100):
        token_ids = one(llm, [start, 50, 60]).token_ids
        if len(set(token_ids[:12])) == 12:
            return [start, *token_ids]
    raise AssertionError


def with_eos(llm: LLM, checkpoints: Checkpoints, tmp_path: Path, **generation_config: Any) -> LLM:
    """The same model with another generation_config.json."""
    path = tmp_path / "copy"
    shutil.copytree(checkpoints.path("llama"), path)
    (path / "generation_config.json").write_text(json.dumps(generation_config))
    return make_llm(path)


def test_end_of_sequence_stops_and_is_no_text(llm, checkpoints, tmp_path, free_run):
    start, *tokens = free_run
    other = with_eos(llm, checkpoints, tmp_path, eos_token_id=[EOS, tokens[5], tokens[9]])
    prompt = [start, 50, 60]
    completion = one(other, prompt, GREEDY.clone(ignore_eos=False))
    assert completion.token_ids == tokens[:6]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[5])  # not the tokenizer's own EOS
    detokenize = other.get_tokenizer().decode
    assert completion.text == detokenize(tokens[:5])
    shown = one(other, prompt, GREEDY.clone(ignore_eos=False, include_stop_str_in_output=True))
    assert shown.text == detokenize(tokens[:6])
    assert one(other, prompt, GREEDY).token_ids == tokens  # ignore_eos
    # min_tokens: both are held down until there are so many, so what comes in their place is the next best
    longer = one(other, prompt, GREEDY.clone(ignore_eos=False, min_tokens=8))
    assert longer.token_ids[:5] == tokens[:5]
    assert not {tokens[5], tokens[9], EOS} & set(longer.token_ids[:8])


def test_the_tokenizers_own_end_of_sequence_has_no_stop_reason(llm, checkpoints, tmp_path, free_run):
    start, *tokens = free_run
    path = tmp_path / "copy"
    shutil.copytree(checkpoints.path("llama"), path)
    name = llm.frontend.tokenizer.id_to_token(tokens[3])
    if name is None:
        pytest.skip("the token is in the model's vocabulary only")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    completion = one(make_llm(path), [start, 50, 60], GREEDY.clone(ignore_eos=False))
    assert completion.token_ids == tokens[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_stop_token_ids_stop_even_where_end_of_sequence_is_ignored(llm, free_run):
    start, *tokens = free_run
    prompt = [start, 50, 60]
    completion = one(llm, prompt, GREEDY.clone(stop_token_ids=[tokens[7], tokens[4]]))
    assert completion.token_ids == tokens[:5]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[4])
    longer = one(llm, prompt, GREEDY.clone(stop_token_ids=[tokens[4]], min_tokens=6))
    assert longer.token_ids[:4] == tokens[:4]
    assert tokens[4] not in longer.token_ids[:6]


def test_stop_strings_are_found_across_the_borders_of_tokens(llm, free_run):
    start, *tokens = free_run
    prompt = [start, 50, 60]
    free = one(llm, prompt)
    decode = llm.get_tokenizer().decode
    text = decode(tokens[:12])
    for at in range(2, len(text) - 4):
        for length in (1, 2, 4):
            stop = text[at : at + length]
            if "\ufffd" in stop:
                continue
            for keep in (False, True):
                completion = one(llm, prompt, GREEDY.clone(stop=[stop, "no such"], include_stop_str_in_output=keep))
                end = free.text.index(stop)
                assert completion.text == free.text[: end + length * keep]
                assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
                assert tokens[: len(completion.token_ids)] == completion.token_ids


def test_a_stop_string_within_min_tokens_is_passed_over(llm, free_run):
    start, *tokens = free_run
    decode = llm.get_tokenizer().decode
    stop = next(c for c in decode(tokens[:3]) if c != "\ufffd")
    completion = one(llm, [start, 50, 60], GREEDY.clone(stop=stop, min_tokens=10))
    assert len(completion.token_ids) >= 10
    assert completion.text.startswith(decode(tokens[:3]).rstrip("\ufffd"))


def test_without_detokenizing_there_are_tokens_and_no_text(llm):
    completion = one(llm, TEXT, SHORT.clone(detokenize=False))
    assert completion.text == ""
    assert completion.token_ids == one(llm, TEXT, SHORT).token_ids


# ---- several completions


def test_the_completions_of_a_prompt_differ_and_completion_i_has_seed_plus_i(llm):
    params = SamplingParams(n=4, seed=40, max_tokens=12, ignore_eos=True)
    [output] = generate(llm, [TEXT], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    made = tokens_of([output])
    assert len({tuple(token_ids) for token_ids in made}) == 4
    for i, token_ids in enumerate(made):
        assert one(llm, TEXT, params.clone(n=1, seed=40 + i)).token_ids == token_ids


def test_unseeded_completions_differ_but_an_engine_of_the_same_seed_repeats_them(checkpoints):
    params = SamplingParams(n=3, max_tokens=12)
    runs = [
        tokens_of(generate(make_llm(checkpoints.path("llama"), seed=seed), [TEXT, TEXT], params)) for seed in (1, 1, 2)
    ]
    assert len({tuple(token_ids) for token_ids in runs[0]}) == 6
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


# ---- streams


@pytest.mark.plain("counts the outputs of a stream")
def test_a_stream_grows_to_what_generate_returns(llm):
    whole = one(llm, TEXT)
    lengths, texts = [], []
    for output in llm.stream(TEXT, GREEDY):
        lengths.append(len(output.outputs[0].token_ids))
        texts.append(output.outputs[0].text)
    assert lengths == list(range(1, 65))
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == whole.text


def test_a_stream_holds_back_what_may_become_a_stop_string(llm):
    text = one(llm, TEXT).text
    starts = {text.index(text[i : i + 3]): text[i : i + 3] for i in range(10, len(text) - 3)}
    at, stop = next((i, part) for i, part in starts.items() if i >= 10 and "\ufffd" not in part)
    shown = [output.outputs[0].text for output in llm.stream(TEXT, GREEDY.clone(stop=stop))]
    assert shown[-1] == text[:at]
    assert all(text[:at].startswith(part) for part in shown)


@pytest.mark.plain("counts the outputs of a stream")
def test_leaving_a_stream_early_aborts_the_request_and_frees_its_blocks(llm):
    for output in llm.stream([5] * 50, GREEDY):
        if len(output.outputs[0].token_ids) == 5:
            break
    assert_nothing_is_left(llm.core)
    assert output.outputs[0].finish_reason == "abort"
    stream = llm.stream([5] * 50, SamplingParams(n=3, max_tokens=20, seed=1))
    next(stream)
    stream.close()
    assert_nothing_is_left(llm.core)


def test_streams_may_be_open_at_once_beside_a_generate(llm):
    """Whoever steps, steps for all; each gets its own outputs, and its end."""
    alone = {text: one(llm, text, SHORT).token_ids for text in ("first", "second", "third")}
    first, second = llm.stream("first", SHORT), llm.stream("second", SHORT)
    assert next(first).prompt == "first"
    assert next(second).prompt == "second"
    [third] = llm.generate(["third"], SHORT, use_tqdm=False)
    assert third.outputs[0].token_ids == alone["third"]
    for stream, text in ((second, "second"), (first, "first")):
        outputs = list(stream)
        assert {output.prompt for output in outputs} == {text}
        assert outputs[-1].outputs[0].token_ids == alone[text]
        assert outputs[-1].finished
    assert_nothing_is_left(llm.core)


# ---- chat and defaults


def test_chat_is_the_template_and_then_generate(llm):
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    messages = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(messages, SHORT, use_tqdm=False, chat_template=template)
    assert output.prompt == "<s>user: hello</s>"
    assert output.outputs[0].token_ids == one(llm, "<s>user: hello</s>", SHORT).token_ids
    both = llm.chat([messages, messages], SHORT, use_tqdm=False, chat_template=template)
    assert len(both) == 2
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(messages, SHORT, use_tqdm=False)


def test_parameters_left_out_are_the_checkpoints_own(llm, checkpoints, tmp_path):
    other = with_eos(
        llm,
        checkpoints,
        tmp_path,
        temperature=0.6,
        top_p=0.9,
        top_k=7,
        max_new_tokens=5,
        do_sample=True,
        eos_token_id=EOS,
    )
    params = other.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 7, 5)
    [output] = other.generate([TEXT], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 5
    path = tmp_path / "copy"
    assert make_llm(path, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert make_llm(path).get_default_sampling_params() == SamplingParams(temperature=0.6)


def test_a_checkpoint_that_says_not_to_sample_samples_as_in_vllm(llm, checkpoints, tmp_path):
    other = with_eos(llm, checkpoints, tmp_path, do_sample=False, presence_penalty=0.5, eos_token_id=EOS)
    params = other.get_default_sampling_params()
    assert (params.temperature, params.presence_penalty) == (1.0, 0.5)
    [output] = generate(other, [TEXT], other.processor.default_sampling_params(n=2, max_tokens=3))
    assert len(output.outputs) == 2


def test_output_ends_where_the_context_does(llm):
    [output] = generate(llm, [[5] * 170], SamplingParams(max_tokens=100, ignore_eos=True, temperature=0))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


def test_a_priority_needs_the_policy_that_reads_it(llm):
    message = "Got priority 3 but priority scheduling is not enabled.*--scheduling-policy priority"
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], SHORT, use_tqdm=False, priority=[0, 3])
    assert len(llm.generate(["a"], SHORT, use_tqdm=False, priority=[0])) == 1


def test_parameters_changed_to_nonsense_after_they_were_made_are_checked_again(llm):
    params = SamplingParams()
    params.top_p = 3.0
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 3.0"):
        llm.generate("a", params, use_tqdm=False)
