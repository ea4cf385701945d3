"""`quire bench throughput` and `latency` on the bundled model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.cli.main import main

SHORT = ["--input-len", "20", "--output-len", "4"]


def test_throughput_makes_its_own_requests(tmp_path: Path, capsys):
    file = tmp_path / "result.json"
    assert main(["bench", "throughput", *SHORT, "--num-prompts", "3", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (3, 60, 12)
    assert result["total_num_tokens"] == 72
    assert result["requests_per_second"] == pytest.approx(3 / result["elapsed_time"], rel=0.2)
    assert "prefill_tok_s" not in result
    printed = capsys.readouterr().out
    assert printed.startswith("Throughput: ")
    assert "total tokens/s" in printed


def test_throughput_with_prompts_that_share_prefixes(capsys):
    sizes = ["--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "8"]
    more = ["--prefix-repetition-num-prefixes", "1", "--prefix-repetition-output-len", "2", "--max-num-seqs", "1"]
    flags = ["--dataset-name", "prefix_repetition", "--num-prompts", "3", "--json"]
    assert main(["bench", "throughput", *flags, *sizes, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompt_tokens"], result["cached_tokens"]) == (120, 64)


def test_throughput_of_a_file_has_the_speeds_of_prefill_and_decoding(tmp_path: Path, capsys):
    file = tmp_path / "two.jsonl"
    lines = [{"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}, {"prompt_token_ids": [5, 6, 7]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["bench", "throughput", "--requests", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workload"] == "two"
    assert result["num_requests"] == 2
    assert result["prefill_tok_s"] > 0
    assert result["decode_tok_s"] > 0


def test_latency_of_a_batch_with_its_percentiles(tmp_path: Path, capsys):
    file = tmp_path / "result.json"
    flags = ["--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(file)]
    assert main(["bench", "latency", *SHORT, *flags]) == 0
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert f"Avg latency: {result['avg_latency']:.4f} seconds" in capsys.readouterr().out


@pytest.mark.slow
def test_latency_with_a_profile_records_one_batch(tmp_path: Path, capsys):
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False}
    flags = ["--batch-size", "2", "--num-iters-warmup", "1", "--profile", "--profiler-config", json.dumps(profiler)]
    assert main(["bench", "latency", *SHORT, *flags]) == 0
    assert f"Profiled one batch of 2 requests: the traces are in {tmp_path}" in capsys.readouterr().out
    [file] = tmp_path.iterdir()
    names = [event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("step ") and "2 requests" in name for name in names) >= 4  # one for each output token


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["throughput", "--input-len", "3000"], "--input-len 3000 and --output-len 128 need 3128 tokens"),
        (["throughput", "--dataset-name", "custom"], "--dataset-name custom needs --dataset-path"),
        (["throughput", "--random-range-ratio", "2"], "--random-range-ratio must be"),
        (["latency", "--output-len", "5000"], "the context (--max-model-len) has 2048"),
    ],
)
def test_wrong_sizes_are_errors_that_name_the_flag(flags, message, capsys):
    assert main(["bench", *flags]) == 1
    assert message in capsys.readouterr().err
