"""What changes logits, in mixed batches, against a plain reference that treats one row at a time; and plugins."""

from __future__ import annotations

import math
import random
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config.engine import ConfigError, EngineConfig
from quire.kv.specs import attention_spec
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest
from quire.ops import Kernels, Target
from quire.sampling import logits_processors
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces, load_plugins
from quire.sampling.sampler import Sampler, SamplingBatch
from quire.worker.input_batch import InputBatch
from support.sampling import chi_square, chi_square_bound, distribution, places, processed

VOCAB, ROWS, LONGEST = 61, 24, 80
CPU = torch.device("cpu")
STOPS = [3, 7, 1000, -2]  # the last two are no tokens of the model


class Batch:
    """A sampler, and the rows it draws for."""

    def __init__(self, rows: int = ROWS, vocab: int = VOCAB, **options: Any) -> None:
        config = EngineConfig.create(max_num_seqs=rows, **options)
        self.sampler = Sampler(Kernels(Target(CPU, torch.float32)), config, CPU)
        self.rows = InputBatch(rows, LONGEST, 16, [attention_spec([])], vocab)
        self.requests: dict[int, NewRequest] = {}

    def install(self, row: int, tokens: list[int], num_prompt: int, params: SamplingParams, bad_words=()) -> None:
        new = NewRequest(
            "r", row, tokens, num_prompt, 0, params, seed=row, stop_token_ids=STOPS, bad_words=[*bad_words]
        )
        self.requests[row] = new
        self.rows.install(new)
        self.sampler.processors.add(row, new)

    def grow(self, row: int, token: int) -> None:
        self.rows.token_ids[row, self.rows.num_tokens[row]] = token
        self.rows.num_tokens[row] += 1

    def apply(self, logits: Tensor, rows: list[int], num_tokens: list[int] | None = None) -> Tensor:
        return self.sampler.processors.apply(logits.clone(), places(self.rows, rows, num_tokens))

    def expected(self, logits: Tensor, rows: list[int], num_tokens: list[int]) -> Tensor:
        made = []
        for place_logits, row, length in zip(logits.tolist(), rows, num_tokens, strict=True):
            new, start = self.requests[row], int(self.rows.num_prompt[row])
            known = self.rows.token_ids[row, :length].tolist()
            params = new.sampling_params
            made.append(processed(place_logits, known[:start], known[start:], params, new.bad_words, STOPS))
        return torch.tensor(made)


def random_tokens(draw: random.Random, count: int, vocab: int = 12) -> list[int]:
    """From a small vocabulary, so that tokens and pairs of them come again."""
    return [draw.randrange(vocab) for _ in range(count)]


WISHES = {
    "nothing": lambda draw: {},
    "repetition": lambda draw: {"repetition_penalty": draw.choice([0.5, 1.3, 2.0])},
    "frequency": lambda draw: {"frequency_penalty": draw.choice([-2.0, 0.7, 2.0])},
    "presence": lambda draw: {"presence_penalty": draw.choice([-1.5, 0.3, 2.0])},
    "bias": lambda draw: {"logit_bias": {t: draw.uniform(-9, 9) for t in draw.sample(range(VOCAB), 5)}},
    "allowed": lambda draw: {"allowed_token_ids": draw.sample(range(VOCAB), draw.choice([1, 9, 40]))},
    "min tokens": lambda draw: {"min_tokens": draw.choice([1, 4, 30]), "max_tokens": None},
    "bad words": lambda draw: {"bad_words": [random_tokens(draw, draw.choice([1, 2, 2, 3, 5])) for _ in range(12)]},
}


def wishes(kind: str, draw: random.Random) -> tuple[SamplingParams, list[list[int]]]:
    kinds = [kind] if kind in WISHES else draw.sample(sorted(WISHES), draw.choice([1, 1, 2, 4]))
    options: dict[str, Any] = {}
    for name in kinds:
        options |= WISHES[name](draw)
    bad_words = options.pop("bad_words", [])
    return SamplingParams(**options), bad_words


@pytest.mark.parametrize("kind", [*WISHES, "mixed"])
def test_every_place_is_processed_as_if_it_were_alone(kind):
    """Rows come, grow, sample or not, at one place or at several, in any order, and go when another request takes their
    place."""
    draw, generator = random.Random(kind), torch.Generator().manual_seed(2)
    batch = Batch()
    for step in range(40):
        for row in range(ROWS) if step == 0 else draw.sample(range(ROWS), draw.choice([0, 0, 1, 3])):
            tokens = random_tokens(draw, draw.randrange(1, 40))
            params, bad_words = wishes(kind, draw)
            batch.install(row, tokens, draw.randint(1, len(tokens)), params, bad_words)  # some were preempted
        chosen = draw.sample(range(ROWS), draw.randint(1, ROWS)) if step % 4 else list(range(ROWS))
        rows, lengths = [], []
        for row in (row for row in chosen if batch.rows.num_tokens[row] < LONGEST):
            known, first = int(batch.rows.num_tokens[row]), int(batch.rows.num_prompt[row])
            for length in range(max(first, known - draw.choice([0, 0, 1, 4])) if step % 3 else known, known + 1):
                rows.append(row)
                lengths.append(length)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 4
        made, expected = batch.apply(logits, rows, lengths), batch.expected(logits, rows, lengths)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-4)
        for row in dict.fromkeys(rows):
            batch.grow(row, draw.randrange(12))


def test_rows_that_ask_for_nothing_leave_the_logits_untouched():
    batch = Batch()
    for row in range(4):
        batch.install(row, [1, 2], 2, SamplingParams(temperature=0))
    logits = torch.randn(4, VOCAB).bfloat16()
    at = places(batch.rows, range(4))
    assert batch.sampler.processors.apply(logits, at) is logits
    tokens, logprobs = batch.sampler(logits, SamplingBatch(places=at))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs is None


def test_a_row_whose_logits_come_at_another_place_of_the_next_step_is_followed():
    batch = Batch()
    batch.install(0, [1, 2], 2, SamplingParams(logit_bias={4: 3.0}))
    batch.install(1, [1, 2], 2, SamplingParams())
    for rows in ([0, 1], [1, 0]):
        assert batch.apply(torch.zeros(2, VOCAB), rows)[:, 4].tolist() == [3.0 if row == 0 else 0.0 for row in rows]


def test_bfloat16_logits_are_processed_in_float32():
    batch = Batch()
    batch.install(0, [5] * 9, 1, SamplingParams(frequency_penalty=0.01))
    logits = torch.full((1, VOCAB), 100.0).bfloat16()
    assert batch.apply(logits, [0])[0, 5].item() == pytest.approx(99.92)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "bad_words"),
    [
        ({"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.3}, []),
        ({"logit_bias": {0: 2.0, 4: -3.0}, "allowed_token_ids": [0, 2, 4, 5, 6, 9]}, []),
        ({"temperature": 0.7, "top_k": 9, "min_tokens": 10, "repetition_penalty": 0.8}, [[4], [2, 9], [9, 2]]),
    ],
    ids=str,
)
def test_draws_have_the_distribution_that_was_asked_for(options, bad_words):
    count, vocab = 20_000, 20
    params = SamplingParams(**options)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)).sort(descending=True).values * 1.5
    batch = Batch(count, vocab)
    for row in range(count):
        batch.install(row, [1, 2, 3, 4, 4, 2], 3, params, bad_words)
    sampling = SamplingBatch(
        temperature=torch.full((count,), params.temperature),
        seeds=torch.arange(count),
        output_positions=torch.full((count,), 3),
        top_k=torch.full((count,), params.top_k) if params.top_k else None,
        places=places(batch.rows, range(count)),
    )
    tokens, _ = batch.sampler(logits.expand(count, vocab).clone(), sampling)
    observed = torch.bincount(tokens, minlength=vocab).tolist()
    stops = [3, 7]
    final = processed(logits.tolist(), [1, 2, 3], [4, 4, 2], params, bad_words, stops)
    wanted = distribution(final, params.temperature, params.top_k or vocab, 1.0, 0.0)
    assert chi_square(observed, wanted) < chi_square_bound(sum(p > 0 for p in wanted) - 1)
    plain = distribution(logits.tolist(), params.temperature, vocab, 1.0, 0.0)
    assert chi_square(observed, plain) > 1000, "the same test tells it from the distribution without"


# ---- functions of a request


def test_functions_of_a_request_get_its_tokens_and_come_before_penalties():
    seen: list[Any] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        seen.append(output)
        return logits + 1

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output))
        logits[9] = -math.inf
        return logits

    batch = Batch()
    batch.install(3, [1, 2, 5, 6], 2, SamplingParams(logits_processors=[two, three], repetition_penalty=2.0))
    batch.install(4, [1, 2], 2, SamplingParams())
    logits = torch.full((2, VOCAB), 3.0)
    made = batch.apply(logits, [4, 3])
    assert seen == [[5, 6], ([1, 2], [5, 6])]
    assert made[0].tolist() == [3.0] * VOCAB
    assert made[1, 9] == -math.inf
    assert made[1, 1].item() == 2.0  # (3 + 1) / 2
    assert made[1, 20].item() == 4.0
    batch.install(3, [1], 1, SamplingParams())  # another request in the row
    assert batch.apply(logits, [4, 3]).tolist() == logits.tolist()


# ---- plugins


class Favourite(LogitsProcessor):
    """extra_args={"favourite": t} makes token t the only one."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.favourites = np.zeros(config.scheduler.max_num_seqs, np.int64)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("favourite", 0), int):
            raise ValueError("favourite must be a token id")

    def add(self, row: int, request: NewRequest) -> bool:
        favourite = (request.sampling_params.extra_args or {}).get("favourite")
        self.favourites[row] = -1 if favourite is None else favourite
        return favourite is not None

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        logits[at.index] = -math.inf
        logits[at.index, self.favourites[at.rows]] = 0.0


def test_the_example_of_the_interface_works():
    example = str(logits_processors.__doc__).split("    LLM(", 1)[0].split("    class ", 1)[1]
    names: dict[str, Any] = dict(vars(logits_processors))
    exec(textwrap.dedent("    class " + example), names)
    batch = Batch(logits_processors=[names["Hurry"]])
    batch.install(0, [1, 5, 5, 5], 1, SamplingParams(extra_args={"hurry": 0.5}))
    batch.install(1, [1, 5, 5, 5], 1, SamplingParams())
    made = batch.apply(torch.zeros(2, VOCAB), [1, 0])
    assert made[1, 2].item() == 1.5
    assert made.sum().item() == 1.5


class NoProcessor:
    pass


def test_a_plugin_is_named_by_its_import_path_or_given_as_a_class():
    path = f"{__name__}:Favourite"
    assert load_plugins([path, Favourite]) == [Favourite, Favourite]
    for plugins in ([path], [Favourite]):
        batch = Batch(logits_processors=plugins)
        for row in range(3):
            params = SamplingParams(extra_args={"favourite": 40 + row} if row else None)
            batch.install(row, [1], 1, params)
        logits = torch.randn(3, VOCAB)
        made = batch.apply(logits, [2, 0, 1])
        assert made.argmax(-1).tolist() == [42, logits[1].argmax(), 41]
        assert made[1].tolist() == logits[1].tolist()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("no.such.package:Thing", "'no.such.package:Thing' cannot be imported.*No module named 'no'"),
        ("math:Thing", "'math:Thing' cannot be imported.*no attribute 'Thing'"),
        ("math", "'math' is not a subclass"),
        (f"{__name__}:NoProcessor", "is not a subclass of quire.sampling.logits_processors.LogitsProcessor"),
        ("math:sqrt", "is not a subclass"),
        (":", "':' cannot be imported"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_an_error_that_names_it(plugin, message):
    with pytest.raises(ConfigError, match=message):
        load_plugins([plugin])
