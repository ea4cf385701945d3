"""Every field of vLLM 0.33's requests and sampling parameters: built, refused by name, or without effect."""

from __future__ import annotations

import pytest

from quire.messages.sampling_params import SamplingParams
from quire.server.protocol import WITHOUT_EFFECT, ChatRequest, CompletionRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"messages": MESSAGES}),
}
BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget echo"""
FIELDS = {
    "/v1/completions": f"{BOTH} prompt suffix prompt_embeds",
    "/v1/chat/completions": f"""{BOTH} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
    "/tokenize": """model prompt add_special_tokens return_token_strs messages add_generation_prompt chat_template
        continue_final_message chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
}
# A value that would change the answer, of each field that Quire refuses.
REFUSED = {"ec_transfer_params": {"a": 1}, "return_weight_versions": True, "watermarking": True}
# What vLLM's own clients send when they send every field at its default.
DEFAULTS = {
    "length_penalty": 1.0,
    "mm_payload": "tensors",
    "response_format": {"type": "text"},
    "return_mm_kwargs": True,
    "return_token_offsets": False,
    "return_weight_versions": False,
    "routed_experts_prompt_start": 0,
    "session_id": "a",
    "suffix": None,
    "thinking_token_budget": -1,
    "use_beam_search": False,
    "watermarking": None,
}
CASES = [(path, name) for path, names in FIELDS.items() for name in names.split()]
# Parameters that only offline users of vLLM can give; to make SamplingParams with them is an error that names them.
NOT_IN_SAMPLING_PARAMS = """watermarking prompt_logprob_token_ids prompt_logprob_start flat_logprobs skip_clone
    output_text_buffer_length routed_experts_prompt_start trace_decode_token_ids"""
SAMPLING_PARAMS = """n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval
    structured_outputs thinking_token_budget logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
    repetition_detection"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path}-{name}" for path, name in CASES])
def test_a_field_of_vllm_is_built_or_refused_or_has_no_effect(server, path, name):
    model, body = BODIES[path]
    assert (name in model.model_fields) + (name in REFUSED) + (name in WITHOUT_EFFECT) == 1
    if name in REFUSED:
        answer = server.post(path, {**body, name: REFUSED[name]})
        assert answer.status == 400, answer.body
        assert answer.error["param"] == name
        assert answer.error["message"].startswith(f"{name} is not supported")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_at_their_defaults_are_accepted(server, path, caplog):
    of_chats = {"include_reasoning": True, "parallel_tool_calls": True} if "chat" in path else {}
    answer = server.post(path, {**BODIES[path][1], **DEFAULTS, **of_chats})
    assert answer.status == 200, answer.body
    assert "Ignored a field" not in caplog.text


def test_reasoning_that_does_not_exist_may_be_left_out(server):
    path, (_, body) = "/v1/chat/completions", BODIES["/v1/chat/completions"]
    with_it, without = (
        server.post(path, {**body, "temperature": 0, "include_reasoning": include}).json["choices"]
        for include in (True, False)
    )
    assert with_it == without


def test_sampling_parameters_of_vllm_are_built_or_refused_by_name():
    for name in SAMPLING_PARAMS.split():
        assert name in SamplingParams.__struct_fields__
    for name in NOT_IN_SAMPLING_PARAMS.split():
        with pytest.raises(TypeError, match=f"'{name}'"):
            SamplingParams(**{name: 1})


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_vllm_does_not_have_is_unknown(path):
    kind, body = BODIES[path]
    assert kind.model_validate({**body, **dict.fromkeys(WITHOUT_EFFECT, 1), "surprise": 1}).unknown() == ["surprise"]
