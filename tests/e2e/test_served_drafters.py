"""A server of a checkpoint of the library speculators: the target answers, the head drafts, requests see how well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError
from support.server_process import Server

pytestmark = pytest.mark.slow

PROMPT = "Tom has a cat. The cat likes Tom. Tom likes the"
ASKED = {"return_spec_decode_metrics": True, "ignore_eos": True}


def write_speculators_head(path: Path, verifier: str | None) -> Path:
    """An EAGLE-3 head for the bundled model, as the library writes it, with random weights and half the vocabulary."""
    target = json.loads((bundled_model() / "config.json").read_text())
    size, mlp, vocab = target["hidden_size"], 64, target["vocab_size"] // 2
    heads, kv_heads = (target[name] * target["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = {"q_proj": (heads, 2 * size), "k_proj": (kv_heads, 2 * size), "v_proj": (kv_heads, 2 * size)}
    sizes: dict[str, tuple[int, ...]] = {
        **{f"layers.0.self_attn.{name}": shape for name, shape in attention.items()},
        "layers.0.self_attn.o_proj": (size, heads),
        "layers.0.mlp.gate_proj": (mlp, size),
        "layers.0.mlp.up_proj": (mlp, size),
        "layers.0.mlp.down_proj": (size, mlp),
        "fc": (size, 3 * size),
        "lm_head": (vocab, size),
        **{f"layers.0.{name}": (size,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm": (size,),
    }
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) / size**0.5 for name, shape in sizes.items()}
    tensors["d2t"], tensors["t2d"] = torch.arange(vocab), torch.arange(2 * vocab) % 2 == 0
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    layers = {**target, "num_hidden_layers": 1, "intermediate_size": mlp, "model_type": "llama"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": target["architectures"], "name_or_path": verifier},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": vocab,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators_head(tmp_path_factory.mktemp("speculators") / "head", str(bundled_model()))


@pytest.fixture(scope="module")
def server(head: Path) -> Iterator[Server]:
    with Server(str(head), "--dtype", "float32", "--speculative-config.adaptive", "false") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected_text(max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return LLM(dtype="float32").generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def complete(client: openai.OpenAI, head: Path, **fields: Any) -> Any:
    extra = fields.pop("extra", ASKED)
    return client.completions.create(
        model=str(head), prompt=PROMPT, **{"max_tokens": 30, "temperature": 0, **fields}, extra_body=extra
    )


def test_the_target_answers_by_the_name_that_the_user_typed(server: Server, client: openai.OpenAI, head: Path):
    assert [model.id for model in client.models.list()] == [str(head)]
    assert f"{head} is a drafter for {bundled_model()}, which is loaded with it" in server.log
    assert complete(client, head).choices[0].text == expected_text(30)
    positions = re.findall(r"num_accepted_tokens_per_pos_total\{.*position=\"(\d)\"", server.get("/metrics")[1])
    assert positions == ["0", "1", "2"]  # the head's config says how many drafts there are
    assert server.metric("spec_decode_num_draft_tokens_total") > 30


def test_a_request_that_asks_sees_what_became_of_its_drafts(client: openai.OpenAI, head: Path):
    answer = complete(client, head)
    found = answer.metrics["speculative_decoding"]
    assert found["num_spec_tokens"] == 3
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"]) > 0
    assert found["num_spec_steps"] + found["num_accepted_draft_tokens"] <= 30
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == found["num_accepted_draft_tokens"]
    assert details.rejected_prediction_tokens == found["num_draft_tokens"] - found["num_accepted_draft_tokens"]
    silent = complete(client, head, extra={})
    assert silent.metrics is None
    assert silent.usage.completion_tokens_details is None


def test_a_stream_ends_with_them(client: openai.OpenAI, head: Path):
    chunks = list(complete(client, head, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].metrics == complete(client, head).metrics
    assert chunks[-1].usage.completion_tokens_details.rejected_prediction_tokens > 0
    assert not any(hasattr(chunk, "metrics") for chunk in chunks[:-1])


def test_of_several_completions_only_the_sums_are_told(client: openai.OpenAI, head: Path):
    answer = complete(client, head, n=2, temperature=0.8, seed=1)
    assert answer.metrics is None
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 30


def test_chats_and_token_ids_have_them_too(server: Server, client: openai.OpenAI, head: Path):
    chat = client.chat.completions.create(
        model=str(head), messages=[{"role": "user", "content": "Hello"}], max_tokens=12, extra_body=ASKED
    )
    assert chat.metrics["speculative_decoding"]["num_spec_tokens"] == 3  # type: ignore[attr-defined]
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 12, "ignore_eos": True}}
    found = client.with_options(base_url=server.url).post(
        "/inference/v1/generate", body={**body, "return_spec_decode_metrics": True}, cast_to=object
    )
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] > 0  # type: ignore[index]


def test_the_option_asks_for_all_requests(head: Path):
    options = ["--dtype", "float32", "--per-request-spec-decode-metrics", "detailed", "--spec-tokens", "2"]
    with Server(str(head), *options, "--speculative-config.adaptive", "false") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = complete(client, head, extra={"ignore_eos": True}).metrics["speculative_decoding"]
    assert found["num_spec_tokens"] == 2  # the user's number, not that of the head's config
    assert len(found["per_step_accepted"]) == len(found["per_step_drafted"]) == found["num_spec_steps"]
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]


def test_offline_it_is_the_same(head: Path):
    llm = LLM(head, dtype="float32", speculative_config={"adaptive": False})
    output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)[0]
    assert output.outputs[0].text == expected_text(30)
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None
    assert metrics.num_draft_tokens > 30


@pytest.mark.parametrize(
    ("given", "method", "most"),
    [
        ({"method": "eagle3"}, "eagle3", 3),
        ({"method": "suffix"}, "suffix", 24),
        ({"model": "quire-demo/medusa"}, "medusa", 5),
    ],
)
def test_a_method_or_a_model_that_the_user_names(head: Path, given, method, most):
    """The head serves its own method. Another one takes its place, with the number of drafts that is its own."""
    speculation = LLM(
        head, dtype="float32", speculative_config={**given, "adaptive": False}
    ).config.scheduler.speculation
    assert speculation is not None
    assert (speculation.method, speculation.num_speculative_tokens) == (method, most)
    assert (speculation.model == str(head)) == (method == "eagle3")


@pytest.mark.parametrize("is_head", [True, False])
def test_a_method_whose_drafter_is_not_known(head: Path, is_head: bool):
    with pytest.raises(ConfigError, match="medusa needs model, the directory or name of the drafter"):
        LLM(head if is_head else None, speculative_config={"method": "medusa", "num_speculative_tokens": 2})


def test_a_head_that_does_not_name_its_target_says_what_to_do(tmp_path: Path):
    path = write_speculators_head(tmp_path / "head", None)
    with pytest.raises(ConfigError, match=r"does not name its target .* serve the target with --speculative-config"):
        LLM(path)


def test_the_drafter_is_shared_by_all_ranks_or_by_none(head: Path):
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size must be 1 or tensor_parallel_size \(1\), got 2"):
        LLM(speculative_config={"model": str(head), "draft_tensor_parallel_size": 2})


def test_a_number_of_drafts_alone_does_not_say_who_makes_them():
    with pytest.raises(ConfigError, match="method and model are missing"):
        LLM(spec_tokens=3)
