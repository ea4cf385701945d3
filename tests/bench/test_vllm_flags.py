"""`quire bench serve` takes the command lines of `vllm bench serve`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime

import numpy as np
import pytest

from quire.bench.datasets import ramp_up_times
from quire.cli.main import build_parser, main
from support.waiting import LONGEST, eventually

SHORT = ["--input-len", "10", "--output-len", "3", "--num-prompts", "2", "--disable-tqdm"]


@contextmanager
def forwarding(port: int, url: str) -> Iterator[None]:
    """Whatever connects to the port talks to the server at the URL."""
    host, _, target = url.removeprefix("http://").partition(":")

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection((host, int(target)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", port)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def refusing(port: int) -> Iterator[list[socket.socket]]:
    """Whatever connects to the port is refused, and listed."""
    refused: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                refused.append(listening.accept()[0])
                refused[-1].close()

    with socket.create_server(("127.0.0.1", port)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield refused
        listening.shutdown(socket.SHUT_RDWR)


def test_flags_become_fields_and_headers_of_each_request(serve, capsys):
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1", "--logprobs", "2"]
    penalties = ["--frequency-penalty", "0.2", "--presence-penalty", "0.3", "--repetition-penalty", "1.1"]
    template = ["--chat-template-kwargs", '{"enable_thinking": false}']
    with serve() as server:
        line = ["--base-url", server.url, *SHORT, *sampling, *penalties, *template, "--request-id-prefix", "run-"]
        assert main(["bench", "serve", "--backend", "vllm", *line]) == 0
        first, second = server.measured(2)
        assert first["max_tokens"] == 3
        assert len(first["prompt"]) == 10
        wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2}
        wanted |= {"presence_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 2}
        wanted |= {"chat_template_kwargs": {"enable_thinking": False}}
        assert wanted.items() <= second.items()
        ids = [headers["X-Request-Id"] for headers in server.headers]
        assert ids == [f"run-{i}" for i in range(len(ids))]
        assert main(["bench", "serve", "--backend", "openai-chat", *line]) == 0
        chat = server.measured(1)[0]
        assert chat["messages"]
        assert (chat["logprobs"], chat["top_logprobs"]) == (True, 2)


def test_the_name_on_the_server_can_differ_from_the_model(serve):
    with serve() as server:
        names = ["some/model", "--served-model-name", "tiny", "--tokenizer", "some/model"]
        assert main(["bench", "serve", *names, "--base-url", server.url, *SHORT]) == 0
        assert server.measured(1)[0]["model"] == "tiny"


def test_results_have_a_label_and_metadata_and_can_be_appended(serve, tmp_path):
    with serve() as server:
        flags = [
            "--base-url",
            server.url,
            "--result-dir",
            str(tmp_path),
            "--label",
            "here",
            "--metadata",
            "tp=1",
            "a=b",
        ]
        for _ in range(2):
            assert main(["bench", "serve", *flags, *SHORT, "--append-result", "--result-filename", "all.jsonl"]) == 0
        assert main(["bench", "serve", *flags, *SHORT, "--save-result", "--max-concurrency", "2"]) == 0
    results = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(r["label"], r["tp"], r["a"], r["backend"]) for r in results] == [("here", "1", "b", "openai")] * 2
    [other] = [file for file in tmp_path.iterdir() if file.name != "all.jsonl"]
    assert other.name.startswith(f"here-infqps-concurrency2-tiny-{datetime.now():%Y}")


def test_it_waits_for_a_server_that_is_not_ready_yet(serve, capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    line = ["bench", "serve", "--port", str(port), *SHORT]
    assert main(line) == 1
    assert "no server answers at" in capsys.readouterr().err
    with serve() as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(main, [*line, "--ready-check-timeout-sec", "600"])
        with refusing(port) as refused:
            eventually(lambda: len(refused) > 1)
        assert not waiting.done()
        with forwarding(port, server.url):
            assert waiting.result(LONGEST) == 0


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_the_request_rate_grows_over_the_run(serve, strategy):
    times = np.array(ramp_up_times(20_000, strategy, 2.0, 32.0, 1.0, np.random.default_rng(0)))
    gaps = np.diff(times)
    assert 1 / gaps[:500].mean() == pytest.approx(2.0, rel=0.3)
    assert 1 / gaps[-500:].mean() == pytest.approx(32.0, rel=0.15)
    middle = 17.0 if strategy == "linear" else 8.0
    assert 1 / gaps[9_500:10_500].mean() == pytest.approx(middle, rel=0.15)
    flags = ["--ramp-up-strategy", strategy, "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "100"]
    with serve() as server:
        assert main(["bench", "serve", "--base-url", server.url, *SHORT, *flags]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ramp-up-strategy linear", "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ("--ramp-up-strategy linear --request-rate 1", "leave out --request-rate"),
        ("--max-concurrency 0", "--max-concurrency must be at least 1"),
    ],
)
def test_flags_that_do_not_go_together_are_errors(line, message, capsys):
    assert main(["bench", "serve", *line.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--tokenizer a/b --tokenizer-mode auto --trust-remote-code --skip-tokenizer-init --probe-request-rate 0",
        "--no-stream --no-oversample --skip-chat-template --disable-shuffle --timeline-itl-thresholds 25,50",
        "--endpoint-type openai-chat --dataset-name prefix_repetition --lora-assignment random",
    ],
)
def test_flags_that_do_nothing_here_are_taken(line):
    build_parser().parse_args(["bench", "serve", *line.split()])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--use-beam-search", "--use-beam-search is not supported by Quire yet"),
        ("--lora-modules a b", "--lora-modules is not supported by Quire yet"),
        ("--hf-split train", "--hf-split is not supported by Quire yet"),
        ("--dataset-name sharegpt", "sharegpt is not supported by Quire yet; there are random, prefix_repetition"),
        ("--dataset-name rnadom", "'rnadom' is none of random"),
        ("--backend tgi", "tgi is not supported by Quire yet; there are openai, vllm, openai-chat"),
        ("--probe-request-rate 2", "--probe-request-rate"),
    ],
)
def test_other_flags_of_vllm_are_refused_by_name(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["bench", "serve", *line.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
