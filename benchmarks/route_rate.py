"""Measures how many requests and stream chunks per second `quire route` can forward on one core.

    python benchmarks/route_rate.py [--requests 4000] [--streams 200] [--chunks 100] [--rounds 5] [--clients 32]
        [--ports 8001 8002] [--peer NAME:PID:PORT]

The servers are trivial, so most of the time is the proxy's. The processor time of its process is measured, since the
client and the servers share the machine's cores with it. The policies alternate in each round. Latencies are those of
one request at a time, with and without the proxy. --peer also measures another proxy that was started in front of the
servers at --ports (two trivial ones are started there).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from typing import Any

import psutil
import uvloop

TEXT = "Once upon a time, in a small town by the sea, there lived a king. " * 8
ANSWER = json.dumps(
    {"id": "cmpl-0", "object": "text_completion", "choices": [{"index": 0, "text": TEXT[:200]}]}
).encode()
EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
)
EVENT_SECONDS = 0.01
POLICIES = {
    "round-robin": [],
    "least-loaded": [],
    "prefix": [],
    "sessions": ["--policy", "least-loaded", "--session-header", "X-Session-ID"],
}


# ---- the servers


async def trivial(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application. A stream has as many events as max_tokens."""
    body = b""
    more = True
    while more:
        message = await receive()
        body = body + message.get("body", b"")
        more = message.get("more_body")
    fields = json.loads(body or b"{}")  # health checks have none
    count = fields["max_tokens"] if fields.get("stream") else 0
    kind = b"text/event-stream" if count else b"application/json"
    length = [] if count else [(b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *length]})
    for _ in range(count):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(EVENT_SECONDS)
    await send({"type": "http.response.body", "body": b"" if count else ANSWER})


def serve_trivially(port: int) -> None:
    import uvicorn

    uvicorn.run(trivial, port=port, log_level="info", access_log=False, lifespan="off")


# ---- the client


class Connection(asyncio.Protocol):
    """Sends requests one after the other until none are left."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.received = bytearray()
        self.began = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._next()

    def _next(self) -> None:
        self.received.clear()
        if self.load.left:
            self.load.left -= 1
            self.began = time.perf_counter()
            self.transport.write(self.load.request)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head = self.received.find(b"\r\n\r\n")
        if head < 0:
            return
        length = re.search(rb"content-length: (\d+)", self.received[:head], re.IGNORECASE)
        ended = len(self.received) >= head + 4 + int(length[1]) if length else data.endswith(b"0\r\n\r\n")
        if ended:
            assert self.received.startswith(b"HTTP/1.1 200"), self.received
            self.load.seconds.append(time.perf_counter() - self.began)
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self.load.ended(error)


class Load:
    """Send a number of requests over several connections."""

    def __init__(self, port: int, count: int, clients: int, events: int = 0) -> None:
        fields = {"model": "m", "prompt": TEXT, "max_tokens": events or 16, "temperature": 0, "stream": events > 0}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
            "Content-Type: application/json\r\nAuthorization: Bearer key\r\nUser-Agent: benchmark\r\n"
            f"X-Session-ID: session\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.request = head.encode() + body
        self.left = count
        self.seconds = list[float]()
        self._port = port
        self._clients = clients
        self._open = clients
        self._done = asyncio.get_running_loop().create_future()

    async def run(self) -> list[float]:
        """Run the load. Returns the seconds of each request."""
        loop = asyncio.get_running_loop()
        for _ in range(self._clients):
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
        await self._done
        return self.seconds

    def ended(self, error: Exception | None) -> None:
        self._open -= 1
        if error and not self._done.done():
            self._done.set_exception(error)
        if not self._open and not self._done.done():
            self._done.set_result(None)


async def processor_seconds(process: psutil.Process, load: Load) -> float:
    before = process.cpu_times()
    await load.run()
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


# ---- the measurement


def start(command: list[str], ready: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process, and wait until it is ready. Returns the process and its port."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port = next(int(found[1]) for line in process.stderr if (found := re.search(ready, line)))
    return process, port


async def measure(ports: dict[str, int], processes: dict[str, psutil.Process], direct: int, a: Any) -> dict[str, Any]:
    """Return the measured numbers of each policy, as lists with one entry per round. The warm-up round is not
    included."""
    results: dict[str, Any] = {name: {"request": [], "chunk": [], "latency": []} for name in ports}
    bare = []
    for number in range(a.rounds + 1):
        without = statistics.median(await Load(direct, 300, 1).run())
        for name, port in ports.items():
            short = await processor_seconds(processes[name], Load(port, a.requests, a.clients))
            streams = await processor_seconds(processes[name], Load(port, a.streams, a.streams // 2, a.chunks))
            latency = statistics.median(await Load(port, 300, 1).run())
            if number:
                results[name]["request"].append(short / a.requests)
                results[name]["chunk"].append(streams / (a.streams * a.chunks))
                results[name]["latency"].append(latency)
                print(f"round {number}, {name}: {short / a.requests * 1e6:.0f} µs a request", flush=True)
        bare += [without] if number else []
    return {"direct": statistics.median(bare), "policies": results}


def table(measured: dict[str, Any]) -> str:
    lines = [
        "| policy | µs of processor time a request | requests per core second | lowest to highest | µs a chunk "
        "| chunks per core second | ms of latency added |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, lists in measured["policies"].items():
        request = statistics.median(lists["request"])
        chunk = statistics.median(lists["chunk"])
        added = (statistics.median(lists["latency"]) - measured["direct"]) * 1e3
        rates = sorted(1 / seconds for seconds in lists["request"])
        lines.append(
            f"| {name} | {request * 1e6:.0f} | {1 / request:,.0f} | {rates[0]:,.0f} to {rates[-1]:,.0f} "
            f"| {chunk * 1e6:.1f} | {1 / chunk:,.0f} | {added:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"requests": 4000, "streams": 200, "chunks": 100, "rounds": 5, "clients": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ports", type=int, nargs=2, default=[0, 0])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_trivially(arguments.serve)
        return
    started = []
    try:
        for port in arguments.ports:
            started.append(
                start([sys.executable, __file__, "--serve", str(port)], r"running on http://127.0.0.1:(\d+)")
            )
        urls = [f"http://127.0.0.1:{port}" for _, port in started]
        ports = {}
        processes = {}
        for name, options in POLICIES.items():
            command = [sys.executable, "-m", "quire", "route", "--port", "0", *(options or ["--policy", name])]
            started.append(start([*command, "--backend", *urls], r"Routing at http://127.0.0.1:(\d+)"))
            process, ports[name] = started[-1]
            processes[name] = psutil.Process(process.pid)
        own = list(processes.values())
        for peer in arguments.peer:
            name, pid, port = peer.split(":")
            ports[name], processes[name] = int(port), psutil.Process(int(pid))
        measured = uvloop.run(measure(ports, processes, started[0][1], arguments))
        packages = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "httptools", "uvloop", "aiohttp"))
        print(f"\n{date.today()}, {psutil.cpu_count()} cores, Python {platform.python_version()}, {packages}\n")
        print(table(measured))
        memory = max(process.memory_info().rss for process in own) / 2**20
        print(f"\nlatency without the proxy: {measured['direct'] * 1e3:.2f} ms; memory of a proxy: {memory:.0f} MiB")
    finally:
        for process, _ in started:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
