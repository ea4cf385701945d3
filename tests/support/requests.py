"""Requests of many kinds, and what they say, to compare engines that must say the same."""

from __future__ import annotations

import random
from typing import Any

from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, _rounded(c.logprobs))
        for output in outputs
        for c in output.outputs
    ]


def _rounded(logprobs: Any) -> Any:
    """Likely tokens by place. Values are compared to three digits, since sums of other lengths round differently."""
    return logprobs and [{token: round(lp.logprob, 3) for token, lp in place.items()} for place in logprobs]


def requests(count: int) -> list[SamplingParams]:
    """Requests of many kinds. Those that are random have a seed."""
    draw = random.Random(5)
    temperatures = [draw.choice([0, 0, 0.6, 1.2]) for _ in range(count)]
    return [
        SamplingParams(
            temperature=temperatures[i],
            top_p=draw.choice([1, 0.9]),
            top_k=draw.choice([0, 20]),
            min_p=draw.choice([0, 0.05]),
            seed=i,
            max_tokens=draw.randint(1, 60),
            min_tokens=draw.choice([0, 1]),
            stop_token_ids=draw.sample(range(4, 300), draw.choice([0, 3])),
            ignore_eos=draw.random() < 0.5,
            logprobs=draw.choice([None, 2]),
            repetition_penalty=draw.choice([1, 1.3]),
            n=draw.choice([1, 2]) if temperatures[i] else 1,
            presence_penalty=draw.choice([0, 0.5]),
            logit_bias=draw.choice([None, {7: 3.0}]),
            bad_words=draw.choice([[], ["the"]]),
        )
        for i in range(count)
    ]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "colours"],
    "additionalProperties": False,
}


def with_grammars(count: int) -> list[SamplingParams]:
    """Requests of which two in three have a grammar. Those that are random have a seed."""
    return [
        SamplingParams(
            temperature=0.9 * (i % 2),
            seed=i,
            max_tokens=60,
            logprobs=2 if i == 3 else None,
            structured_outputs=StructuredOutputsParams(json=SCHEMA) if i % 3 else None,
        )
        for i in range(count)
    ]
