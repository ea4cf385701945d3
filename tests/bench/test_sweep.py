"""`quire bench sweep`: what it measures, what it recommends, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench.slo import Limit, parse
from quire.bench.sweep import Point, Sweep
from quire.bench.sweep_report import Row, advice, choose, command, rows_of, table
from quire.cli.main import build_parser, main
from support.waiting import LONGEST, eventually

SLO = parse("ttft=500ms,p95:itl=50ms")
SMALL = ("--num-prompts", "4", "--input-len", "20", "--output-len", "4", "--num-warmups", "1", "--max-model-len", "512")


def sweep(*flags: str, slo: list[Limit] = SLO, **options: Any) -> Sweep:
    arguments = build_parser().parse_args(["bench", "sweep", *flags])
    arguments.seed = 0
    return Sweep(None, options, arguments, Path(arguments.output_dir), [limit.percentile for limit in slo])


def row(number: int, throughput: float, ttft: float, itl: float, **result: Any) -> Row:
    measured = {"output_throughput": throughput, "request_throughput": throughput / 10, "p99_ttft_ms": ttft}
    measured |= {"p95_itl_ms": itl, "p99_itl_ms": 2 * itl}
    return Row(number, {"max_num_seqs": number}, {"request_rate": 4.0, "max_concurrency": None}, {**measured, **result})


# ---- what is measured


def test_options_and_loads_are_combined_and_points_of_a_server_follow_each_other():
    flags = ["--vary", "max_num_seqs=8,32", "--vary", "quantization=none,int8"]
    points = sweep(*flags, "--request-rate", "2", "inf", "--num-runs", "2").points
    assert len(points) == len({point.key for point in points}) == 2 * 2 * 2 * 2
    assert [point.options for point in points[:4]] == [{"max_num_seqs": 8, "quantization": None}] * 4
    assert [(point.load["request_rate"], point.run) for point in points[:4]] == [
        (2.0, 0),
        (2.0, 1),
        (None, 0),
        (None, 1),
    ]
    assert points[4].options == {"max_num_seqs": 8, "quantization": "int8"}


def test_parameters_are_read_as_vllm_writes_them(tmp_path):
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"small": {"max-num-seqs": 8}, "large": {"max_num_seqs": 64, "block_size": 32}}))
    loads = '[{"request_rate": 2, "output_len": 7}, {"max_concurrency": 3}]'
    points = sweep("--serve-params", str(servers), "--bench-params", loads).points
    assert [point.options for point in points[::2]] == [{"max_num_seqs": 8}, {"max_num_seqs": 64, "block_size": 32}]
    assert points[0].load == {"request_rate": 2, "max_concurrency": None, "output_len": 7}
    assert points[1].load == {"request_rate": None, "max_concurrency": 3}


def test_by_default_chunks_batches_and_quantization_are_varied():
    assert {tuple(point.options) for point in sweep().points} == {
        ("max_num_batched_tokens", "max_num_seqs", "quantization")
    }


def test_points_of_another_workload_or_engine_are_other_points():
    [point] = sweep("--vary", "max_num_seqs=8").points
    for other in (
        sweep("--vary", "max_num_seqs=8", "--input-len", "5"),
        sweep("--vary", "max_num_seqs=8", block_size=32),
        sweep("--vary", "max_num_seqs=8", slo=parse("p98:itl=1s")),
    ):
        assert other.points[0].key != point.key
    assert sweep("--vary", "max_num_seqs=8", slo=[]).points[0].key == point.key


def test_what_was_measured_is_found_again(tmp_path):
    plan = sweep("--vary", "max_num_seqs=8,16,32", "-o", str(tmp_path))
    points = plan.points
    lines = [{"key": points[0].key, "result": {"completed": 4}}, {"key": points[1].key, "problem": "no memory"}]
    lines = [json.dumps({"options": {}, "load": {}, **line}) for line in lines]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, '{"options": {}, "key": "cut o']))
    assert plan.measured(points).keys() == {points[0].key}  # failed points are measured again


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vary", "max_num_sqs=8"], "max-num-seqs"),
        (["--vary", "max_num_seqs"], "is not KEY=VALUE"),
        (["--bench-params", '[{"rate": 2}]'], "--bench-params: 'rate' is none of --request-rate"),
        (["--serve-params", "missing.json"], "no file with JSON"),
        (["--serve-params", "[3]"], "must be a list of objects"),
        (["--request-rate", "0"], "--request-rate must be positive, got 0"),
        (["--slo", "ttft=fast"], "must be a metric and a time"),
    ],
)
def test_wrong_flags_are_errors_that_name_them(flags, message, capsys, tmp_path):
    try:
        status = main(["bench", "sweep", *flags, "-o", str(tmp_path)])
    except SystemExit as ended:
        status = ended.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err


# ---- what is recommended


def test_the_fastest_row_within_the_limits_is_recommended():
    rows = [row(1, 900, 700, 10), row(2, 500, 400, 20), row(3, 300, 100, 5), row(4, 800, 100, 60)]
    choice = choose(rows, SLO)
    assert choice is not None
    assert (choice.row.number, choice.meets, choice.share) == (2, True, 0.8)
    text = advice(choice, SLO, "some/model", {"block_size": 32})
    assert "row 2" in text
    assert "using 80 % of the tightest limit" in text
    assert text.endswith("quire serve some/model --block-size 32 --max-num-seqs 2")


def test_of_rows_that_are_nearly_as_fast_the_one_with_more_room_is_recommended():
    rows = [row(1, 500, 490, 20), row(2, 495, 200, 20), row(3, 400, 10, 1)]
    assert choose(rows, SLO).row.number == 2
    assert choose(rows, []).row.number == 1  # of the same ITL, the first


def test_without_a_row_within_the_limits_the_closest_is_named():
    choice = choose([row(1, 900, 5000, 10), row(2, 500, 600, 20)], SLO)
    assert (choice.row.number, choice.meets) == (2, False)
    assert "Row 2 is the closest: it takes 1.20 times the tightest limit" in advice(choice, SLO, None, {})


def test_rows_with_failed_requests_meet_no_objectives():
    assert choose([row(1, 900, 10, 1, failed=3), row(2, 100, 10, 1, failed=0)], SLO).row.number == 2


def test_nothing_measured_recommends_nothing():
    failed = Row(1, {"quantization": "int8"}, {"request_rate": None, "max_concurrency": None}, {}, "no memory")
    assert choose([failed], SLO) is None
    assert "failed: no memory" in table([failed], SLO, None)
    assert "Nothing was measured" in advice(None, SLO, None, {})


def test_runs_of_a_point_are_one_row_with_medians():
    results = [{"output_throughput": value, "p99_itl_ms": None} for value in (10.0, 30.0, 20.0)]
    points = [Point({"max_num_seqs": 8}, {}, run, result=result) for run, result in enumerate(results)]
    [only] = rows_of([*points, Point({"max_num_seqs": 8}, {}, 3, problem="a broken pipe")])
    assert only.result == {"output_throughput": 20.0, "p99_itl_ms": None}


def test_flags_are_written_as_a_shell_reads_them():
    options = {"enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": 1}, "quantization": None}
    assert command("my model", options) == (
        "quire serve 'my model' --enforce-eager --no-enable-prefix-caching --hf-overrides '{\"a\": 1}'"
    )


# ---- real servers


@pytest.mark.slow
def test_servers_are_measured_and_one_that_cannot_start_is_a_failed_row(tmp_path, capsys):
    flags = ["--vary", "max_num_seqs=4", "--vary", "quantization=none,awq", "--max-concurrency", "1", "4", *SMALL]
    assert main(["bench", "sweep", *flags, "--slo", "ttft=60s,e2e=600s", "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "failed: " in printed
    assert "quire serve --max-model-len 512 --max-num-seqs 4\n" in printed
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert [bool(row["result"]) for row in found["rows"]] == [True, True, False, False]
    assert all(row["result"]["completed"] == 4 for row in found["rows"][:2])
    assert found["recommended"]["meets_slo"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.nightly
def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(tmp_path):
    flags = ["--vary", "max_num_seqs=2,4", *SMALL, "--num-runs", "2", "-o", str(tmp_path)]
    line, results = [sys.executable, "-m", "quire", "bench", "sweep", *flags], tmp_path / "results.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        eventually(lambda: results.exists() and results.read_text().count("\n") >= 2)  # the second server starts
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    assert "Interrupted: 2 of 4 points were measured. The same command goes on." in printed
    assert "not measured" in printed
    first = results.read_text()
    ended = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment, check=True)
    assert "2 of 4 points are in" in ended.stderr
    assert results.read_text().startswith(first)
    assert results.read_text().count("\n") == 4
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["result"]["completed"] for row in rows] == [4, 4]
