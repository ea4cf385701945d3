"""What vLLM's users reach through an LLM: priorities, metrics, counts, the tokenizer, progress bars."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.observability.reader import Counter, Gauge, Histogram
from support.checkpoints import write_checkpoint
from support.engines import make_llm

pytestmark = pytest.mark.texts

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return make_llm(path)


def test_priorities_order_prompts_and_conversations(path: Path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = make_llm(path, max_num_seqs=1, scheduling_policy="priority", chat_template=template)
    chats = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    priority = [2, 0, 1]
    for outputs in (
        engine.generate(PROMPTS, FOUR, use_tqdm=False, priority=priority),
        engine.chat(chats, FOUR, use_tqdm=False, priority=priority),
    ):
        first = [output.metrics.first_token_ts for output in outputs]
        assert sorted(range(3), key=first.__getitem__) == [1, 2, 0]
    with pytest.raises(ValueError, match="there are 3 prompts but 2 priorities"):
        engine.chat(chats, FOUR, priority=[1, 2])


@pytest.mark.plain("counts the outputs of a stream")
def test_an_output_says_when_things_happened(llm: LLM):
    wall, before = time.time(), time.monotonic()
    for output in llm.generate(PROMPTS, FOUR.clone(n=2, temperature=1.0), use_tqdm=False):
        stats = output.metrics
        assert stats.num_generation_tokens == 8
        assert wall <= stats.arrival_time <= time.time()
        moments = [before, stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts]
        assert moments == sorted(moments)
        assert stats.last_token_ts <= time.monotonic()
        assert stats.first_token_latency == pytest.approx(stats.first_token_ts - stats.queued_ts)
    seen = [output.metrics.num_generation_tokens for output in llm.stream(PROMPTS[0], FOUR)]
    assert seen == [1, 2, 3, 4]


def test_metrics_are_kept_on_demand(path: Path, llm: LLM):
    with pytest.raises(ValueError, match="disable_log_stats=False"):
        llm.get_metrics()
    engine = LLM(path, dtype="float32", max_model_len=64, disable_log_stats=False, metrics_prefix="vllm")
    engine.generate(PROMPTS, FOUR, use_tqdm=False)
    for _ in engine.stream(PROMPTS[0], FOUR):
        break  # which aborts it
    metrics = engine.get_metrics()
    assert all(metric.name.startswith("vllm:") and metric.labels["model_name"] == str(path) for metric in metrics)
    plain = {metric.name: metric for metric in metrics if set(metric.labels) == {"model_name", "engine"}}
    assert plain["vllm:prompt_tokens"] == Counter("vllm:prompt_tokens", plain["vllm:prompt_tokens"].labels, 9 + 3)
    assert isinstance(plain["vllm:num_requests_running"], Gauge)
    lengths = plain["vllm:request_generation_tokens"]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum) == (4, 13)
    assert lengths.buckets["+Inf"] == 4
    assert lengths.buckets["5.0"] == 4
    assert lengths.buckets["2.0"] == 1
    ended = {m.labels["finished_reason"]: m.value for m in metrics if m.name == "vllm:request_success"}
    assert (ended["length"], ended["abort"]) == (3, 1)


def test_the_engine_counts_unfinished_requests_and_knows_its_model(llm: LLM, path: Path):
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    stream = llm.stream(PROMPTS[0], FOUR)
    next(stream)
    assert engine.get_num_unfinished_requests() == 1
    assert engine.has_unfinished_requests()
    stream.close()
    assert not engine.has_unfinished_requests()
    config = engine.model_config
    assert (config.model, config.max_model_len) == (str(path), llm.max_model_len)
    assert str(config.dtype) == "torch.float32"
    assert config.get_vocab_size() == llm.processor.vocab_size


def test_the_tokenizer_is_that_of_transformers(llm: LLM, path: Path):
    from transformers import AutoTokenizer

    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(path)
    text = "Once upon a time </s>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    assert llm.generate(text, FOUR, use_tqdm=False)[0].prompt_token_ids == ours.encode(text)
    assert ours is llm.get_tokenizer()


def test_a_progress_bar_of_the_callers_own(llm: LLM):
    bars = []

    class Bar(tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, disable=True)
            bars.append(options)

    llm.generate(PROMPTS, FOUR, use_tqdm=Bar)
    assert [bar["total"] for bar in bars] == [3]


def test_arguments_of_vllm_are_taken_at_their_neutral_values(llm: LLM):
    llm.generate(PROMPTS, FOUR, use_tqdm=False, lora_request=None, tokenization_kwargs={})
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest, got str"):
        llm.generate(PROMPTS, FOUR, use_tqdm=False, lora_request="adapter")
    assert llm.reset_prefix_cache() is True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400])
@pytest.mark.parametrize(
    "field",
    """top_k max_tokens min_tokens seed logprobs prompt_logprobs truncate_prompt_tokens n temperature top_p min_p
    presence_penalty frequency_penalty repetition_penalty stop_token_ids logit_bias""".split(),
)
def test_an_integer_that_is_too_large_is_an_error_and_not_the_end_of_the_engine(llm: LLM, field, value):
    given = {"stop_token_ids": [value], "logit_bias": {1: value}}.get(field, value)
    with pytest.raises(ValueError, match=f"{field} must fit in 64 bits"):
        SamplingParams(**{field: given})


def test_arguments_that_cannot_be_sent_to_another_process_are_an_error_that_names_them(llm: LLM, monkeypatch):
    monkeypatch.setattr(llm.processor, "in_process", False)
    endless: dict = {}
    endless["again"] = endless
    for extra in ({"a": 2**64}, {"a": object()}, {"a": "\ud800"}, endless):
        with pytest.raises(ValueError, match="extra_args cannot be sent to the processes of the model"):
            llm.generate(PROMPTS, FOUR.clone(extra_args=extra), use_tqdm=False)
    llm.generate(PROMPTS, FOUR.clone(extra_args={"a": 2**63}), use_tqdm=False)


@pytest.mark.parametrize("priority", [2**63, "first", 1.5, None])
def test_a_priority_must_be_an_integer_that_other_processes_take(llm: LLM, priority):
    with pytest.raises(ValueError, match="priority must be an integer of 64 bits"):
        llm.generate(PROMPTS, FOUR, use_tqdm=False, priority=[0, priority, 0])


def test_documents_reach_the_chat_template_and_arguments_of_the_renderer_are_refused(llm: LLM):
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    messages, options = [{"role": "user", "content": "one"}], {"use_tqdm": False, "chat_template": template}
    [output] = llm.chat(messages, chat_template_kwargs={"documents": [{"text": "two "}]}, **options)
    assert output.prompt == "two one"
    with pytest.raises(ValueError, match="chat_template_kwargs cannot set 'tools'"):
        llm.chat(messages, chat_template_kwargs={"tools": []}, **options)
