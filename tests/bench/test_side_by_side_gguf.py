"""benchmarks/side_by_side_gguf.py and side_by_side_http.py: schedules, tables, and clients of a server."""

import asyncio
import random
import stat
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import side_by_side_gguf
import side_by_side_http
import workloads
from side_by_side_gguf import GgufBench, table
from side_by_side_report import Run


def arguments(out, *more):
    given = ["--gguf", "a=a.gguf", "b=b.gguf", "--out", str(out), "--peer", "llamacpp=python-with-llama.cpp"]
    return side_by_side_gguf.parse([*given, *more])


def test_every_engine_runs_every_file_and_every_other_round_is_reversed(tmp_path):
    bench = GgufBench(arguments(tmp_path, "--workloads", "single", "--rounds", "2"))
    runs = {name: [Run(engine, name, "single") for engine in ("quire", "llamacpp")] for name in "ab"}
    assert list(bench.schedule()) == [
        *((0, run._replace(workload="start")) for name in "ab" for run in runs[name]),
        *((1, run) for name in "ab" for run in runs[name]),
        *((2, run) for name in "ab" for run in reversed(runs[name])),
    ]


def test_the_engines_get_the_same_file_and_as_many_threads(tmp_path):
    bench = GgufBench(arguments(tmp_path, "--threads", "3", "--cpu-isa", "avx2", "--quire", "python-with-quire"))
    command, environment = bench._command(Run("llamacpp", "b", "batch"))
    assert command[0] == "python-with-llama.cpp"
    assert command[-3:] == ["b.gguf", "batch", "3"]
    command, environment = bench._command(Run("quire", "b", "batch"))
    assert command[0] == "python-with-quire"
    assert command[2:4] == ["b.gguf", "batch"]
    assert command[command.index("--cpu-isa") + 1] == "avx2"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert bench._command(Run("quire", "a", "start"))[0][1:4] == ["-m", "quire", "generate"]


def test_the_table_compares_with_the_best_other_engine():
    measured = {
        Run("quire", "a", "single"): {"decode_tok_s": 30.0},
        Run("llamacpp", "a", "single"): {"decode_tok_s": 20.0},
        Run("ik", "a", "single"): {"decode_tok_s": 24.0},
        Run("quire", "a", "start"): {"first_answer_s": 2.0},
        Run("ik", "a", "start"): {"first_answer_s": 1.0},
    }
    lines = table(measured, ["a"]).splitlines()
    assert lines[2:] == [
        "| a: one stream, decoding | 30.0 | 20.0 | 24.0 | 1.25 |",
        "| a: seconds to the first token | 2.00 | – | 1.00 | 0.50 |",
    ]


def test_a_peer_that_fails_is_in_the_report(tmp_path, monkeypatch):
    peer = tmp_path / "python"
    peer.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    answers = tmp_path / "quire"
    answers.write_text('#!/bin/sh\necho \'{"version": "7", "decode_tok_s": 4.0, "joules_per_token": 0.5}\'\n')
    answers.chmod(peer.stat().st_mode)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(side_by_side_gguf.side_by_side, "PAUSE_S", 0)
    command = ["--gguf", f"m={tmp_path / 'm.gguf'}", "--out", str(tmp_path / "out"), "--peer", f"ik={peer}"]
    command += ["--quire", str(answers), "--rounds", "1", "--workloads", "single"]
    assert side_by_side_gguf.main(command) == 1
    text = (tmp_path / "out" / "side_by_side_gguf.md").read_text()
    assert "Failed in round 1: ik_llama.cpp m single: exit status 3" in text
    assert "Quire m single: 0.50 J a token of output" in text
    assert "| m: one stream, decoding | 4.0 | – | – | – |" in text


def test_energy_is_that_of_the_packages_whose_counters_can_be_read(tmp_path):
    for name, microjoules in {"intel-rapl:0": "2500000", "intel-rapl:0:0": "1", "intel-rapl:1": "none"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(microjoules)
    (tmp_path / "intel-rapl:2").mkdir()
    assert workloads.joules(tmp_path) == {"intel-rapl:0": 2.5}
    assert workloads.joules(tmp_path / "none") == {}


# ---- over HTTP


def test_clients_wait_for_their_own_answers_only(serve, monkeypatch):
    monkeypatch.setattr(side_by_side_http, "TOKENS_OUT", 3)
    with serve(usage="end") as server:
        sample = asyncio.run(side_by_side_http.load(server.url, 4, 2, random.Random(0)))
    assert len(server.bodies) == 8
    assert server.most_running == 4
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 8
    assert {len(body["prompt"]) for body in server.bodies} == {side_by_side_http.TOKENS_IN}
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in server.bodies)
    assert sample["output_tok_s"] > 0
    assert sample["first_s"] > 0


def test_an_answer_that_is_too_short_is_an_error(serve, monkeypatch):
    monkeypatch.setattr(side_by_side_http, "TOKENS_OUT", 3)
    with (
        serve(usage="end", fault=lambda number, body: body.update(max_tokens=2)) as server,
        pytest.raises(RuntimeError, match="in place of 3 tokens"),
    ):
        asyncio.run(side_by_side_http.load(server.url, 1, 1, random.Random(0)))


def test_the_table_has_medians_of_rounds():
    measured = [("quire", 2.0, 30.0, 0.2), ("quire", 2.5, 50.0, 0.4), ("quire", 9.0, 40.0, 0.3)]
    names = ("engine", "ready_s", "output_tok_s", "first_s")
    of_rounds = [*measured, ("xllamacpp", 1.0, 20.0, 0.5)]
    samples = [{"clients": 4, **dict(zip(names, values, strict=True))} for values in of_rounds]
    lines = side_by_side_http.table(samples).splitlines()
    assert lines[2] == "| 4 | 40.0 | 20.0 | 2.00 | 0.30 | 0.50 |"
    assert lines[-1] == "Seconds until healthy: Quire 2.5, llama.cpp's server 1.0."


def test_both_servers_get_the_same_file_threads_and_room(tmp_path):
    given = ["--gguf", "m.gguf", "--out", str(tmp_path), "--xllamacpp", "python-x", "--threads", "2"]
    a = side_by_side_http.parse(given)
    theirs = side_by_side_http.command_of("xllamacpp", a, 1234)
    assert theirs[0] == "python-x"
    assert theirs[2:] == ["m.gguf", "1234", "2", "16", "208"]
    ours = side_by_side_http.command_of("quire", a, 1234)
    assert ours[1:5] == ["-m", "quire", "serve", "m.gguf"]
    assert ours[ours.index("--max-num-seqs") + 1] == "16"


def test_a_server_that_ends_is_an_error(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match="ended with status 3"),
        side_by_side_http.server(command, "http://127.0.0.1:9", tmp_path / "log", 1, 20),
    ):
        pass
