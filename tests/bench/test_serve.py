"""`quire bench serve` against a server with known timings and faults, through the command line."""

import json
import statistics
import subprocess
import sys

import matplotlib.image
import pytest

from quire.cli.main import main

FIRST, GAP = 150.0, 30.0  # milliseconds: conftest.py's server
SMALL = ["--random-input-len", "20", "--random-output-len", "5", "--disable-tqdm"]


@pytest.fixture
def bench(tmp_path, capsys):
    """bench(server, *flags): exit status, the JSON written, and what was printed."""

    def run(server, *flags):
        where = ["--base-url", server.url, "--result-dir", str(tmp_path), "--result-filename", "result.json"]
        status = main(["bench", "serve", *where, *SMALL, "--save-detailed", *flags])
        file = tmp_path / "result.json"
        printed = capsys.readouterr()
        return status, json.loads(file.read_text()) if file.exists() else None, printed.out + printed.err

    return run


@pytest.mark.parametrize("usage", ["each chunk", "end", "never"])
def test_tokens_are_counted_and_latencies_are_those_of_the_server(serve, bench, usage):
    with serve(usage=usage, vocab_size=50) as server:
        status, result, printed = bench(server, "--num-prompts", "6", "--metric-percentiles", "50,99.9")
    assert status == 0
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_input_tokens"] == 6 * 20
    assert result["total_output_tokens"] == 6 * 5
    assert result["output_lens"] == [5] * 6
    assert all(len(gaps) == 4 for gaps in result["itls"])
    assert result["mean_ttft_ms"] >= FIRST - 5
    assert result["mean_e2el_ms"] >= FIRST + 4 * GAP - 5
    first, gaps, whole = result["ttfts"], result["itls"], result["latencies"]
    assert all(f + sum(g) == pytest.approx(w, abs=1e-3) for f, g, w in zip(first, gaps, whole, strict=True))
    assert result["mean_ttft_ms"] == pytest.approx(statistics.mean(first) * 1e3)
    every_gap = [gap for g in gaps for gap in g]
    assert result["mean_itl_ms"] == pytest.approx(statistics.mean(every_gap) * 1e3)
    assert result["std_itl_ms"] == pytest.approx(statistics.pstdev(every_gap) * 1e3)
    tpots = [(w - f) / 4 for f, w in zip(first, whole, strict=True)]
    assert result["median_tpot_ms"] == pytest.approx(statistics.median(tpots) * 1e3)
    assert result["p50_itl_ms"] == pytest.approx(result["median_itl_ms"])
    assert result["p99.9_e2el_ms"] <= max(result["latencies"]) * 1e3
    assert result["max_concurrent_requests"] == 6
    assert result["request_rate"] == "inf"
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(150 / result["duration"])
    is_one_window = result["max_output_tokens_per_s"] == pytest.approx(result["output_throughput"])
    assert is_one_window or result["duration"] >= 2
    assert "time to first token (TTFT)" in printed


def test_prompts_are_token_ids_of_the_servers_vocabulary_and_repeat_with_the_seed(serve, bench):
    with serve(vocab_size=50) as server:
        bench(server, "--num-prompts", "3", "--random-prefix-len", "4", "--random-range-ratio", "0.5")
        first = server.measured(3)
        bench(server, "--num-prompts", "3", "--random-prefix-len", "4", "--random-range-ratio", "0.5")
        assert [b["prompt"] for b in server.measured(3)] == [b["prompt"] for b in first]
        bench(server, "--num-prompts", "3", "--seed", "1")
        assert server.measured(3)[0]["prompt"] != first[0]["prompt"]
    prompts = [body["prompt"] for body in first]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert all(4 + 10 <= len(prompt) <= 4 + 30 and set(prompt) <= set(range(3, 50)) for prompt in prompts)
    assert all(2 <= body["max_tokens"] <= 8 for body in first)
    assert all(body["stream"] and body["temperature"] == 0 and "ignore_eos" not in body for body in first)


def test_ids_below_a_thousand_serve_where_no_vocabulary_is_known(serve, bench):
    with serve() as server:
        bench(server, "--num-prompts", "3", "--random-input-len", "300")
        assert 500 < max(max(body["prompt"]) for body in server.measured(3)) < 1000
        bench(server, "--num-prompts", "3", "--vocab-size", "10")
        assert max(max(body["prompt"]) for body in server.measured(3)) == 9


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_servers_that_take_only_text_get_words_that_make_the_length(serve, bench, endpoint):
    with serve(text_only=True, strict=True, usage="end") as server:
        _, result, _ = bench(
            server, "--endpoint", endpoint, "--num-prompts", "4", "--random-input-len", "101", "--ignore-eos"
        )
        body = server.measured(1)[0]
    assert result["completed"] == 4
    assert result["input_lens"] == [101] * 4  # it counts 2 tokens a word and 7 more
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True


def test_a_server_without_stream_options_is_measured_by_text(serve, bench):
    with serve(usage="never", strict=True) as server:
        _, result, _ = bench(server, "--num-prompts", "2")
        assert "stream_options" not in server.measured(1)[0]
    assert result["output_lens"] == [5, 5]


def test_failures_are_counted_apart_and_shown(serve, bench):
    kinds = {1: None, 2: "500", 3: "cut", 4: "error event", 5: None, 6: "500"}

    def fault(number, body):
        return kinds[number - 1] if number > 1 else None  # the first is the probe

    with serve(fault=fault) as server:
        status, result, printed = bench(server, "--num-prompts", "6", "--max-concurrency", "1")
    assert status == 0
    assert (result["completed"], result["failed"]) == (2, 4)
    assert result["total_output_tokens"] == 10, "only of requests that succeeded"
    assert [bool(error) for error in result["errors"]] == [kinds[i] is not None for i in range(1, 7)]
    assert "2 × HTTP 500" in printed
    assert "out of luck" in printed
    assert "the stream ended before the answer did" in printed
    assert "the engine died" in printed


def test_when_every_request_fails_the_statistics_are_empty_and_the_status_is_1(serve, bench, tmp_path):
    with serve(fault=lambda number, body: "500" if number > 1 else None) as server:
        plot = tmp_path / "plot.png"
        status, result, _ = bench(server, "--num-prompts", "3", "--plot", str(plot), "--goodput", "ttft:1")
    assert status == 1
    assert result["failed"] == 3
    assert result["mean_ttft_ms"] is None
    assert plot.stat().st_size > 0


def test_goodput_counts_requests_that_meet_every_limit(serve, bench):
    with serve(fault=lambda number, body: "two a chunk" if number % 2 else None) as server:
        flags = ["--num-prompts", "4", "--random-output-len", "6"]
        _, easy, _ = bench(server, *flags, "--goodput", "ttft:60000", "tpot:60000", "e2el:60000")
        _, hard, printed = bench(server, *flags, "--goodput", f"ttft:{FIRST / 2}", "e2el:60000")
        # 150 + 5 x 30 ms one by one, 150 + 2 x 30 in twos: the time per token tells them apart
        _, some, _ = bench(server, *flags, "--goodput", f"tpot:{GAP * 0.8}")
    assert easy["request_goodput"] == pytest.approx(easy["request_throughput"])
    assert hard["request_goodput"] == 0
    assert "request goodput" in printed
    assert some["request_goodput"] <= some["request_throughput"] / 2


def test_tokens_without_text_are_counted_where_usage_says_so(serve, bench):
    for usage, gaps in (("each chunk", 4), ("end", 0)):
        with serve(usage=usage, fault=lambda number, body: "silent") as server:
            _, result, _ = bench(server, "--num-prompts", "2")
        assert result["output_lens"] == [5, 5]
        assert [len(itls) for itls in result["itls"]] == [gaps, gaps]
        assert all(ttft >= FIRST / 1e3 for ttft in result["ttfts"])


def test_events_that_come_in_pieces_are_put_together(serve, bench):
    with serve(fault=lambda number, body: "ragged") as server:
        _, result, _ = bench(server, "--num-prompts", "2")
    assert result["generated_texts"] == [" b c d e f"] * 2
    assert [len(itls) for itls in result["itls"]] == [4, 4]


def test_at_most_max_concurrency_requests_run_at_once(serve, bench):
    with serve() as server:
        _, result, printed = bench(server, "--num-prompts", "7", "--max-concurrency", "3")
    assert server.most_running == 3
    assert result["completed"] == 7
    assert result["max_concurrent_requests"] <= 3
    assert sum(waited >= FIRST / 1e3 for waited in result["queue_times"]) == 4
    for parts in zip(result["queue_times"], result["latencies"], strict=True):
        assert sum(parts) <= result["duration"], "waiting here is no latency of the server"
    assert "wait for --max-concurrency" in printed


def test_a_trace_is_replayed_in_the_order_and_at_the_distances_of_its_arrivals(serve, bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10_500, "input_length": 1030, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 10_000, "prompt_token_ids": [5, 6, 7], "output_length": 2},
        {"timestamp": 10_250, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 10]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serve(vocab_size=50) as server:
        _, result, _ = bench(server, "--trace", str(trace))
        bodies = sorted(server.measured(3), key=lambda body: body["max_tokens"])
    assert result["output_lens"] == [body["max_tokens"] for body in bodies] == [2, 3, 4]
    assert result["start_times"] == sorted(result["start_times"])
    assert bodies[0]["prompt"] == [5, 6, 7]
    assert bodies[1]["prompt"][:1024] == bodies[2]["prompt"][:1024]
    assert [len(body["prompt"]) for body in bodies] == [3, 1100, 1030]
    for start, due in zip(result["start_times"], (0, 0.25, 0.5), strict=True):
        assert due <= start


def test_files_of_prompts_headers_warmups_and_extra_fields(serve, bench, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Say it", "output_tokens": 3}\n\n{"prompt": [4, 5]}\n')
    with serve() as server:
        flags = ["--dataset-name", "custom", "--dataset-path", str(file), "--custom-output-len", "2"]
        flags += ["--header", "Authorization=Bearer x=y", "--num-warmups", "2"]
        _, result, _ = bench(server, *flags, "--extra-body", '{"temperature": null, "top_k": 3}')
        warm, bodies = server.bodies[-4:-2], server.measured(2)
        assert all(headers["Authorization"] == "Bearer x=y" for headers in server.headers)
    assert result["num_prompts"] == result["completed"] == 2
    assert {json.dumps(body["prompt"]): body["max_tokens"] for body in bodies} == {'"Say it"': 3, "[4, 5]": 2}
    assert all(body["top_k"] == 3 and "temperature" not in body for body in bodies)
    assert [len(body["prompt"]) for body in warm] == [2, 2]
    assert [4, 5] not in [body["prompt"] for body in warm]


def test_prefix_repetition_sends_each_prefix_equally_often(serve, bench):
    with serve() as server:
        flags = ["--prefix-repetition-num-prefixes", "3", "--prefix-repetition-prefix-len", "9"]
        flags += ["--prefix-repetition-suffix-len", "4", "--prefix-repetition-output-len", "1"]
        bench(server, "--dataset-name", "prefix_repetition", "--num-prompts", "6", *flags)
        prompts = [tuple(body["prompt"]) for body in server.measured(6)]
    assert all(len(prompt) == 13 for prompt in prompts)
    prefixes = [prompt[:9] for prompt in prompts]
    assert sorted(map(prefixes.count, set(prefixes))) == [2, 2, 2]
    assert len(set(prompts)) == 6


@pytest.mark.slow
def test_the_command_writes_a_plot_and_needs_no_torch(serve, tmp_path):
    plot = tmp_path / "plot.png"
    with serve() as server:
        flags = [
            "--num-prompts",
            "5",
            "--request-rate",
            "20",
            "--burstiness",
            "0.5",
            "--plot",
            str(plot),
            "--save-result",
        ]
        code = "import sys; from quire.cli.main import main; status = main(sys.argv[1:]); sys.exit(2 if 'torch' in sys.modules else status)"  # noqa: E501
        where = ["--host", "127.0.0.1", "--port", server.url.rpartition(":")[2], "--result-dir", str(tmp_path / "new")]
        done = subprocess.run(
            [sys.executable, "-c", code, "bench", "serve", *where, *SMALL, *flags, "--save-result"],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar without a terminal"
    assert matplotlib.image.imread(plot).shape[0] > 500
    [file] = (tmp_path / "new").iterdir()
    result = json.loads(file.read_text())
    assert (result["completed"], result["request_rate"], result["burstiness"]) == (5, 20, 0.5)
    assert "ttfts" not in result


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "must be positive"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--trace", "t.jsonl", "--request-rate", "1"], "leave out --request-rate"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio must be"),
        (["--endpoint", "/v1/nowhere"], "say which model with --model"),
        (["--endpoint", "/v1/nowhere", "--model", "tiny"], "fails a first small request: HTTP 404"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(serve, bench, flags, message):
    with serve() as server:
        status, result, printed = bench(server, *flags)
    assert status == 1
    assert result is None
    assert message in printed


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num-prompts", "0"),
        ("--goodput", "ttft:x"),
        ("--goodput", "itl:5"),
        ("--percentile-metrics", "ttft,speed"),
        ("--metric-percentiles", "101"),
        ("--metric-percentiles", "p99"),
        ("--extra-body", "[1]"),
        ("--extra-body", "{"),
        ("--header", "nonsense"),
    ],
)
def test_a_flag_that_is_wrong_is_named(capsys, flag, value):
    with pytest.raises(SystemExit):
        main(["bench", "serve", flag, value])
    assert f"argument {flag}" in capsys.readouterr().err


def test_no_server_is_one_line(bench, serve):
    with serve() as server:
        pass
    status, _, printed = bench(server)
    assert status == 1
    assert "no server answers at" in printed
    assert len(printed.splitlines()) == 1
