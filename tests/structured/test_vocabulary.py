"""The tokens that grammars are matched with, for the kinds of tokenizers of GGUF files and the bundled model's."""

import json
from pathlib import Path

import pytest

from quire import StructuredOutputsParams
from quire.structured.guidance import GuidanceBackend
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gguf_tokenizers.json").read_text("utf-8"))["vocabularies"]
TEXTS = ['{"name": "Anna", "tags": [1, 2]}', "a  b", " The quick\n\tfox", "Grüße 你好 👍🏽", '"</s><|im_end|>"']


@pytest.fixture(scope="module", params=RECORDED)
def tokenizer(request) -> Tokenizer:
    return Tokenizer.from_gguf(RECORDED[request.param])


def end(tokenizer: Tokenizer) -> int:
    return tokenizer.vocab_size - 1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_text_spell_it_wherever_it_stands(tokenizer, text):
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [end(tokenizer)])
    tokens = vocabulary(text)
    assert b"".join(vocabulary.tokens[token] for token in tokens).decode() == text
    assert not set(tokens) & set(vocabulary.special_token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_the_only_text_of_a_grammar_is_forced_and_accepted(tokenizer, text):
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size + 7, [end(tokenizer)])
    matcher = GuidanceBackend(vocabulary).compile(StructuredOutputsParams(choice=[text]))
    tokens: list[int] = []
    while forced := matcher.forced():
        assert all(map(matcher.accept, forced))
        tokens += forced
    rest = text.encode().removeprefix(b"".join(vocabulary.tokens[token] for token in tokens))
    assert len(rest) < 8  # the last tokens of a text might be others if it went on
    assert all(map(matcher.accept, vocabulary(rest)))
    assert matcher.is_finished


def test_a_tokenizer_may_have_more_tokens_than_the_model(tokenizer):
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size - 3, [end(tokenizer) if end(tokenizer) < 9 else 5])
    assert len(vocabulary.tokens) == tokenizer.vocab_size - 3
    GuidanceBackend(vocabulary).compile(StructuredOutputsParams(json_object=True))
