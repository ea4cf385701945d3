"""docs/features.md: its table names the tests that run two features together, as these declare it.

A test file declares it in a constant:

    COMBINES = [
        "chunked prefill, prefix caching, preemption",  # each two of these
        "penalties × chunked prefill, preemption",  # each before the cross with each behind it
    ]
"""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "features.md"
BEGIN, END = "<!-- written by tests/docs/test_features_page.py --write -->\n", "<!-- end -->\n"

# In this order. The first ones have a column too.
COLUMNS = [
    "chunked prefill",
    "prefix caching",
    "preemption",
    "sliding window",
    "priority",
    "seeded sampling",
    "stop strings",
    "n > 1",
    "two steps in flight",
]
FEATURES = [
    *COLUMNS,
    "penalties and token rules",
    "logprobs",
    "prompt logprobs",
    "beam search",
    "experts",
    "latent attention",
    "recurrent layers",
    "sparse attention",
    "sinks, soft caps and ALiBi",
    "GGUF",
    "one-byte KV cache",
    "recorded steps",
    "CUDA graphs",
    "replay after a crash",
    "long_prefill_token_threshold",
    "batch invariance",
    "tensor parallelism",
    "sequence parallelism",
    "data parallelism",
    "pipeline parallelism",
    "context parallelism",
    "expert parallelism",
    "several machines",
    "KV tiers",
    "prefill and decode apart",
    "structured outputs",
    "thinking budgets",
    "speculation",
    "drafters on the device",
    "adapters",
    "KV events",
    "pauses and sleep",
    "new weights",
    "pinned prefixes",
    "KV compression",
    "multimodal input",
    "cross-attention",
]


def declared(path: Path) -> list[str]:
    """The strings of a file's COMBINES; the file is not imported."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "COMBINES":
            return list(ast.literal_eval(statement.value))
    return []


def features_of(text: str) -> list[str]:
    """The features that a list names; a name may have commas of its own."""
    found = []
    for feature in sorted(FEATURES, key=len, reverse=True):
        if feature in text:
            found.append(feature)
            text = text.replace(feature, "")
    assert not text.strip(", "), f"no feature of {Path(__file__).name} is called {text.strip(', ')!r}"
    return found


def pairs_of(line: str) -> set[frozenset[str]]:
    before, cross, behind = line.partition("×")
    if cross:
        return {frozenset(pair) for pair in product(features_of(before), features_of(behind)) if len(set(pair)) == 2}
    return {frozenset(pair) for pair in combinations(features_of(before), 2)}


def written_page() -> str:
    """The table, and the list of the test files that its numbers stand for."""
    files = defaultdict(list)  # of a pair of features
    numbered: list[str] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        pairs = set().union(*map(pairs_of, declared(path)))
        if pairs:
            numbered.append(path.relative_to(TESTS.parent).as_posix())
        for pair in pairs:
            files[pair].append(str(len(numbered)))
    lines = [f"{number}. `{path}`" for number, path in enumerate(numbered, 1)]
    lines += ["", f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for index, feature in enumerate(FEATURES[1:], 1):
        cells = [" ".join(files[frozenset((feature, column))]) for column in COLUMNS[:index]]
        cells += [""] * (len(COLUMNS) - len(cells))
        lines.append(f"| **{feature}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_page_names_the_tests_that_run_two_features_together(pytestconfig: pytest.Config):
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    expected = f"{before}{BEGIN}\n{written_page()}\n{END}{behind}"
    if pytestconfig.getoption("write"):
        PAGE.write_text(expected, encoding="utf-8")
    assert pytestconfig.getoption("write") or text == expected, f"run `pytest -n 0 {Path(__file__).name} --write`"


def test_a_feature_without_a_name_in_the_table_is_refused():
    assert pairs_of("chunked prefill, n > 1") == {frozenset(("chunked prefill", "n > 1"))}
    assert len(pairs_of("logprobs, beam search × chunked prefill, preemption")) == 4
    with pytest.raises(AssertionError, match="levitation"):
        pairs_of("chunked prefill, levitation")
