"""Measures the cost of traces for the API process.

    python -m benchmarks.traces_cost --rounds 5

Three servers with the bundled model run one after the other in each round, and answer the same requests: without
--otlp-traces-endpoint, with it but unsampled by the clients' `traceparent`, and with it and four spans for each
request, which a collector receives. The collector runs in another process. It measures the CPU seconds of the API
process, for requests of one token and for streams of 64.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import psutil

PORT = 8392
COLLECTOR = 8393
URL = f"http://127.0.0.1:{PORT}"
ENDPOINT = ("--otlp-traces-endpoint", f"http://127.0.0.1:{COLLECTOR}")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "without the option": ((), "00"),
    "not recorded": (ENDPOINT, "00"),
    "recorded": (ENDPOINT, "01"),
}
TOKENS = (1, 64)


def collect() -> None:
    """Receive spans and count them, in a separate process."""
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    class Collector(service.TraceServiceServicer):  # type: ignore[misc]
        num_spans = 0

        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            spans = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
            self.num_spans += spans
            print(self.num_spans, flush=True)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    server.add_insecure_port(f"127.0.0.1:{COLLECTOR}")
    server.start()
    server.wait_for_termination()


async def work(requests: int, tokens: int, flag: str) -> None:
    import aiohttp

    limit = asyncio.Semaphore(16)
    async with aiohttp.ClientSession() as session:

        async def ask(number: int) -> None:
            body = {"prompt": f"Story {number}.", "max_tokens": tokens, "ignore_eos": True, "stream": tokens > 1}
            headers = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-{flag}"}
            async with limit, session.post(f"{URL}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()

        await asyncio.gather(*(ask(number) for number in range(requests)))


def measure(case: str, requests: int) -> dict[int, float]:
    """Return the milliseconds of CPU time per request, by its number of tokens."""
    options, flag = CASES[case]
    command = [sys.executable, "-m", "quire", "serve", "--port", str(PORT), "--disable-uvicorn-access-log", *options]
    environment = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "500"}
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    found = {}
    try:
        while True:
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
        process = psutil.Process(server.pid)
        asyncio.run(work(requests, TOKENS[0], flag))  # warms up
        for tokens in TOKENS:
            before = sum(process.cpu_times()[:2])
            asyncio.run(work(requests, tokens, flag))
            time.sleep(2)  # until all spans are sent
            found[tokens] = 1000 * (sum(process.cpu_times()[:2]) - before) / requests
    finally:
        server.terminate()
        server.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        collect()
        return
    command = [sys.executable, "-m", "benchmarks.traces_cost", "--collect"]
    collector = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found: dict[str, list[dict[int, float]]] = {case: [] for case in CASES}
    try:
        for number in range(options.rounds):
            for case in CASES if number % 2 else reversed(CASES):
                found[case].append(measure(case, options.requests))
                print(f"round {number}: {case}: {found[case][-1]}", file=sys.stderr, flush=True)
    finally:
        collector.terminate()
        collector.wait()
    for tokens in TOKENS:
        base = [each[tokens] for each in found["without the option"]]
        print(f"{tokens} tokens a request:")
        for case, each in found.items():
            values = [value[tokens] for value in each]
            more = median(a - b for a, b in zip(values, base, strict=True))
            print(
                f"  {case:<20} {median(values):6.3f} ms a request, {more:+.3f} ms ({100 * more / median(base):+.1f} %)"
            )


if __name__ == "__main__":
    main()
