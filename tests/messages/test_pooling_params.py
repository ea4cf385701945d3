"""Pooling parameters are checked, travel to the worker in place of sampling parameters, and are refused there."""

from __future__ import annotations

import msgspec
import pytest

from quire.checkpoints.hub import bundled_model
from quire.messages.engine import AddRequests, CoreOrder, EngineCoreRequest, FinishReason
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest
from support.engines import assert_nothing_is_left, core_request, finish, make_llm


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"task": "summarize"}, ValueError, "task must be one of embed, classify"),
        ({"dimensions": 0}, ValueError, "dimensions must be greater than 0, got 0"),
        ({"dimensions": True}, TypeError, "dimensions must be an integer"),
        ({"task": "classify", "dimensions": 8}, ValueError, "dimensions is for embeddings"),
        ({"use_activation": 1}, TypeError, "use_activation must be True or False"),
        ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens must be -1 or at least 1"),
        ({"truncate_prompt_tokens": 1.5}, TypeError, "truncate_prompt_tokens must be an integer"),
        ({"skip_reading_prefix_cache": "no"}, TypeError, "skip_reading_prefix_cache must be True or False"),
        ({"extra_kwargs": []}, TypeError, "extra_kwargs must be a dict"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(fields, error, message):
    with pytest.raises(error, match=message):
        PoolingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"task": "embed"}, True),
        ({"task": "token_embed"}, False),
        ({"task": "token_embed", "skip_reading_prefix_cache": False}, True),
        ({"skip_reading_prefix_cache": True}, False),
    ],
)
def test_tasks_of_each_token_compute_the_whole_prompt(fields, reads):
    assert PoolingParams(**fields).reads_prefix_cache is reads


def pooling_request(request_id: str = "pools", **fields: object) -> EngineCoreRequest:
    params = {"sampling_params": None, "pooling_params": PoolingParams(task="embed", dimensions=8), **fields}
    return EngineCoreRequest(request_id, [5, 9, 2] * 20, seed=0, max_tokens=0, **params)


def test_a_message_carries_either_kind_of_parameters():
    for params in ({}, {"sampling_params": SamplingParams(top_k=3), "pooling_params": None}):
        request = pooling_request(**params)
        order = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequests([request])), type=CoreOrder)
        assert order == AddRequests([request])
    new = NewRequest("pools", 0, [5], 1, 0, None, 0, pooling_params=PoolingParams())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=NewRequest) == new


@pytest.mark.parametrize("params", [{"sampling_params": SamplingParams()}, {"pooling_params": None}], ids=str)
def test_a_request_has_exactly_one_kind_of_parameters(params):
    core = make_llm(bundled_model()).core
    with pytest.raises(ValueError, match="request pools: give either sampling_params or pooling_params"):
        core.add_request(pooling_request(**params))
    assert_nothing_is_left(core)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_does_not_pool_refuses_the_request_and_goes_on_with_others(depth):
    """With a prompt that takes several steps, too."""
    llm = make_llm(bundled_model(), async_scheduling=depth == 2, max_num_batched_tokens=32)
    core, prompt = llm.core, [7, 8, 9] * 11
    core.add_request(core_request(llm, "alone", prompt))
    wanted = finish(core)["alone"]
    core.add_request(core_request(llm, "before", prompt))
    core.add_request(pooling_request())
    core.add_request(core_request(llm, "after", prompt))
    made = finish(core)
    assert made["before"] == made["after"] == wanted
    token_ids, finish_reason, reason = made["pools"]
    assert (token_ids, finish_reason) == ([], FinishReason.ERROR.value)
    assert "this model does not pool" in str(reason)
    assert_nothing_is_left(core)
