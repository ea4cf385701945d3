"""`quire bench claims` on the bundled model and tiny sizes: the table is whole and its counted figures are right."""

import json

import pytest

from quire import LLM
from quire.bench import claims
from quire.checkpoints.hub import bundled_model
from quire.cli.main import main

pytestmark = pytest.mark.slow

TINY = claims.Sizes(rounds=1, mixed=6, questions=3, document=64, streams=2, whale=96, articles=2, copies=2, stories=1)


@pytest.fixture(scope="module")
def result():
    return claims.measure(None, {"max_num_batched_tokens": 64, "max_num_seqs": 16}, [], TINY)


def test_each_mechanism_is_compared_with_its_goal(result):
    mechanisms = [row["mechanism"] for row in result["claims"]]
    last = ["structured outputs", *["speculation"] * 4]
    assert mechanisms == ["PagedAttention", *["prefix caching"] * 3, *["chunked prefill"] * 2, *last]
    for row in result["claims"]:
        assert row["value"] > 0
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(
    ("measure", "value", "verdict"),
    [
        ("time of the prefix workload", 4.1, "yes"),
        ("time of the prefix workload", 3.9, "NO"),
        ("prompt tokens reused", 1.0, "yes"),
        ("prompt tokens reused", 0.98, "NO"),
        ("bytes of hashes", 0.004, "yes"),
        ("bytes of hashes", 0.006, "NO"),
        ("largest gap", 4.5, "yes"),
        ("largest gap", 3.5, "NO"),
        ("the same in chunks", 1.2, "yes"),
        ("the same in chunks", 1.5, "NO"),
        ("KV tokens held", 0.97, "yes"),
        ("KV tokens held", 0.95, "NO"),
        ("output tokens/s of 2 requests with a JSON schema", 0.96, "yes"),
        ("output tokens/s of 2 requests with a JSON schema", 0.94, "NO"),
        ("time of 2 requests whose texts repeat", 1.9, "yes"),
        ("time of 2 requests whose texts repeat", 1.7, "NO"),
        ("answers that are the same", 1.0, "yes"),
        ("answers that are the same", 0.99, "NO"),
        ("first drafts of the bundled EAGLE-3 head", 0.91, "yes"),
        ("first drafts of the bundled EAGLE-3 head", 0.89, "NO"),
        ("tokens of a verification", 3.1, "yes"),
        ("tokens of a verification", 2.9, "NO"),
    ],
)
def test_a_figure_is_judged_in_its_own_direction(result, measure, value, verdict):
    """More is better for some figures, and worse for others."""
    [row] = [row for row in result["claims"] if row["measure"].startswith(measure)]
    fields = {name: row[name] for name in row if name != "met"}
    claim = claims.Claim(**{**fields, "value": value})
    assert claim.met == (verdict == "yes")
    assert claims.table({**result, "claims": [{**row, "value": value, "met": claim.met}]}).endswith(verdict)


def test_memory_held_is_counted_between_half_a_block_and_a_whole(result):
    [paged] = [row["value"] for row in result["claims"] if row["mechanism"] == "PagedAttention"]
    assert 0.9 < paged <= 1


def test_all_of_a_shared_document_is_reused(result):
    [reused] = [row["value"] for row in result["claims"] if row["measure"].startswith("prompt tokens reused")]
    assert reused == 1.0


def test_drafts_change_no_answer_and_are_counted(result):
    rows = {row["measure"]: row["value"] for row in result["claims"]}
    assert rows["answers that are the same to the token"] == 1.0
    assert 0.5 < rows["first drafts of the bundled EAGLE-3 head that are accepted"] <= 1
    assert 2 < rows["tokens of a verification of its 5 drafts"] <= 6


def test_other_models_have_no_row_of_the_bundled_head():
    result = claims.measure(str(bundled_model()), {}, ["speculation"], TINY)
    assert [row["goal"] for row in result["claims"]] == [1.8, 1.0]


def test_an_engine_that_speculates_is_no_baseline(capsys):
    options = {"speculative_config": {"method": "suffix"}}
    assert claims.measure(None, options, ["speculation"], TINY)["claims"] == []
    assert "does not speculate" in capsys.readouterr().err


def test_the_table_shows_every_row_with_its_unit(result):
    lines = claims.table(result).splitlines()
    assert len(lines) == 3 + len(result["claims"])
    assert "≥ 96 %" in lines[3]
    assert lines[3].endswith("yes")


def test_workloads_have_the_shapes_of_the_side_by_side_benchmarks():
    llm = LLM(max_num_seqs=4)
    mixed = claims.mixed(llm, 2, 48)
    assert len(mixed) == 48
    assert all(32 <= len(prompt) <= 512 and 16 <= n <= 192 for prompt, n in mixed)
    prefix = claims.prefix(llm, 2, 16, 1024)
    assert [(len(prompt), n) for prompt, n in prefix] == [(1056, 32)] * 16
    assert len({tuple(prompt[:1024]) for prompt, _ in prefix}) == 1
    assert max(max(prompt) for prompt, _ in mixed) < llm.processor.vocab_size


def test_only_some_claims_and_json_by_command_line(tmp_path, capsys):
    file = tmp_path / "claims.json"
    assert main(["bench", "claims", "--only", "paged", "--rounds", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [row["mechanism"] for row in result["claims"]] == ["PagedAttention"]
    assert result["claims"][0]["met"]
    assert "PagedAttention" in capsys.readouterr().out


def test_a_name_that_is_no_claim_is_refused(capsys):
    assert main(["bench", "claims", "--only", "teleportation"]) == 1
    assert "there are: PagedAttention" in capsys.readouterr().err
