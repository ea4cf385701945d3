"""Proposers for tests: what they propose is right, random, or as harmful as it can be.

make_llm(path, speculative_config=speculate("Perfect"))
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from quire.config.speculative import SpeculativeOptions
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.speculation.proposer import Text

PROPOSERS = ("Perfect", "Random", "Adversarial", "Mixed", "ngram", "suffix")

AHEAD = 32  # tokens that an oracle says at once, most of which it is asked for later
MOST_ANSWERS = 48  # of an oracle, for texts with the same beginning: sampled ones leave its greedy text again and again

TARGET = "QUIRE_TESTS_TARGET"  # an environment variable: the model of the engine that is started next, see `Oracle`


def speculate(name: str, most: int = 4) -> dict[str, Any]:
    """The option speculative_config, for one of PROPOSERS. It is not adaptive: these models are too small to gain."""
    options = {"num_speculative_tokens": most, "adaptive": False}
    if name == "ngram":
        return {"method": "ngram", **options, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if name == "suffix":
        return {"method": "suffix", **options}
    return {"method": "custom_class", **options, "model": f"support.proposers.{name}"}


def target_options(options: Mapping[str, Any]) -> str:
    """The value of TARGET for an engine with these options."""
    names = (
        "model",
        "tokenizer",
        "dtype",
        "quantization",
        "hf_overrides",
        "load_format",
        "max_model_len",
        "kv_cache_dtype",
    )
    return json.dumps({name: options[name] for name in names if options.get(name)}, default=str)


class Oracle:
    """An engine without speculation, of the same model, that says greedily what comes next.

    So a proposer can be right in tests that teach it no answers. Random requests say something else now and then.
    """

    def __init__(self, options: str) -> None:
        from quire.engine.llm import LLM  # here, since it takes a while, and few proposers need it

        small = {"max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20}
        self.llm = LLM(**json.loads(options), **small, speculative_config={})
        self._continued: deque[list[int]] = deque(maxlen=256)  # texts with what comes next, the latest first
        self._answers = Counter[tuple[int, ...]]()  # by the beginning of a text

    def __call__(self, text: Sequence[int], count: int) -> list[int]:
        text, room = list(text), max(0, self.llm.max_model_len - len(text))
        for line in self._continued:
            if len(line) >= len(text) + min(count, room) and line[: len(text)] == text:
                return line[len(text) : len(text) + count]
        return []

    def prepare(self, texts: Sequence[Sequence[int]], count: int) -> None:
        """Continue those of the texts together for which `count` tokens are not known yet."""
        longest = self.llm.max_model_len
        unknown = [
            list(text)
            for text in texts
            if self._answers[tuple(text[:16])] < MOST_ANSWERS
            and len(self(text, count)) < min(count, longest - len(text))
        ]
        self._answers.update(tuple(text[:16]) for text in unknown)
        params = [
            SamplingParams(temperature=0, max_tokens=min(AHEAD, longest - len(t)), ignore_eos=True, detokenize=False)
            for t in unknown
        ]
        for output in self.llm.generate(unknown, params, use_tqdm=False):
            self._continued.appendleft([*output.prompt_token_ids, *output.outputs[0].token_ids])


class Perfect:
    """Proposes what was said without speculation, once `learn` has been told of it, or else what an oracle says."""

    answers: ClassVar[dict[tuple[int, ...], list[list[int]]]] = {}  # by prompt
    asks = True  # whether it asks the oracle

    @classmethod
    def learn(cls, outputs: Sequence[RequestOutput]) -> None:
        cls.answers.clear()
        for output in outputs:
            said = cls.answers.setdefault(tuple(output.prompt_token_ids or []), [])
            said.extend(list(completion.token_ids) for completion in output.outputs)

    def __init__(self, options: SpeculativeOptions) -> None:
        self.dice = random.Random(options.num_speculative_tokens)
        self.target = os.environ.get(TARGET)

    @cached_property
    def oracle(self) -> Oracle | None:
        return None if self.target is None else Oracle(self.target)

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        if self.oracle is not None and self.asks:
            self.oracle.prepare([text.token_ids for text in texts], max(most, default=0))
        return [self.guess(text, count) for text, count in zip(texts, most, strict=True)]

    def guess(self, text: Text, count: int) -> list[int]:
        prompt, output = text.token_ids[: text.num_prompt_tokens], text.token_ids[text.num_prompt_tokens :]
        for answer in self.answers.get(tuple(prompt), []):
            if answer[: len(output)] == output:
                return answer[len(output) : len(output) + count]
        return [] if self.oracle is None else self.oracle(text.token_ids, count)

    def finish(self, text: Text) -> None:
        pass


class Random(Perfect):
    """Proposes any tokens."""

    asks = False

    def guess(self, text: Text, count: int) -> list[int]:
        return [self.dice.randrange(256) for _ in range(self.dice.randint(0, count))]


class Adversarial(Perfect):
    """Proposes ends of the text, tokens that are right in the wrong place, and a wrong one after right ones."""

    def guess(self, text: Text, count: int) -> list[int]:
        right = super().guess(text, count) or [3] * count
        kind = self.dice.randrange(4)
        if kind == 0:
            return [0, 1, 2, 3, 4, 5, 6, 7][:count]  # among them end-of-sequence
        if kind == 1:
            return right[1:] + right[:1]
        if kind == 2:
            return [*right[:-1], (right[-1] + 1) % 256]
        return [text.token_ids[-1]] * count


class Mixed(Perfect):
    """Right tokens, with a wrong one here and there."""

    def guess(self, text: Text, count: int) -> list[int]:
        right = super().guess(text, count)
        return [token if self.dice.random() < 0.8 else self.dice.randrange(256) for token in right]
