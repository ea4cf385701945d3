"""Encoder-decoder models of texts against transformers: the same greedy tokens however the work is cut up.

The encoder's texts have other lengths in each request, and two requests have the same text. The decoder starts with the
model's own tokens, or with a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from quire.engine.llm import LLM
from quire.layers.attention_spec import Buckets
from quire.messages.sampling_params import SamplingParams
from quire.models import description
from support import mutations as m
from support.checkpoints import EOS
from support.encoder_decoders import BOS, KINDS, LONGEST, NUM_TOKENS, TEXTS, continuation, network, written
from support.encoder_ways import WAYS, Encoded, check_cross_blocks
from support.engines import assert_nothing_is_left, generate, make_llm, runner_of
from support.server import Host

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BEFORE = list(range(10, 60))
CASES: list[tuple[str, list[int] | None]] = [  # the encoder's text, and what follows the beginning of the decoder's
    *((text, None) for text in TEXTS),
    (TEXTS[1], BEFORE),
    (TEXTS[0], BEFORE[:20]),
]


@pytest.fixture(scope="module")
def expected(folder) -> Callable[[str], list[Any]]:
    from transformers import AutoTokenizer

    def make(kind: str) -> list[Any]:
        tokenizer, found = AutoTokenizer.from_pretrained(written(folder, kind)), []
        for text, more in CASES:
            decoder = KINDS[kind].beginning + (more or [])
            prompt: Any = text
            if more is not None:
                prompt = {"encoder_prompt": {"prompt": text}, "decoder_prompt": {"prompt_token_ids": decoder}}
            found.append((prompt, continuation(folder, kind, tokenizer(text)["input_ids"], decoder)))
        return found

    made: dict[str, list[Any]] = {}
    return lambda kind: made.get(kind) or made.setdefault(kind, make(kind))


def check(llm: LLM, expected: list[Any]) -> None:
    outputs = generate(llm, [prompt for prompt, _ in expected], PARAMS)
    for (_, wanted), output in zip(expected, outputs, strict=True):
        assert output.prompt_token_ids == wanted.prompt
        wanted.check(output.outputs[0].token_ids)


@pytest.fixture
def make(folder) -> Callable[..., LLM]:
    def make(kind: str, backend: str = "cpu", **options: Any) -> LLM:
        return make_llm(written(folder, kind), backend, **{"max_model_len": 100, "max_num_seqs": 8, **options})

    return make


@pytest.fixture(scope="module")
def bart(folder) -> LLM:
    return make_llm(written(folder, "bart"), max_model_len=100, max_num_seqs=8)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_greedy_tokens_equal_transformers(make, expected, kind, way):
    way(Encoded(partial(make, kind), check, expected(kind), LONGEST, few_blocks=24))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_encoders_results_and_the_log_probabilities_equal_transformers(folder, make, kind):
    llm, token_ids = make(kind), torch.tensor([BOS, *range(20, 90), EOS])
    decoder = [*KINDS[kind].beginning, *range(50, 110)]
    with torch.inference_mode():
        encoded = network(folder, kind).get_encoder()(input_ids=token_ids[None])
        logits = network(folder, kind)(encoder_outputs=encoded, decoder_input_ids=torch.tensor([decoder])).logits[0, -1]
        made = runner_of(llm).media.tower("text", {"ids": token_ids})
    torch.testing.assert_close(made, encoded.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    prompt: Any = {"encoder_prompt": token_ids.tolist(), "decoder_prompt": {"prompt_token_ids": decoder}}
    [output] = generate(llm, [prompt], PARAMS.clone(max_tokens=1, logprobs=5))
    assert output.outputs[0].logprobs is not None
    found = {token_id: entry.logprob for token_id, entry in output.outputs[0].logprobs[0].items()}
    wanted = logits.log_softmax(-1)
    assert set(found) == set(wanted.topk(5).indices.tolist())
    assert all(abs(logprob - wanted[token_id].item()) < 1e-3 for token_id, logprob in found.items())


def test_blocks_of_cross_attention_are_as_many_as_a_text_needs(make):
    llm = make("bart")
    assert llm.core.scheduler.kv.max_blocks(100) == -(-LONGEST // 16) + 7
    for length in (3, 16, 17, LONGEST):
        check_cross_blocks(llm, {"prompt_token_ids": [EOS] * length}, PARAMS, -(-length // 16))


def test_requests_that_are_aborted_leave_nothing(make, expected):
    """Before their first step, in the midst of their prompts, and later."""
    llm, cases = make("bart", num_gpu_blocks_override=40, max_num_batched_tokens=24), expected("bart")
    for number, (prompt, _) in enumerate(cases * 2):
        llm.core.add_request(llm.processor.process(f"{number}", prompt, PARAMS).core_requests[0])
        if number % 3:
            llm.core.step()
        llm.core.abort_requests([f"{number - number % 4}"])
    llm.core.abort_requests([f"{number}" for number in range(2 * len(cases))])
    assert_nothing_is_left(llm.core)
    check(llm, cases)


def test_a_prompt_may_be_given_in_many_forms(make):
    llm = make("bart")
    text, tokenizer = TEXTS[0], llm.get_tokenizer()
    ids, more = tokenizer.encode(text), tokenizer.encode("The cat", add_special_tokens=False)
    forms: list[tuple[Any, list[int]]] = [
        (text, []),
        (ids, []),
        ({"prompt": text}, []),
        ({"prompt_token_ids": ids, "cache_salt": "x"}, []),
        ({"encoder_prompt": text}, []),
        ({"encoder_prompt": {"prompt": text}, "decoder_prompt": None}, []),
        ({"encoder_prompt": ids, "decoder_prompt": ""}, []),
        ({"encoder_prompt": text, "decoder_prompt": "The cat"}, more),
        ({"encoder_prompt": text, "decoder_prompt": {"prompt": "The cat"}}, more),
        ({"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": [BOS, *more]}}, more),
        ({"encoder_prompt": text, "decoder_prompt": {"prompt_token_ids": [EOS, BOS, *more]}}, more),
    ]
    outputs = generate(llm, [form for form, _ in forms], PARAMS)
    for (form, behind), output in zip(forms, outputs, strict=True):
        assert output.prompt_token_ids == [EOS, BOS, *behind], form
        assert output.encoder_prompt_token_ids == ids, form
        assert output.outputs[0].token_ids == outputs[-1 if behind else 0].outputs[0].token_ids, form
    assert outputs[0].encoder_prompt == text
    assert outputs[0].prompt is None
    assert outputs[7].prompt == "The cat"


def test_several_completions_of_a_text_share_what_the_encoder_made_of_it(make):
    llm = make("bart")
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=8, ignore_eos=True)
    [output] = generate(llm, [TEXTS[1]], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert len(llm.core.scheduler.encoders._sizes) == 1


def test_a_long_text_is_cut_off_at_its_end_on_demand(make):
    llm = make("bart")
    long, params = TEXTS[1] * 3, PARAMS.clone(truncate_prompt_tokens=-1)
    [output] = generate(llm, [long], params)
    whole = llm.get_tokenizer().encode(long)
    assert output.encoder_prompt_token_ids == [*whole[: LONGEST - 1], EOS]
    [output] = generate(llm, [{"prompt_token_ids": whole}], PARAMS.clone(truncate_prompt_tokens=30))
    assert output.encoder_prompt_token_ids == whole[:30]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "prompt: the text for the encoder is empty"),
        ({"prompt_token_ids": []}, "prompt: the text for the encoder is empty"),
        ({"encoder_prompt": "", "decoder_prompt": "x"}, "encoder_prompt: the text for the encoder is empty"),
        ({"decoder_prompt": "x"}, "encoder_prompt must be a string"),
        ("A word. " * 100, f"prompt: it has .* tokens, and the model's encoder reads at most {LONGEST}"),
        ("x" * 100_000, f"characters has .* tokens or more, and the model's encoder reads at most {LONGEST}"),
        ({"encoder_prompt": {"prompt_token_ids": [5] * (LONGEST + 1)}}, f"encoder_prompt: it has {LONGEST + 1} tokens"),
        ({"encoder_prompt": "x", "decoder_prompt": {"prompt_token_ids": [5] * 100}}, "max_model_len is 100"),
        ({"prompt_token_ids": [310]}, "prompt: token id 310 is out of vocabulary"),
        ({"encoder_prompt": "x", "decoder_prompt": [-1]}, "decoder_prompt: token id -1 is out of vocabulary"),
        ({"encoder_prompt": ["x"]}, "encoder_prompt: prompt_token_ids must contain only integers"),
        ({"encoder_prompt": {"text": "x"}}, "prompt field 'text' cannot be used"),
        ({"encoder_prompt": "x", "prompt": "x"}, "prompt field 'prompt' cannot be used"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "prompt field 'multi_modal_data' cannot be used"),
        ({"prompt": "x", "prompt_embeds": 1}, "prompt field 'prompt_embeds' cannot be used"),
        ({"encoder_prompt": {"prompt": 3}}, "encoder_prompt: prompt must be a string, got int"),
    ],
)
def test_what_cannot_be_read_is_refused(bart, prompt, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        bart.generate([prompt], PARAMS, use_tqdm=False)


def test_truncation_that_cannot_be_is_refused(make):
    llm = make("bart")
    for options, reason in (
        ({"truncate_prompt_tokens": LONGEST + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "truncation_side must be right"),
    ):
        with pytest.raises(ValueError, match=reason):
            llm.generate(["x"], PARAMS.clone(**options), use_tqdm=False)


def test_models_without_an_encoder_refuse_its_prompts(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    for prompt in ({"encoder_prompt": "x", "decoder_prompt": "y"}, {"decoder_prompt": "y"}):
        with pytest.raises(ValueError, match="this model has no encoder of texts"):
            llm.generate([prompt], PARAMS, use_tqdm=False)


def test_options_and_configs_that_do_not_fit_are_refused(folder):
    with pytest.raises(ValueError, match="tie_word_embeddings=False is not supported"):
        LLM(str(written(folder, "bart")), dtype="float32", hf_overrides={"tie_word_embeddings": False})
    for overrides, reason in (
        ({"feed_forward_proj": "wide-relu"}, "feed_forward_proj='wide-relu' must be an activation, or one behind"),
        ({"feed_forward_proj": "gated-what"}, "activation 'what' is not supported"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets=3 must be at least 4"),
        ({"relative_attention_max_distance": 6}, "less than twice relative_attention_max_distance=6"),
        ({"relative_attention_num_buckets": 16}, "relative_attention_bias.weight has shape"),
        ({"d_kv": 16}, "has shape"),
    ):
        with pytest.raises(ValueError, match=reason):
            LLM(str(written(folder, "t5")), dtype="float32", hf_overrides=overrides)


def test_the_head_of_t5_is_tied_if_its_inputs_are_scaled_or_the_checkpoint_has_none(folder):
    """Old checkpoints with a head of their own have tie_word_embeddings=False. transformers 5 overwrites that, and
    saves scale_decoder_outputs in its place."""
    sizes = json.loads((written(folder, "t5") / "config.json").read_text())
    del sizes["scale_decoder_outputs"], sizes["tie_word_embeddings"]
    for given, architecture, wanted in (
        ({}, "T5", (True, 0.125)),
        ({"tie_word_embeddings": False}, "T5", (None, None)),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, "T5", (None, None)),
        ({"tie_word_embeddings": False}, "UMT5", (None, None)),
        ({"tie_word_embeddings": True}, "MT5", (None, None)),
    ):
        spec = description.spec_of({**sizes, **given, "architectures": [f"{architecture}ForConditionalGeneration"]})
        assert (spec.tie_embeddings, spec.logit_scale) == wanted


def of_encoder(mutate: m.SpecMutation) -> m.SpecMutation:
    return lambda spec: replace(spec, media=replace(spec.media, encoder=mutate(spec.media.encoder)))


MUTATIONS: list[tuple[str, str, m.SpecMutation]] = [
    ("bart", "norms before the branches", m.decoder(residual="cross")),
    ("mbart", "norms after the sums", m.decoder(residual="cross_post_norm")),
    ("bart", "norms exchanged", m.exchanged("attention_norm", "cross_norm")),
    ("mbart", "norms exchanged", m.exchanged("cross_norm", "mlp_norm")),
    ("mbart", "embedding scale", m.decoder(embedding_scale=None)),
    ("bart", "epsilon", m.norm(eps=0.1)),
    ("mbart", "GELU", m.mlp(activation="gelu")),
    ("bart", "an encoder with norms before the branches", of_encoder(m.decoder(residual="sequential"))),
    ("mbart", "an encoder with norms after the sums", of_encoder(m.decoder(residual="post_norm"))),
    ("mbart", "an encoder without the embedding's scale", of_encoder(m.decoder(embedding_scale=None))),
    ("bart", "an encoder with its norms exchanged", of_encoder(m.exchanged("attention_norm", "mlp_norm"))),
    ("mbart", "an encoder with windows", of_encoder(m.decoder(windows=lambda w: (8,) * len(w)))),
    ("t5", "scaled scores", m.attention(scale=None)),
    ("t5", "GELU", m.mlp(activation="gelu")),
    ("flan-t5", "other buckets", m.attention(buckets=Buckets(12, 8))),
    ("flan-t5", "a tied head", m.decoder(tie_embeddings=True)),
    ("umt5", "an encoder with other buckets", of_encoder(m.attention(buckets=Buckets(12, 8)))),
    ("mt5", "an encoder with scaled scores", of_encoder(m.attention(scale=None))),
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("kind", "mutate"), [pytest.param(k, f, id=f"{k}: {what}") for k, what, f in MUTATIONS])
def test_a_wrong_spec_is_found_out(make, expected, monkeypatch, kind, mutate):
    spec_of = description.spec_of
    monkeypatch.setattr(description, "spec_of", lambda config: mutate(spec_of(config)))
    llm = make(kind)
    outputs = generate(llm, [prompt for prompt, _ in expected(kind)], PARAMS)
    wanted = [continuation for _, continuation in expected(kind)]
    right = sum(
        o.outputs[0].token_ids[: w.certain] == w.token_ids[: w.certain] for o, w in zip(outputs, wanted, strict=True)
    )
    assert right <= len(wanted) // 2


def flip(bias: Any) -> None:
    bias.copy_(bias.flip(1))


LAYER_MUTATIONS: list[tuple[str, str, Callable[[Any], object]]] = [
    ("bart", "bias of the head", lambda runner: runner.model.lm_head.bias.zero_()),
    ("bart", "offset of positions", lambda runner: setattr(runner.model.positions, "offset", 0)),
    (
        "bart",
        "offset of the encoder's positions",
        lambda runner: setattr(runner.media.tower.model.positions, "offset", 0),
    ),
    ("t5", "no biases by distance", lambda runner: runner.model.layers[0].mixer.bias.zero_()),
    ("flan-t5", "no biases in the encoder", lambda runner: runner.media.tower.model.layers[0].mixer.bias.zero_()),
    ("flan-t5", "a mirrored encoder", lambda runner: flip(runner.media.tower.model.layers[0].mixer.bias)),
    (
        "umt5",
        "biases of the first layer",
        lambda runner: setattr(runner.model.layers[1].mixer, "bias", runner.model.layers[0].mixer.bias),
    ),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("kind", "mutate"), [pytest.param(kind, f, id=f"{kind}: {what}") for kind, what, f in LAYER_MUTATIONS]
)
def test_a_wrong_layer_is_found_out(make, expected, kind, mutate):
    llm = make(kind, "reference")
    mutate(runner_of(llm))
    with pytest.raises(AssertionError):
        check(llm, expected(kind))


@pytest.mark.slow
def test_completions_over_http_read_the_prompt_with_the_encoder(folder, expected):
    from openai import BadRequestError, OpenAI

    prompt, wanted = expected("bart")[1]
    host = Host(model=str(written(folder, "bart")), dtype="float32", max_model_len=100, max_num_seqs=4)
    try:
        client = OpenAI(base_url=f"{host.serve().url}/v1", api_key="none", max_retries=0, timeout=600)
        body = {"ignore_eos": True, "return_token_ids": True}
        settings: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0}
        made = client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, extra_body=body, **settings)
        wanted.check(made.choices[0].token_ids)
        assert made.usage.prompt_tokens == 2 + 104
        pieces = client.completions.create(
            prompt=prompt, max_tokens=NUM_TOKENS, stream=True, extra_body={"ignore_eos": True}, **settings
        )
        assert "".join(piece.choices[0].text for piece in pieces) == made.choices[0].text
        for wrong, reason in (("", "empty"), ("A word. " * 100, f"at most {LONGEST}")):
            with pytest.raises(BadRequestError, match=reason):
                client.completions.create(prompt=wrong, max_tokens=5, **settings)
        with pytest.raises(BadRequestError, match="chat template"):
            client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **settings)
    finally:
        host.close()
