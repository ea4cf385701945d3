"""Runs a mixed load on a real server for a long time: everything allocated for a request must be freed afterwards.

    python benchmarks/soak.py [MODEL] [--minutes 30] [--clients 8] [--only CONFIGURATION...] [--json FILE]

Clients send chats, tool calls, JSON schemas, images, several completions, requests for an adapter, long prompts and
invalid requests. Some close the connection in the middle of a stream, some read slowly. The configurations alternate:
one core, two ranks (tp=2), two replicas (dp=2). Each starts a server and goes through these phases:

    warm-up    the load, until caches and thread pools have reached their sizes
    load       the load; everything must then be as after the warm-up
    kill       the load, while cores or ranks are killed
    stop       SIGTERM in the middle of the load, which must end the server with status 0

Before and after a phase, it measures the memory of all processes of the server (RSS and PSS), and counts their
descriptors and threads, held blocks, and segments of shared memory. A watching stream measures the gaps between its
tokens. The exit status is 1 if memory grew by more than 100 MB, if anything else was not freed, or if a request failed
that should not have.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from PIL import Image, ImageDraw

CONFIGURATIONS = {"one core": [], "tp=2": ["--tensor-parallel-size", "2"], "dp=2": ["--data-parallel-size", "2"]}
MODEL = "quire-demo/vision"
ADAPTER = "quire-demo/rhyme"
SHARES = {"warm-up": 0.2, "load": 0.5, "kill": 0.25, "stop": 0.05}  # of the time of a configuration
MOST_GROWTH = 100e6  # bytes of memory
BURST = 24  # requests at once, when the server is new
LONGEST = 120.0  # seconds; the limit of every wait
RETURNED_WITHIN = 60.0  # seconds, after the last answer
WORDS = "once upon a time there was an old engine that read books to the cat and the moon in the garden".split()
COLORS = "red green blue yellow".split()

# ---- requests of clients

Body = dict[str, Any]


def text_of(draw: random.Random, *lengths: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.choice(lengths)))


def chat(draw: random.Random, content: Any = None, **fields: Any) -> Body:
    sampling = draw.choice([{"temperature": 0}, {"temperature": 1.0, "seed": draw.randrange(99)}, {"top_p": 0.9}])
    content = text_of(draw, 3, 20, 80) if content is None else content
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": draw.choice([4, 16, 40]),
        **sampling,
        "stream": draw.random() < 0.6,
        **fields,
    }


def schema(draw: random.Random) -> Body:
    """Return a JSON schema. Half of the schemas are new, so that no cache contains them."""
    names = draw.sample(WORDS, 3) if draw.random() < 0.5 else WORDS[:3]
    kinds: list[Body] = [
        {"type": "integer"},
        {"type": "string", "maxLength": draw.randrange(1, 9)},
        {"enum": names},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    ]
    properties = {name: draw.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def picture(draw: random.Random) -> str:
    image = Image.new("RGB", (96, 96), "white")
    corner = draw.randrange(40)
    ImageDraw.Draw(image).ellipse((corner, corner, corner + 40, corner + 40), fill=draw.choice(COLORS))
    data = io.BytesIO()
    image.save(data, draw.choice(["PNG", "JPEG"]))
    return "data:image;base64," + base64.b64encode(data.getvalue()).decode()


def tools(draw: random.Random) -> Body:
    functions = [{"name": name, "parameters": schema(draw)} for name in draw.sample(WORDS[:6], 2)]
    declared = [{"type": "function", "function": function} for function in functions]
    return chat(draw, tools=declared, tool_choice=draw.choice(["auto", "required"]))


def wrong(draw: random.Random) -> Body:
    return chat(draw) | draw.choice(
        [
            {"temperature": "hot"},
            {"messages": []},
            {"model": "no-such-model"},
            {"max_tokens": -1},
            {"n": 10**6},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1.5}}}},
        ]
    )


def one_request(draw: random.Random, kind: str) -> Body:
    if kind == "tools":
        return tools(draw)
    if kind == "schema":
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(draw), "strict": True}}
        return chat(draw, response_format=form)
    if kind == "picture":
        return chat(
            draw,
            [
                {"type": "text", "text": "How many balls are there?"},
                {"type": "image_url", "image_url": {"url": picture(draw)}},
            ],
        )
    if kind == "several":
        return chat(draw, n=draw.choice([2, 4]), temperature=0.9)
    if kind == "adapter":
        return chat(draw, model="soak-adapter")
    if kind == "long":
        return chat(draw, text_of(draw, 400))
    if kind == "wrong":
        return wrong(draw)
    if kind in ("abort", "slow"):
        return chat(draw, stream=True, max_tokens=200, ignore_eos=True)
    return chat(draw, **draw.choice([{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["moon"]}]))


KINDS = "chat tools schema picture several adapter long wrong abort slow".split()

# ---- clients


@dataclass
class Seen:
    """The clients' results. failures: unexpected ones. gaps: of the watching stream, in seconds."""

    answers: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)


class Load:
    """Run the clients and a watching stream until `end`. is_disturbed: whether the server or its cores end in the
    meantime.
    """

    def __init__(self, url: str, clients: int, kinds: list[str], seed: int, is_disturbed: bool) -> None:
        self.url = url
        self.kinds = kinds
        self.is_disturbed = is_disturbed
        self.seen, self.end = Seen(), asyncio.Event()
        self._draws = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._clients = clients

    async def run(self, seconds: float, disturb: Any = None) -> Seen:
        """disturb: a coroutine function that runs alongside the clients."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2048) as session:
            running = [asyncio.create_task(self._client(session, draw)) for draw in self._draws]
            running.append(asyncio.create_task(self._watch(session)))
            disturbing = asyncio.create_task(disturb()) if disturb is not None else None
            await asyncio.sleep(seconds)
            self.end.set()
            if disturbing is not None:
                await asyncio.wait_for(disturbing, LONGEST)
            done, late = await asyncio.wait(running, timeout=LONGEST)
            for task in done:
                task.result()
            if late:
                self.seen.failures["no answer"] += len(late)
                for task in late:
                    task.cancel()
                await asyncio.wait(late)
        return self.seen

    async def burst(self) -> None:
        """Send many requests of each kind at once, so that thread and process pools reach their full size."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for kind in ("schema", "picture", "adapter", "long", "schema"):
                if kind in self.kinds:
                    draws = [random.Random(f"{kind} {number}") for number in range(BURST)]
                    await asyncio.gather(*(self._ask(session, draw, kind) for draw in draws))

    async def _client(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        order = draw.sample(self.kinds, len(self.kinds))
        for kind in itertools.cycle(order):
            if self.end.is_set():
                return
            try:
                await self._ask(session, draw, kind)
            except (aiohttp.ClientError, OSError) as error:
                self._failed(type(error).__name__)
                await asyncio.sleep(0.2)

    async def _ask(self, session: aiohttp.ClientSession, draw: random.Random, kind: str) -> None:
        body = one_request(draw, kind)
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            if kind == "abort" and response.status == 200:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(response.content.readany(), draw.random())
                response.close()
                self.seen.answers["abort"] += 1
                return
            text = await self._read(response, kind == "slow")
        expected = 400 <= response.status < 500 if kind == "wrong" else response.status == 200
        if not expected:
            self._failed(f"{kind}: {response.status} {text[:200]}")
        elif body["stream"] and response.status == 200 and ('"error"' in text or not text.endswith("data: [DONE]\n\n")):
            self._failed(f"{kind}: a broken stream: {text[-200:]}")
        else:
            self.seen.answers[kind] += 1

    async def _read(self, response: aiohttp.ClientResponse, is_slow: bool) -> str:
        parts = []
        while part := await response.content.read(512 if is_slow else 1 << 16):
            parts.append(part)
            if is_slow and not self.end.is_set():
                await asyncio.sleep(0.05)
        return b"".join(parts).decode()

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        body = {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 300,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        while not self.end.is_set():
            try:
                async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                    text = ""
                    before = None
                    async for part in response.content.iter_any():
                        now = time.monotonic()
                        text = text[-200:] + part.decode()
                        if before is not None:
                            self.seen.gaps.append(now - before)
                        before = now
                        if self.end.is_set() and not self.is_disturbed:
                            return
                if response.status != 200 or not text.endswith("data: [DONE]\n\n"):
                    self._failed(f"watching: {response.status} {text[-200:]}")
            except (aiohttp.ClientError, OSError) as error:
                self._failed(f"watching: {type(error).__name__}")
                await asyncio.sleep(0.2)

    def _failed(self, what: str) -> None:
        """A request whose core was killed twice is rejected, so failures are only counted then."""
        (self.seen.answers if self.is_disturbed else self.seen.failures)[f"failed: {what}"] += 1


# ---- the server


@dataclass
class Counts:
    """The resources of all processes of a server. Memory in bytes."""

    processes: int
    rss: int
    pss: int
    descriptors: int
    threads: int
    blocks: float  # held blocks, as a share of each core's blocks
    segments: int

    def excess(self, before: Counts) -> list[str]:
        """Return the resources that increased, but should not have."""
        found = [
            f"{name} {getattr(before, name)} -> {getattr(self, name)}"
            for name in ("processes", "descriptors", "threads", "segments")
            if getattr(self, name) > getattr(before, name)
        ]
        if self.pss > before.pss + MOST_GROWTH:
            found.append(f"memory {before.pss / 1e6:.0f} -> {self.pss / 1e6:.0f} MB")
        return found + ([f"blocks {self.blocks:.4f}"] if self.blocks else [])


class Server:
    """`quire serve` on a free port."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        adapter = ["--enable-lora", "--lora-modules", f"soak-adapter={ADAPTER}"] if model == MODEL else []
        command = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            model,
            "--port",
            "0",
            "--kv-cache-memory-bytes",
            "32M",
            "--max-num-seqs",
            "24",
            *adapter,
            *arguments,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.url, self.log, self._ready = "", list[str](), threading.Event()
        self.segments = set[str]()  # files of shared memory that its processes have used
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(LONGEST) or not self.url:
            self.process.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.log[-20:]))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"Serving at (\S+): ", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def victims(self) -> list[psutil.Process]:
        """Cores and ranks."""

        def is_victim(command: str) -> bool:
            return "multiprocessing.spawn" in command or "quire.executor.rank" in command

        found = []
        for process in self.family():
            with suppress(psutil.Error):
                if is_victim(" ".join(process.cmdline())):
                    found.append(process)
        return found

    async def metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def health(self) -> int:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def counts(self) -> Counts:
        """Wait until no request runs or waits."""
        metrics = ""
        async for _ in tries(LONGEST):
            metrics = await self.metrics()
            if await self.health() == 200 and not values(metrics, "num_requests_running", "num_requests_waiting"):
                break
        found = Counts(0, 0, 0, 0, 0, values(metrics, "kv_cache_usage_perc"), 0)
        for process in self.family():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                memory = process.memory_full_info()
                mapped = {
                    m.path for m in process.memory_maps(grouped=False) if m.path.startswith(("/dev/shm/", "/memfd:"))
                }
                self.segments |= {path for path in mapped if path.startswith("/dev/shm/")}
                found.processes += 1
                found.rss += memory.rss
                found.pss += memory.pss
                found.descriptors += process.num_fds()
                found.threads += process.num_threads()
                found.segments += len(mapped)
        return found

    async def returned(self, before: Counts) -> tuple[Counts, list[str]]:
        """Wait until no count is higher than before. Returns the counts, and those that stay higher."""
        async for _ in tries(RETURNED_WITHIN):
            after = await self.counts()
            excess = after.excess(before)
            if not excess:
                break
        return after, excess

    def left(self) -> list[str]:
        """Return the segments that outlive the server."""
        return sorted(path for path in self.segments if Path(path).exists())


def values(metrics: str, *names: str) -> float:
    """Return the sum of these metrics over all cores."""
    found = [re.findall(rf"^quire:{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE) for name in names]
    return sum(map(float, itertools.chain(*found)))


async def tries(seconds: float) -> AsyncIterator[None]:
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() > end:
            return
        await asyncio.sleep(0.5)


# ---- phases


@dataclass
class Phase:
    configuration: str
    name: str
    seconds: float
    before: Counts | None = None
    after: Counts | None = None
    seen: Seen = field(default_factory=Seen)
    faults: list[str] = field(default_factory=list)

    HEAD = (
        f"{'configuration':13} {'phase':8} {'answers':>7} {'failed':>6} {'RSS MB':>13} {'PSS MB':>11} "
        f"{'fds':>9} {'threads':>9} {'blocks':>6} {'shm':>7}  {'gaps: p50, p99, max s':24}"
    )

    def to_json(self) -> dict[str, Any]:
        counts = {name: c and vars(c) for name, c in (("before", self.before), ("after", self.after))}
        seen = {**vars(self.seen), "gaps": sorted(self.seen.gaps)[-100:]}  # the longest
        return {**vars(self), **counts, "seen": seen}

    def line(self) -> str:
        columns = {"rss": 13, "pss": 11, "descriptors": 9, "threads": 9, "segments": 7}
        shown = {}
        for name, width in columns.items():
            both = [getattr(c, name) if c else None for c in (self.before, self.after)]
            scaled = [v if v is None or name not in ("rss", "pss") else round(v / 1e6) for v in both]
            shown[name] = ("-" if None in scaled else f"{scaled[0]} -> {scaled[1]}").rjust(width)
        gaps = sorted(self.seen.gaps) or [0.0]
        watched = f"{gaps[len(gaps) // 2]:.3f}, {gaps[len(gaps) * 99 // 100]:.3f}, {gaps[-1]:.3f}"
        failed = sum(n for what, n in (self.seen.answers + self.seen.failures).items() if what.startswith("failed"))
        blocks = f"{self.after.blocks:.3f}" if self.after else "-"
        return (
            f"{self.configuration:13} {self.name:8} {self.seen.answers.total():7} {failed:6} {shown['rss']} "
            f"{shown['pss']} {shown['descriptors']} {shown['threads']} {blocks:>6} {shown['segments']}  "
            f"{watched:24}"
        )


async def run_configuration(
    name: str, model: str, arguments: list[str], seconds: float, clients: int, seed: int, phases: list[Phase]
) -> None:
    server = Server(model, arguments)
    kinds = [kind for kind in KINDS if model == MODEL or kind not in ("picture", "adapter")]
    draw = random.Random(seed)
    before: Counts | None = None
    try:
        for phase_name, share in SHARES.items():
            phase = Phase(name, phase_name, seconds * share, before)
            load = Load(server.url, clients, kinds, draw.randrange(1 << 30), phase_name in ("kill", "stop"))

            async def kill(load: Load = load, seconds: float = phase.seconds) -> None:
                while not load.end.is_set():
                    await asyncio.sleep(min(20.0, seconds / 3))
                    victims = server.victims()
                    if victims and not load.end.is_set():
                        with suppress(psutil.NoSuchProcess):
                            draw.choice(victims).kill()
                    async for _ in tries(LONGEST):
                        if await server.health() == 200:
                            break

            async def stop(load: Load = load, seconds: float = phase.seconds) -> None:
                await asyncio.sleep(seconds / 2)
                load.end.set()
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(server.process.wait, LONGEST)

            disturb = {"kill": kill, "stop": stop}.get(phase_name)
            if phase_name == "warm-up":
                await load.burst()
            family = server.family()
            phase.seen = await load.run(phase.seconds, disturb)
            if phase_name == "stop":
                _, alive = psutil.wait_procs(family, timeout=RETURNED_WITHIN)
                phase.faults += [f"process {process.pid} was left behind" for process in alive]
                phase.faults += [f"{path} was left behind" for path in server.left()]
                if server.process.returncode:
                    phase.faults.append(f"exit status {server.process.returncode}")
            elif before is None:
                before = phase.after = await server.counts()
            else:
                phase.after, phase.faults = await server.returned(before)
            phase.faults += [f"{number} x {what}" for what, number in phase.seen.failures.items()]
            phases.append(phase)
            print(phase.line(), *(f"  {fault}" for fault in phase.faults), sep="\n", flush=True)
    except BaseException:
        print("".join(server.log[-20:]), file=sys.stderr)
        raise
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="for all configurations (default: %(default)s)")
    parser.add_argument("--round-minutes", type=float, default=2.5, help="until a configuration's server is restarted")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = max(1, round(arguments.minutes / len(arguments.only) / arguments.round_minutes))
    seconds = 60 * arguments.minutes / len(arguments.only) / rounds
    phases: list[Phase] = []
    print(Phase.HEAD, flush=True)
    for number, name in itertools.product(range(rounds), arguments.only):
        seed = arguments.seed + number
        asyncio.run(
            run_configuration(name, arguments.model, CONFIGURATIONS[name], seconds, arguments.clients, seed, phases)
        )
    total = sum((phase.seen.answers for phase in phases), Counter[str]())
    print("answers:", ", ".join(f"{kind} {number}" for kind, number in sorted(total.items())))
    faults = [f"{phase.configuration}, {phase.name}: {fault}" for phase in phases for fault in phase.faults]
    print(f"{len(faults)} faults", *faults, sep="\n  ", flush=True)
    if arguments.json:
        results = [phase.to_json() for phase in phases]
        arguments.json.write_text(json.dumps({"phases": results, "faults": faults}, indent=1))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
