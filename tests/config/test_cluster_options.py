"""Which part of an engine runs on which machine, by vLLM's options, and which options contradict each other."""

from __future__ import annotations

import shlex

import pytest

from quire.cli.flags import engine_options
from quire.cli.main import build_parser
from quire.config.cluster import Layout
from quire.config.engine import ConfigError, EngineConfig

SECRET = "--cluster-secret-file secret"


def layout(line: str) -> Layout:
    return EngineConfig.create(**engine_options(build_parser().parse_args(["serve", *shlex.split(line)]))).layout


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Layout(range(1), range(1))),
        ("-tp 8 -dp 4", Layout(range(4), range(4))),
        # A replica that two machines share.
        (f"-tp 4 -n 2 -r 0 {SECRET}", Layout(range(1), range(1), 2, 0)),
        (f"-tp 4 -n 2 -r 1 --headless {SECRET}", Layout(range(0), range(0), 2, 1)),
        (f"-tp 2 -pp 2 --nnodes 4 --node-rank 3 --headless {SECRET}", Layout(range(0), range(0), 4, 3)),
        # Replicas on several machines behind one server.
        (f"-dp 4 -dpl 2 -dpa 10.0.0.1 -dpp 13345 {SECRET}", Layout(range(4), range(2))),
        (f"-dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.1 -dpp 13345 --headless {SECRET}", Layout(range(0), range(2, 4))),
        (f"-dp 4 -dpl 0 {SECRET}", Layout(range(4), range(0))),
        (f"-dp 4 -dpl 4 -dpr 0 --headless {SECRET}", Layout(range(0), range(4))),
        (f"-dp 4 -tp 2 -n 2 {SECRET}", Layout(range(4), range(2))),
        (f"-dp 4 -tp 2 -n 2 -r 1 --headless {SECRET}", Layout(range(0), range(2, 4))),
        ("-dp 4 -dpb ray", Layout(range(4), range(0))),
        # Servers that something else balances.
        ("-dp 4 -dpl 2 -dph", Layout(range(2), range(2))),
        ("-dp 4 -dpl 2 -dpr 2 -dph", Layout(range(2, 4), range(2, 4))),
        ("-dp 4 -dpl 2 -dpr 2", Layout(range(2, 4), range(2, 4))),
        ("-dp 4 -n 2 -r 1 -dph", Layout(range(2, 4), range(2, 4))),
        ("-dp 4 -dpn 3", Layout(range(3, 4), range(3, 4))),
        ("-dp 4 -n 4 -r 2 -dpe", Layout(range(2, 3), range(2, 3))),
    ],
)
def test_each_machine_has_its_part(line, expected):
    assert layout(line) == expected


def test_the_replicas_elsewhere_are_those_that_a_server_has_and_its_machine_has_not():
    assert layout(f"-dp 4 -dpl 1 {SECRET}").elsewhere == range(1, 4)
    for line in ("-dp 4", "-dp 4 -dpn 3", "-dp 4 -dpl 2 -dpr 2 -dph", f"-dp 4 -dpl 2 -dpr 2 --headless {SECRET}"):
        assert not layout(line).elsewhere


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 2 -n 2", "cluster_secret_file is missing"),
        ("-dp 2 -dpl 1", "cluster_secret_file is missing"),
        ("-dp 2 -dpl 1 -dpr 1 --headless", "cluster_secret_file is missing"),
        (f"-tp 2 -n 2 -r 2 {SECRET}", "node_rank=2 must be less than nnodes=2"),
        (f"-tp 2 -n 2 -r 1 {SECRET}", "node_rank=1: only the machine with number 0 has a server; add headless"),
        (f"-tp 3 -n 2 {SECRET}", "nnodes=2: 3 ranks cannot be divided equally"),
        (f"-tp 6 -n 4 {SECRET}", "nnodes=4: 6 ranks cannot be divided equally"),
        (f"-tp 4 -dp 2 -n 4 {SECRET}", "need distributed_executor_backend=ray"),
        (f"-tp 2 -dp 3 -n 2 {SECRET}", "nnodes=2: each machine must have whole replicas"),
        ("-tp 2 -n 2 --distributed-executor-backend ray", "nnodes .* Ray finds the machines"),
        (f"-dp 2 --headless -dpb ray {SECRET}", "headless .* Ray starts the replicas"),
        ("--headless", "headless: say which part of the engine this machine has"),
        (f"-dp 2 -dpl 2 -dpr 1 --headless {SECRET}", "data_parallel_size=2: there is no replica 2"),
        ("-dp 2 -dpn 2", "data_parallel_size=2: there is no replica 2"),
        ("-dp 2 -dpe", "data_parallel_external_lb: say which replica this server has"),
        ("-dp 4 -dpn 1 -dpl 2", "each server has one replica"),
        ("-dp 2 -dph", "say how many replicas this server has, with data_parallel_size_local"),
        ("--master-port 70000", "master_port must be at most 65535"),
        ("--data-parallel-size-local -1", "data_parallel_size_local must be an integer of at least 0"),
    ],
)
def test_options_that_contradict_each_other_are_an_error_that_says_what_to_do(line, message):
    with pytest.raises(ConfigError, match=message):
        layout(line)
