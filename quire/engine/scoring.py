"""Scores of pairs of texts: by a cross-encoder, from vectors, or by a model that reads all documents at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.pooling import Pair, PoolingProcessor

Values = npt.NDArray[np.float32]
# The marks of jina-reranker-v3 (arXiv:2509.25085), after a document and after the query
_DOCUMENT, _QUERY = "<|embed_token|>", "<|rerank_token|>"
_SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)


@dataclass(frozen=True)
class Scoring:
    """How pairs are scored. prompts: to be pooled. sources: for each score, the index of the prompt that it is reported
    with. scores: the scores of all pairs from the prompts' results."""

    prompts: Sequence[str | Pair]
    sources: Sequence[int]
    scores: Callable[[Sequence[Values]], list[float]]


def scoring(
    pooling: PoolingProcessor, firsts: list[str], seconds: list[str], variables: Mapping[str, Any] = {}
) -> Scoring:
    """firsts, seconds: one text and several, or pairs. variables: of the model's template for pairs.

    Raises ValueError or TypeError, also for a model that does not score pairs, and for variables without a template."""
    ones, others = pairs_of(firsts, seconds)
    description = pooling.description
    if description.is_listwise:
        return _listwise(firsts, seconds, ones, str(variables.get("instruction") or ""))
    if variables and pooling.render_pair is None:
        raise ValueError("this model's scores have no template; chat_template gives it one")
    if description.scores_pairs:
        pairs = [Pair(*pair, variables) for pair in zip(ones, others, strict=True)]
        return Scoring(pairs, range(len(pairs)), lambda values: [float(value.reshape(-1)[0]) for value in values])
    if description.pooler.is_classifier:
        raise ValueError("this model's scores are not about pairs of texts")
    texts = list(dict.fromkeys([*ones, *others]))
    index = {text: i for i, text in enumerate(texts)}

    def similarities(values: Sequence[Values]) -> list[float]:
        return [similarity(values[index[a]], values[index[b]]) for a, b in zip(ones, others, strict=True)]

    return Scoring(texts, [index[text] for text in others], similarities)


def _listwise(firsts: list[str], seconds: list[str], ones: list[str], instruction: str) -> Scoring:
    """One prompt has all documents of a query, whose marks attend to each other's. A score is the cosine of the
    vectors of a document's mark and of the query's, which comes last."""
    groups = [(firsts[0], seconds)] if len(firsts) == 1 else [(a, [b]) for a, b in zip(ones, seconds, strict=True)]
    sources = [i for i, (_, documents) in enumerate(groups) for _ in documents]

    def cosines(values: Sequence[Values]) -> list[float]:
        return [similarity(vector, marks[-1]) for marks in values for vector in marks[:-1]]

    return Scoring([_ranking_prompt(query, documents, instruction) for query, documents in groups], sources, cosines)


def _ranking_prompt(query: str, documents: Sequence[str], instruction: str) -> str:
    def clean(text: str) -> str:
        return text.replace(_DOCUMENT, "").replace(_QUERY, "")

    passages = "\n".join(
        f'<passage id="{i}">\n{clean(text)}{_DOCUMENT}\n</passage>' for i, text in enumerate(documents)
    )
    task = f"<instruct>\n{clean(instruction)}\n</instruct>\n" if instruction else ""
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {clean(query)}\n{task}{passages}\n"
        f"<query>\n{clean(query)}{_QUERY}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Pair one text with many, or texts one to one. Returns lists of equal length. Raises ValueError or TypeError."""
    ones, others = ([x] if isinstance(x, str) else list(x) for x in (first, second))
    for text in (*ones, *others):
        if not isinstance(text, str):
            raise TypeError(f"texts to score must be strings, got {type(text).__name__}")
    if not ones or not others:
        raise ValueError("there must be at least one text on both sides")
    if len(ones) not in (1, len(others)):
        raise ValueError(f"give one text to compare with {len(others)}, or as many, not {len(ones)}")
    return ones * len(others) if len(ones) == 1 else ones, others


def similarity(one: Values, other: Values) -> float:
    """Return the cosine similarity of two embeddings. For token vectors, it is ColBERT's score (arXiv:2004.12832): the
    sum, over the tokens of the first text, of the largest product with a token of the second."""
    if one.ndim == 2:
        return float((one @ other.T).max(axis=1).sum())
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0
