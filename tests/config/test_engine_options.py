"""Options of vLLM that change what an engine does."""

from __future__ import annotations

import json

import pytest

from quire.checkpoints.formats.config import check_format
from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.frontend import Frontend
from quire.messages.sampling_params import SamplingParams
from support.checkpoints import MAX_POSITIONS, Checkpoints
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.quantized import FORMATS, write_quantized


@pytest.fixture
def path(checkpoints: Checkpoints):
    return checkpoints.path("llama")


@pytest.mark.parametrize("auto", ["auto", -1, "-1"])
def test_the_longest_request_that_fits_memory_can_be_found_out(path, auto):
    llm = make_llm(path, max_model_len=auto, num_gpu_blocks_override=6)
    assert llm.max_model_len == 5 * 16
    [output] = generate(llm, [[5] * 70], GREEDY.clone(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 10
    with pytest.raises(ValueError, match="max_model_len is 80"):
        generate(llm, [[5] * 80])
    assert make_llm(path, max_model_len=auto).max_model_len == MAX_POSITIONS


def test_a_sliding_window_can_be_the_longest_request(checkpoints):
    path = checkpoints.path("mistral-window-20")
    window = json.loads((path / "config.json").read_text())["sliding_window"]
    assert make_llm(path, disable_sliding_window=True, max_model_len=None).max_model_len == window
    with pytest.raises(ConfigError, match=f"is more than the {window} tokens of the model's sliding window"):
        make_llm(path, disable_sliding_window=True, max_model_len=window + 1)


def test_default_sampling_parameters_come_from_another_directory(path, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    params = make_llm(path, generation_config=str(tmp_path)).get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.25, 7)
    with pytest.raises(ConfigError, match="must be 'auto', 'vllm' or a directory with a generation_config"):
        make_llm(path, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_single_default_sampling_parameters_can_be_overridden(path, source):
    overrides = {"temperature": 0.125, "max_new_tokens": 3}
    llm = make_llm(path, generation_config=source, override_generation_config=overrides)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.125, 3)
    with pytest.raises(ConfigError, match="override_generation_config cannot be used: temperature must be"):
        make_llm(path, override_generation_config={"temperature": -1})


@pytest.mark.parametrize(
    ("option", "config", "is_gguf"),
    [
        ("awq", {"quantization_config": {"quant_method": "awq"}}, False),
        ("awq_marlin", {"quantization_config": {"quant_method": "awq"}}, False),
        ("gptq_marlin", {"quantization_config": {"quant_method": "gptq"}}, False),
        ("marlin", {"quantization_config": {"quant_method": "marlin"}}, False),
        ("fp8", {"quantization_config": {"quant_method": "fp8"}}, False),
        ("compressed-tensors", {"compression_config": {"format": "pack-quantized"}}, False),
        ("auto_round", {"quantization_config": {"quant_method": "auto-round"}}, False),
        ("gguf", {}, True),
        ("int4", {}, False),
        (None, {"quantization_config": {"quant_method": "awq"}}, False),
    ],
)
def test_a_format_that_is_the_checkpoints_is_accepted(option, config, is_gguf):
    check_format(option, config, is_gguf)


@pytest.mark.parametrize(
    ("option", "config", "message"),
    [
        ("gptq", {"quantization_config": {"quant_method": "awq"}}, "the checkpoint, which is quantized with 'awq'"),
        ("awq", {}, "this one is not quantized; leave it out, or let int8, int4 or fp8 quantize the weights"),
        ("gguf", {}, "this one is not quantized"),
        ("quark", {}, "quantization='quark' is not supported by Quire yet; supported: int8, int4, "),
    ],
)
def test_a_format_that_is_not_the_checkpoints_is_an_error_that_names_its_own(option, config, message):
    with pytest.raises(ConfigError, match=message):
        check_format(option, config, is_gguf=False)


def test_an_engine_checks_the_format(path, checkpoints, tmp_path):
    with pytest.raises(ConfigError, match="quantization='awq' names the format of a quantized checkpoint"):
        make_llm(path, quantization="awq")
    quantized, _ = write_quantized(checkpoints.path("llama-gqa4-llama3-old"), tmp_path, FORMATS["fp8"])
    expected = tokens_of(generate(make_llm(quantized), ["a"]))
    assert tokens_of(generate(make_llm(quantized, quantization="fp8"), ["a"])) == expected
    with pytest.raises(ConfigError, match=r"'compressed-tensors' does not fit the checkpoint, which is .* 'fp8'"):
        make_llm(quantized, quantization="compressed-tensors")


def test_the_type_of_the_cache_may_be_named_as_vllm_does(path):
    assert EngineConfig.create(kv_cache_dtype="fp8_e4m3").cache.kv_cache_dtype == "fp8"
    named = make_llm(path, dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert tokens_of(generate(named, ["a"])) == tokens_of(generate(make_llm(path, dtype="bfloat16"), ["a"]))
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16' needs dtype='float16'"):
        EngineConfig.create(kv_cache_dtype="float16")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "taken"), [("FLASH_ATTN", "cpu"), ("TRITON_ATTN", "cpu"), ("flashinfer", "cpu"), ("CPU_ATTN", None)]
)
def test_an_attention_backend_of_vllms_is_a_preference(path, name, taken, caplog):
    expected = tokens_of(generate(make_llm(path), ["a"]))
    caplog.clear()
    assert tokens_of(generate(make_llm(path, attention_backend=name), ["a"])) == expected
    warned = f"attention_backend={name} cannot be used here; {taken} takes its place" in caplog.text
    assert warned is (taken is not None)


@pytest.mark.parametrize("load_format", ["hf", "pt", "fastsafetensors"])
def test_formats_that_are_told_from_the_files_are_auto(load_format):
    assert EngineConfig.create(load_format=load_format) == EngineConfig.create()


def test_a_long_prompt_in_small_chunks_says_the_same(path):
    prompts = [[7] * 60, [5, 6] * 20]
    expected = tokens_of(generate(make_llm(path), prompts))
    assert tokens_of(generate(make_llm(path, long_prefill_token_threshold=9), prompts)) == expected
    assert tokens_of(generate(make_llm(path, chunked_prefill_size=9), prompts)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": False},
        {"max_itl": 50},
        {"long_prefill_token_threshold": 9},
        {"scheduling_policy": "priority"},
    ],
)
def test_how_requests_are_scheduled_does_not_change_seeded_texts(path, options):
    prompts = [[7] * 60, [5, 6] * 20, "a"]
    params = SamplingParams(temperature=1.0, seed=3, n=2, logprobs=1, max_tokens=8)
    expected = tokens_of(generate(make_llm(path), prompts, params))
    assert tokens_of(generate(make_llm(path, **options), prompts, params)) == expected


SHOWS_CONTENT = "{{ messages[0].content is string }} {{ greeting }}{{ messages[0].content }}"


def render(content, **options):
    given = {"chat_template": SHOWS_CONTENT, "load_format": "dummy", **options}
    frontend = Frontend(EngineConfig.create(**given), bundled_model(), in_process=True)
    return frontend, frontend.render_chat([{"role": "user", "content": content}], add_generation_prompt=False)


def test_templates_get_content_in_the_form_that_an_option_says():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    loop = "{% for part in messages[0].content %}{{ part.text }};{% endfor %}"
    assert render(parts, chat_template_content_format="string")[1] == "True a\nb"
    assert render("a", chat_template_content_format="openai")[1] == "False [{'type': 'text', 'text': 'a'}]"
    assert render(parts)[1] == "True a\nb"
    assert render("a", chat_template=loop)[1] == "a;"
    assert render(parts, chat_template=loop)[1] == "a;b;"
    assert render("ab", chat_template=loop, chat_template_content_format="string")[1] == ";;"


def test_chat_templates_have_default_variables_that_a_request_may_change():
    frontend, prompt = render("x", default_chat_template_kwargs='{"greeting": "Hello "}')
    assert prompt == "True Hello x"
    chat = [{"role": "user", "content": "x"}]
    assert frontend.render_chat(chat, add_generation_prompt=False, greeting="Bye ") == "True Bye x"
    with pytest.raises(ConfigError, match="default_chat_template_kwargs cannot set 'messages'"):
        render("x", default_chat_template_kwargs={"messages": []})


def test_batch_invariance_contradicts_kernels_whose_results_depend_on_the_batch(path):
    with pytest.raises(
        ValueError, match=r"batch_invariant contradicts kernels: .* linear=reference depend on the batch"
    ):
        make_llm(path, batch_invariant=True, kernels={"linear": "reference"})
    with pytest.raises(ValueError, match="attention_backend='reference' cannot be used: results of torch's products"):
        make_llm(path, batch_invariant=True, attention_backend="reference")
    with pytest.raises(ConfigError, match="batch_invariant and torch_compile exclude each other"):
        make_llm(path, batch_invariant=True, torch_compile=True)


def test_batch_invariance_changes_nothing_on_a_cpu(path):
    options = {"dtype": "bfloat16", "max_num_seqs": 2}
    plain = make_llm(path, **options)
    invariant = make_llm(path, batch_invariant=True, max_num_batched_tokens=4, **options)  # computes prompts in chunks
    assert tokens_of(generate(invariant, [[5] * 9], GREEDY)) == tokens_of(generate(plain, [[5] * 9], GREEDY))
    chosen = [llm.core.executor.runner.model.kernels.chosen for llm in (plain, invariant)]
    assert chosen[0] == chosen[1]
