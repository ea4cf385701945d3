"""Every sampling parameter through the whole engine, against transformers' logits and the plain reference; and again
chunked, cached, preempted, with steps in flight and on two ranks."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.llm import LLM
from quire.engine.output_processor import DeltaReader
from quire.messages.outputs import CompletionOutput, Logprob, RequestOutput
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces
from support.checkpoints import END, EOS, Checkpoints
from support.engines import GREEDY, assert_preempted, generate, make_llm
from support.late_device import run_late
from support.reference import LENGTHS, References, logits, prompts
from support.sampling import processed, scores

pytestmark = pytest.mark.texts

VARIANTS = ["llama", "qwen3-mixed-windows-biases"]
TIGHT = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 24, "max_num_seqs": 12}
CHUNKED = {"max_num_batched_tokens": 24, "max_num_seqs": 12}
TEXT = "Once upon a time"
SHORT = GREEDY.clone(max_tokens=12)
NEAR = 2e-4  # how far logits of equal weights may be apart here and in transformers

each_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> LLM:
    return make_llm(checkpoints.path("llama"))


def one(llm: LLM, prompt: Any, params: SamplingParams = SHORT) -> CompletionOutput:
    return generate(llm, [prompt], params)[0].outputs[0]


# ---- requests of every kind


def requests_of_every_kind(plain: list[int]) -> list[SamplingParams]:
    """plain: the greedy tokens of a prompt, some of which must not come now."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drawn = params.clone(temperature=0.9, seed=7)
    return [
        params.clone(repetition_penalty=1.5, logprobs=3),
        params.clone(presence_penalty=1.5, frequency_penalty=0.7),
        params.clone(frequency_penalty=-0.5, logprobs=0),
        params.clone(logit_bias={plain[0]: -8.0, plain[2]: 2.5, 5: 1.0}),
        params.clone(allowed_token_ids=[*plain[1::2], 9, 10, 11], logprobs=5),
        params.clone(bad_words=["x", "the", " a", "dog", "ab"], repetition_penalty=0.9),
        params.clone(stop_token_ids=[plain[1], plain[4]], min_tokens=10),
        params.clone(ignore_eos=False, min_tokens=24, logit_bias={EOS: 20.0, END: 20.0}),
        drawn,
        drawn.clone(repetition_penalty=1.2, presence_penalty=0.4, top_k=30, logprobs=2),
        drawn.clone(frequency_penalty=1.0, min_p=0.02, top_p=0.95, logprobs=1, prompt_logprobs=2),
        drawn.clone(allowed_token_ids=list(range(40, 90)), logit_bias={41: 3.0, 300: 99.0}, min_tokens=3),
        drawn.clone(logprob_token_ids=[9, *plain[:3], 250, 9]),
    ]


def batch_of_every_kind(llm: LLM, references: References, variant: str) -> tuple[list[list[int]], list[SamplingParams]]:
    continuations = references.continuations(variant)
    params = requests_of_every_kind(continuations[3].token_ids)
    texts = [continuations[i % 14].prompt for i in range(len(params))]
    return texts, params


def stop_ids(params: SamplingParams) -> list[int]:
    return [*(params.stop_token_ids or []), *([] if params.ignore_eos else [EOS, END])]


def check_with_transformers(llm: LLM, model: Any, output: RequestOutput, params: SamplingParams) -> None:
    """Each token is the one that the plain reference takes, given transformers' logits of the text before it."""
    prompt, [completion] = output.prompt_token_ids, output.outputs
    raw = logits(model, [*prompt, *completion.token_ids])
    bad_words = llm.processor._bad_words(params)
    for place, token in enumerate(completion.token_ids):
        row, before = raw[len(prompt) - 1 + place], completion.token_ids[:place]
        final = processed(row.tolist(), prompt, before, params, bad_words, stop_ids(params))
        ranking = scores(final, params, params.seed or 0, place)
        assert ranking[token] >= max(ranking) - 2 * NEAR / (params.temperature or 1), (place, token)
    if params.num_logprobs is None:
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
        return
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    rows = raw[len(prompt) - 1 : -1].log_softmax(-1)
    if params.logprob_token_ids is None:
        check_logprobs(completion.logprobs, rows, completion.token_ids, params.logprobs)
    else:
        check_named_logprobs(completion.logprobs, rows, completion.token_ids, params.logprob_token_ids)
    total = sum(made[token].logprob for made, token in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert "".join(m[t].decoded_token or "" for m, t in zip(completion.logprobs, completion.token_ids, strict=True))


def check_logprobs(made: list[dict[int, Logprob]], rows: Tensor, token_ids: list[int], count: int) -> None:
    """rows: transformers' [places, vocab]"""
    assert len(made) == len(rows) == len(token_ids)
    for place, row, token in zip(made, rows, token_ids, strict=True):
        best = row.sort(descending=True)
        assert next(iter(place)) == token
        others = [logprob for t, logprob in place.items() if logprob.rank <= count]
        assert sorted(p.rank for p in others) == list(range(1, count + 1))
        assert len(place) == count + (place[token].rank > count)
        for t, logprob in place.items():
            assert logprob.logprob == pytest.approx(row[t].item(), abs=NEAR)
            assert logprob.logprob == pytest.approx(best.values[logprob.rank - 1].item(), abs=NEAR)


def check_named_logprobs(made: list[dict[int, Logprob]], rows: Tensor, token_ids: list[int], named: list[int]) -> None:
    """The token that is there, then the named ones in their order; only the first has a rank."""
    for place, row, token in zip(made, rows, token_ids, strict=True):
        assert list(place) == list(dict.fromkeys([token, *named]))
        assert place[token].rank == int((row > row[token]).sum()) + 1
        assert all(logprob.rank is None for t, logprob in place.items() if t != token)
        for t, logprob in place.items():
            assert logprob.logprob == pytest.approx(row[t].item(), abs=NEAR)


@each_variant
def test_tokens_and_logprobs_are_those_of_transformers_and_the_plain_reference(checkpoints, references, variant):
    llm = make_llm(checkpoints.path(variant))
    texts, params = batch_of_every_kind(llm, references, variant)
    for output, param in zip(generate(llm, texts, params), params, strict=True):
        check_with_transformers(llm, references.model(variant), output, param)


def outcome(output: RequestOutput) -> Any:
    """Everything that may not depend on how a request was run; logprobs with room for rounding."""

    def rounded(places: list[Any] | None) -> Any:
        if places is None:
            return None
        return [
            place and {t: (pytest.approx(p.logprob, abs=NEAR), p.rank, p.decoded_token) for t, p in place.items()}
            for place in places
        ]

    completions = [(c.token_ids, c.text, c.finish_reason, c.stop_reason, rounded(c.logprobs)) for c in output.outputs]
    return output.prompt_token_ids, completions, rounded(output.prompt_logprobs)


@pytest.mark.parametrize("variant", [pytest.param(VARIANTS[0], marks=pytest.mark.sampled(6)), VARIANTS[1]])
def test_they_are_the_same_however_the_requests_are_run(checkpoints, references, variant):
    path = checkpoints.path(variant)
    alone = make_llm(path)
    texts, params = batch_of_every_kind(alone, references, variant)
    expected = [outcome(generate(alone, [t], [p])[0]) for t, p in zip(texts, params, strict=True)]

    def check(llm: LLM, what: str) -> None:
        assert [outcome(output) for output in generate(llm, texts, params)] == expected, what

    warm = make_llm(path)
    check(warm, "batched")
    check(warm, "cached")
    assert warm.core.scheduler.stats.prefix_hits > 0
    check(make_llm(path, **CHUNKED), "chunked")
    cramped = make_llm(path, **TIGHT)
    check(cramped, "preempted")
    assert_preempted(cramped)
    for options in ({}, TIGHT):
        deep = make_llm(path, **options)
        run_late(deep)
        check(deep, f"two steps in flight {options}")


def remember_nothing(output: list[int], logits: Tensor) -> Tensor:
    return logits


@pytest.mark.plain("counts how often the host waits")
def test_a_device_that_works_late_is_waited_for_only_where_a_function_reads_tokens_on_the_host(checkpoints, references):
    """Not for penalties, bad words, min_tokens, biases or allowed tokens."""
    plain = make_llm(checkpoints.path("llama"))
    texts, params = batch_of_every_kind(plain, references, "llama")
    expected = [outcome(output) for output in generate(plain, texts, params)]
    late = make_llm(checkpoints.path("llama"))
    executor = run_late(late)
    assert [outcome(output) for output in generate(late, texts, params)] == expected
    assert (executor.most_in_flight, executor.waits) == (2, 0)
    reading = [params[0].clone(logits_processors=[remember_nothing]), *params[1:]]
    assert [outcome(output) for output in generate(late, texts, reading)] == expected
    assert executor.waits >= 23, "once in each step of the request but its first, which follows no other"


class OnlyEven(LogitsProcessor):
    """extra_args={"even": True} leaves only even tokens."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        assert config.scheduler.max_num_seqs == 12

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("even") not in (None, True):
            raise ValueError("even must be true")

    def add(self, row: int, request: NewRequest) -> bool:
        return "even" in (request.sampling_params.extra_args or {})

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        logits[torch.from_numpy(at.index)[:, None], torch.arange(1, logits.shape[1], 2)] = -math.inf


@pytest.mark.slow
def test_on_two_ranks_they_are_the_same_and_plugins_are_loaded_there(checkpoints, references):
    path, plugin = checkpoints.path("llama"), {"logits_processors": [f"{__name__}:OnlyEven"]}
    alone, split = make_llm(path, **TIGHT, **plugin), make_llm(path, **TIGHT, **plugin, tensor_parallel_size=2)
    try:
        texts, params = batch_of_every_kind(alone, references, "llama")
        params[1] = params[1].clone(extra_args={"even": True}, prompt_logprobs=0)
        expected = generate(alone, texts, params)
        assert all(token % 2 == 0 for token in expected[1].outputs[0].token_ids)
        made = generate(split, texts, params)
        assert [outcome(output) for output in made] == [outcome(output) for output in expected]
        for process_bound in (
            {"logits_processors": [lambda output, logits: logits]},
            {"extra_args": {"odd": object()}},
        ):
            with pytest.raises(ValueError, match=f"^{next(iter(process_bound))} .*process"):
                split.generate("a", SHORT.clone(**process_bound), use_tqdm=False)
        with pytest.raises(ValueError, match="even must be true"):
            split.generate("a", SHORT.clone(extra_args={"even": 1.5}), use_tqdm=False)
    finally:
        split.shutdown()


# ---- what only the engine knows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_logprobs": -2}, "max_logprobs must be an integer of at least -1, got -2"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode must be one of 'raw_logprobs', .* got 'cooked'"),
        ({"logits_processors": 1}, "logits_processors: 1 is not a subclass"),
        ({"logits_processors": ["no_such_module:B"]}, "logits_processors 'no_such_module:B' cannot be imported"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_an_error_at_start(checkpoints, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoints.path("llama"), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"logprobs": -1}, "Requested sample logprobs of 320, which is greater than max allowed: 20"),
        ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21, which is greater than max allowed: 20"),
        (
            {"logit_bias": {4: 1.0, 320: 1.0, -1: 0.0}},
            r"token_id\(s\) \[320, -1\] in logit_bias contain out-of-vocab token ids. Vocabulary size: 320",
        ),
        ({"stop_token_ids": [4, 320]}, r"token_id\(s\) \[320\] in stop_token_ids contain out-of-vocab token ids"),
        ({"allowed_token_ids": [4, 320]}, "allowed_token_ids contains out-of-vocab token id!"),
        (
            {"truncate_prompt_tokens": 177},
            r"truncate_prompt_tokens value \(177\) is greater than max_model_len \(176\)",
        ),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_an_error(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[5, 6, 7]], SHORT.clone(**options), use_tqdm=False)


def test_without_a_limit_all_of_the_vocabulary_may_be_asked_for(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"), max_logprobs=-1)
    prompt = prompts(320, 4)[3]
    [output] = generate(llm, [prompt], SHORT.clone(logprobs=-1, prompt_logprobs=-1, max_tokens=3))
    [completion] = output.outputs
    rows = logits(references.model("llama"), [*prompt, *completion.token_ids]).log_softmax(-1)
    check_logprobs(completion.logprobs, rows[len(prompt) - 1 : -1], completion.token_ids, 320)
    check_logprobs(output.prompt_logprobs[1:], rows[: len(prompt) - 1], prompt[1:], 320)


def test_logprobs_are_of_the_model_unless_the_mode_says_otherwise(checkpoints):
    made = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        llm = make_llm(checkpoints.path("llama"), logprobs_mode=mode)
        made[mode] = one(llm, TEXT, SHORT.clone(allowed_token_ids=[65, 66], logprobs=4, max_tokens=1))
        assert made[mode].token_ids == made["raw_logprobs"].token_ids
    token = made["raw_logprobs"].token_ids[0]
    assert made["raw_logprobs"].logprobs[0][token].rank > 1
    assert made["processed_logprobs"].logprobs[0][token].rank == 1
    assert sum(math.exp(p.logprob) for p in made["processed_logprobs"].logprobs[0].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("and", 2),  # " a" is a token: as many tokens, and another first one
        (" on", 2),
        ("he", 1),  # the space is a token of its own
        ("the", 1),  # " the" has fewer tokens
        ("é", 1),
    ],
)
def test_a_bad_word_is_banned_behind_a_space_where_that_is_another_word_of_as_many_tokens(llm, word, forms):
    encode = llm.get_tokenizer().encode
    expected = [encode(word.lstrip(), False), encode(" " + word.lstrip(), False)][:forms]
    assert llm.processor._bad_words(SHORT.clone(bad_words=[word])) == expected


def test_a_bad_word_of_no_token_is_an_error(llm):
    with pytest.raises(ValueError, match="bad_words entries must tokenize to at least one token, got ' '"):
        llm.generate("a", SHORT.clone(bad_words=["a", " "]), use_tqdm=False)


def test_a_bad_word_that_would_come_does_not(llm):
    free = one(llm, TEXT, GREEDY)
    tokenizer = llm.get_tokenizer()
    for at in range(2, 40):
        word = tokenizer.decode(free.token_ids[at : at + 2])
        if (
            "\ufffd" not in word
            and not word.startswith(" ")
            and tokenizer.encode(word, False) == free.token_ids[at : at + 2]
        ):
            break
    else:
        raise AssertionError
    held = one(llm, TEXT, GREEDY.clone(bad_words=[word]))
    assert word in free.text
    assert word not in held.text
    assert held.token_ids[: at + 1] == free.token_ids[: at + 1]  # its first token may come
    assert held.token_ids[at + 1] != free.token_ids[at + 1]


def test_named_logprobs_need_not_fit_the_limit_of_likeliest_ones(llm):
    named = list(range(100, 200))
    [place] = one(llm, TEXT, SHORT.clone(max_tokens=1, logprob_token_ids=named, logprobs=100)).logprobs
    assert len(place) in (100, 101)
    with pytest.raises(ValueError, match=r"token_id\(s\) \[320\] in logprob_token_ids contain out-of-vocab"):
        llm.generate([TEXT], SHORT.clone(logprob_token_ids=[5, 320]), use_tqdm=False)


def test_output_that_repeats_itself_ends_if_asked_for(llm):
    same = SHORT.clone(allowed_token_ids=[7], max_tokens=30, ignore_eos=True)
    ended = one(
        llm, TEXT, same.clone(repetition_detection={"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3})
    )
    assert ended.token_ids == [7] * 6
    assert (ended.finish_reason, ended.stop_reason) == ("repetition", "repetition_detected")
    assert one(llm, TEXT, same).finish_reason == "length"


@pytest.mark.plain("counts the outputs of a stream")
def test_a_stream_interval_gathers_tokens_but_for_the_first_and_the_last(llm, checkpoints):
    params = SHORT.clone(output_kind=RequestOutputKind.DELTA, max_tokens=12, ignore_eos=True)
    slow = make_llm(checkpoints.path("llama"), stream_interval=4)
    for engine, interval, lengths in (
        (llm, None, [1] * 12),
        (llm, 5, [1, 5, 5, 1]),
        (slow, None, [1, 4, 4, 3]),
        (slow, 2, [1, 4, 4, 3]),
        (slow, 100, [1, 11]),
    ):
        outputs = list(engine.stream(TEXT, params.clone(stream_interval=interval)))
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        assert "".join(output.outputs[0].text for output in outputs) == one(llm, TEXT, params).text


def test_a_truncated_prompt_keeps_its_last_tokens_and_room_for_output(llm):
    long = [10 + i % 300 for i in range(400)]
    for asked, kept in ((1, 1), (30, 30), (175, 175), (176, 175), (-1, 173)):
        [output] = generate(llm, [long], SHORT.clone(truncate_prompt_tokens=asked, max_tokens=3))
        assert output.prompt_token_ids == long[-kept:]
        assert output.outputs[0].token_ids == one(llm, long[-kept:], SHORT.clone(max_tokens=3)).token_ids
    [output] = generate(llm, [[5, 6, 7]], SHORT.clone(truncate_prompt_tokens=100))
    assert output.prompt_token_ids == [5, 6, 7]


def test_a_prompt_truncated_on_the_right_keeps_its_first_tokens(llm):
    long = [10 + i % 300 for i in range(400)]
    for side, expected in (("right", long[:30]), ("left", long[-30:]), (None, long[-30:])):
        [output] = generate(llm, [long], SHORT.clone(truncate_prompt_tokens=30, truncation_side=side))
        assert output.prompt_token_ids == expected


def test_tokenization_kwargs_truncate_all_prompts(llm):
    long = [10 + i % 300 for i in range(100)]
    options = {"truncate_prompt_tokens": 7, "truncation_side": "right"}
    outputs = llm.generate([long, long[50:]], SHORT, use_tqdm=False, tokenization_kwargs=options)
    assert [output.prompt_token_ids for output in outputs] == [long[:7], long[50:57]]
    [bare] = llm.generate([TEXT], SHORT, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert bare.prompt_token_ids == llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    with pytest.raises(ValueError, match="tokenization_kwargs: padding is not supported by Quire yet"):
        llm.generate([TEXT], SHORT, use_tqdm=False, tokenization_kwargs={"padding": True})


@pytest.mark.plain("its function notes each text it is called with, also those that end with a rejected draft")
def test_functions_of_a_request_see_its_tokens_whatever_else_runs(checkpoints):
    seen: dict[int, list[Any]] = {}

    def remember(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.setdefault(prompt[0], []).append((len(prompt), output))
        return logits

    def only_seven(output: list[int], logits: Tensor) -> Tensor:
        made = torch.full_like(logits, -math.inf)
        made[7] = 0
        return made

    llm = make_llm(checkpoints.path("llama"), **TIGHT)
    texts = [[20 + i, *range(50, 90)] for i in range(10)]
    longer = SHORT.clone(max_tokens=30)
    params = [longer.clone(logits_processors=[remember, *([only_seven] if i % 3 == 0 else [])]) for i in range(9)]
    outputs = generate(llm, texts, [*params, longer])
    assert_preempted(llm)
    plain = generate(make_llm(checkpoints.path("llama")), texts, longer)
    for i, (output, other) in enumerate(zip(outputs, plain, strict=True)):
        made = output.outputs[0].token_ids
        assert made == ([7] * 30 if i in (0, 3, 6) else other.outputs[0].token_ids)
        if i < 9:
            assert seen[20 + i] == [(41, made[:count]) for count in range(30)]


# ---- logprobs of prompts


@pytest.mark.sampled(2)
@each_variant
@pytest.mark.parametrize("options", [{}, CHUNKED, TIGHT], ids=["roomy", "chunked", "tight"])
def test_logprobs_of_prompts_are_those_of_transformers(checkpoints, references, variant, options):
    llm = make_llm(checkpoints.path(variant), **options)
    texts = prompts(320, len(LENGTHS) + 4)
    params = [SHORT.clone(prompt_logprobs=i % 4, max_tokens=30) for i in range(len(texts))]
    outputs = generate(llm, texts, params)
    assert options is TIGHT or not llm.core.scheduler.stats.preemptions
    if options is TIGHT:
        assert_preempted(llm)
    for text, param, output in zip(texts, params, outputs, strict=True):
        first, *others = output.prompt_logprobs
        assert first is None
        rows = logits(references.model(variant), text).log_softmax(-1)[:-1]
        check_logprobs(others, rows, text[1:], param.prompt_logprobs)


def test_a_request_with_prompt_logprobs_writes_the_prefix_cache_and_does_not_read_it(llm):
    text = list(range(100, 150))
    llm.reset_prefix_cache()
    for params, cached in (
        (SHORT.clone(prompt_logprobs=1), 0),
        (SHORT.clone(prompt_logprobs=1), 0),
        (SHORT, 48),
        (SHORT.clone(skip_reading_prefix_cache=True), 0),
    ):
        [output] = generate(llm, [text], params)
        assert output.num_cached_tokens == cached
        assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)


def test_the_logprobs_of_a_prompt_are_computed_once_for_all_its_completions(llm):
    text = list(range(150, 200))
    llm.reset_prefix_cache()
    params = SamplingParams(n=3, seed=4, max_tokens=5, prompt_logprobs=2, ignore_eos=True)
    before = llm.core.scheduler.stats.prefix_hits
    [output] = generate(llm, [text], params)
    assert len(output.prompt_logprobs) == 50
    assert llm.core.scheduler.stats.prefix_hits - before == 2 * 48
    assert [c.token_ids for c in output.outputs] == [
        one(llm, text, params.clone(n=1, seed=4 + i, prompt_logprobs=None)).token_ids for i in range(3)
    ]


def test_of_a_request_that_is_aborted_within_its_prompt_nothing_is_left_for_the_next_in_its_row(checkpoints):
    llm = make_llm(checkpoints.path("llama"), max_num_batched_tokens=16, max_num_seqs=1)
    params = SHORT.clone(prompt_logprobs=1)
    text = list(range(60, 110))
    llm.core.add_request(llm.processor.process("gone", text[::-1], params).core_requests[0])
    assert llm.core.step() == []
    llm.core.abort_requests(["gone"])
    [output] = generate(llm, [text], params)
    assert len(output.prompt_logprobs) == 50
    assert output.prompt_logprobs == generate(llm, [text], params)[0].prompt_logprobs


def test_decoded_tokens_of_a_prompt_make_up_its_text(llm):
    text = "naïve café, señor €"
    [output] = generate(llm, [text], SHORT.clone(prompt_logprobs=0))
    ids = output.prompt_token_ids
    decoded = [made[token].decoded_token for made, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    assert llm.get_tokenizer().decode(ids[:1]) + "".join(decoded) == text
    [output] = generate(llm, [text], SHORT.clone(prompt_logprobs=0, logprobs=1, detokenize=False))
    assert output.outputs[0].text == ""
    places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert {logprob.decoded_token for place in places for logprob in place.values()} == {None}


def test_a_character_that_the_prompt_began_is_decoded_where_the_output_ends_it(llm):
    encoded = llm.get_tokenizer().encode("€", False)
    assert len(encoded) > 1
    params = SHORT.clone(max_tokens=1, logprobs=0, allowed_token_ids=encoded[-1:])
    [made] = one(llm, encoded[:-1], params).logprobs
    assert made[encoded[-1]].decoded_token == "€"


# ---- what a stream yields


def test_deltas_put_together_are_the_whole_output(llm):
    params = SamplingParams(n=3, seed=3, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=0, stop="e")
    [whole] = generate(llm, [TEXT], params)
    parts = list(llm.stream(TEXT, params.clone(output_kind=RequestOutputKind.DELTA)))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[0].prompt_logprobs == whole.prompt_logprobs
    assert all(part.prompt_logprobs is None for part in parts[1:])
    for index, completion in enumerate(whole.outputs):
        mine = [c for part in parts for c in part.outputs if c.index == index]
        assert "".join(c.text for c in mine) == completion.text
        assert [token for c in mine for token in c.token_ids] == completion.token_ids
        assert [made for c in mine for made in c.logprobs] == completion.logprobs
        assert mine[-1].cumulative_logprob == completion.cumulative_logprob
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]


def test_deltas_that_nobody_took_yet_are_not_lost(llm):
    """Another caller's steps bring tokens, too."""
    stream = llm.stream(TEXT, SHORT.clone(output_kind=RequestOutputKind.DELTA))
    parts = [next(stream)]
    generate_beside = llm.generate("other", SHORT.clone(max_tokens=5), use_tqdm=False)
    assert len(generate_beside[0].outputs[0].token_ids) == 5
    parts += stream
    assert len(parts) < 12
    assert [token for part in parts for token in part.outputs[0].token_ids] == one(llm, TEXT).token_ids


def test_final_only_is_one_output(llm):
    [only] = llm.stream(TEXT, SHORT.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    assert only.finished
    assert only.outputs[0].token_ids == one(llm, TEXT).token_ids


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_generate_returns_finished_outputs_whatever_the_kind(llm, kind):
    params = SHORT.clone(output_kind=kind)
    made, expected = (replace(one(llm, TEXT, p), spec_decode_metrics=None) for p in (params, SHORT))
    assert made == expected
    assert params.output_kind is kind, "the caller's own parameters stay as they were"


# ---- text


def test_special_tokens_are_shown_or_not(llm):
    """One after the other: </s>, "a", <|end|>, <|end|>."""
    wanted = [EOS, *llm.get_tokenizer().encode("a", False), END, END]
    params = SHORT.clone(max_tokens=4)
    for skip, spaces, text in (
        (True, True, "a"),
        (False, True, "</s>a<|end|><|end|>"),
        (False, False, "</s>a<|end|><|end|>"),
    ):
        force = [lambda output, logits: torch.zeros_like(logits).index_fill_(0, torch.tensor([wanted[len(output)]]), 9)]
        completion = one(
            llm,
            TEXT,
            params.clone(skip_special_tokens=skip, spaces_between_special_tokens=spaces, logits_processors=force),
        )
        assert completion.token_ids == wanted
        assert completion.text == text
    assert one(llm, TEXT, params.clone(logits_processors=force, ignore_eos=False)).text == ""
    shown = params.clone(
        logits_processors=force, ignore_eos=False, include_stop_str_in_output=True, skip_special_tokens=False
    )
    assert one(llm, TEXT, shown).text == "</s>"


def test_a_penalty_that_the_checkpoint_recommends_is_applied(llm, checkpoints, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(checkpoints.path("llama"), path)
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False, "repetition_penalty": 1.7}))
    params = make_llm(path).get_default_sampling_params()
    assert params.repetition_penalty == 1.7


def test_a_stream_of_deltas_tells_the_prompts_logprobs_once_whichever_completion_speaks_first():
    prompt_logprobs = [None, {5: Logprob(-1.0)}]
    output = RequestOutput("a", None, [4, 5], [CompletionOutput(i, "", []) for i in range(2)], prompt_logprobs=[None])
    reader = DeltaReader()
    output.outputs[1].token_ids.append(7)
    assert reader.read(output).prompt_logprobs is None
    output.outputs[0].token_ids.append(8)
    output.prompt_logprobs = prompt_logprobs
    assert reader.read(output).prompt_logprobs == prompt_logprobs
    output.outputs[0].token_ids.append(9)
    assert reader.read(output).prompt_logprobs is None
