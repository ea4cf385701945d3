"""Load generation for `quire bench serve`: sends streaming requests to an OpenAI-compatible server and times them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import aiohttp
import msgspec
import numpy as np

from quire.bench.datasets import SAFE_VOCAB_SIZE, BenchRequest, Prompt, RandomPrompts
from quire.messages.errors import error_text

_USAGE: list[dict[str, Any]] = [  # ways to get token counts, best first: in each chunk, at the end, not at all
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
]
_HOPELESS = (0, 401, 403, 404, 429)  # no other format of the request would succeed
_NO_TOKENS = "the answer has no tokens"
_TIMEOUT_S = 6 * 3600


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass
class Outcome:
    """A request as the client saw it. Times are in seconds: `start` since the start of the run, the others since
    `start`.

    itls: the gaps between events with tokens. error: empty if the request succeeded.
    """

    start: float
    prompt_len: int
    output_len: int = 0
    queue_time: float = 0.0  # how long the client delayed it because of max_concurrency
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    status: int = 0

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class Target:
    """A server's endpoint, and the format of its requests. An asynchronous context manager."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        model: str | None,
        headers: dict[str, str],
        extra_body: dict[str, Any],
        *,
        request_id_prefix: str | None = None,
        check_certificate: bool = True,
    ) -> None:
        """extra_body: fields to add to every request; null removes a field. request_id_prefix: if it is not None,
        requests carry an X-Request-Id that begins with it."""
        self._base_url = base_url.rstrip("/")
        self.url = self._base_url + endpoint
        self.model = model
        self.extra_body = extra_body
        self.vocab_size: int | None = None
        self._chat = endpoint.endswith("/chat/completions")
        self._models_url = self.url.removesuffix("/completions").removesuffix("/chat") + "/models"
        self._headers = {"Content-Type": "application/json", **headers}
        self._usage: dict[str, Any] = {}
        self._request_id_prefix = request_id_prefix
        self._check_certificate = check_certificate
        self._num_sent = 0

    async def __aenter__(self) -> "Target":
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._check_certificate),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def find_model(self, patience: float = 0.0) -> None:
        """Ask the server for the model's name, if none was given, and for the size of its vocabulary.

        patience: seconds to wait for a server that does not respond yet. Raises OSError.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                return await self._find_model()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)

    async def _find_model(self) -> None:
        try:
            async with self._session.get(self._models_url) as response:
                listed = (await response.json(content_type=None))["data"] if response.status == 200 else []
                entry: dict[str, Any] = next((e for e in listed if self.model in (None, e["id"])), {})
                problem = f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            raise OSError(f"no server answers at {self._models_url}: {error_text(error)}") from error
        except (ValueError, TypeError, KeyError) as error:
            entry = {}
            problem = f"no list of models ({error!r})"
        self.model = self.model or entry.get("id")
        if self.model is None:
            raise OSError(f"{self._models_url} answers {problem}; say which model with --model")
        size = entry.get("vocab_size")
        self.vocab_size = size if isinstance(size, int) and size > 0 else None

    async def find_prompts(self, prompts: RandomPrompts) -> None:
        """Send small requests to find a format that the server accepts. Raises OSError if all fail.

        Sets prompts.vocab_size. If prompts must be text, it is None, and the number of words is calibrated.
        """
        as_ids = [] if self._chat else [prompts.vocab_size or self.vocab_size or SAFE_VOCAB_SIZE]
        for vocab_size, self._usage in product([*as_ids, None], _USAGE):
            probe = RandomPrompts(np.random.default_rng(), vocab_size)
            outcome = await self.send(probe.make(16), 16, 2)
            if outcome.error in ("", _NO_TOKENS):
                prompts.vocab_size = vocab_size
                if vocab_size is None:
                    words = (16, 80)
                    tokens = [(await self.send(probe.make(n), n, 1)).prompt_len for n in words]
                    prompts.calibrate(words, (tokens[0], tokens[1]))
                return
            if outcome.status in _HOPELESS:
                break
        raise OSError(f"{self.url} fails a first small request: {outcome.error}")

    async def order(self, path: str) -> None:
        """Post a control request that is not part of the benchmark. Raises OSError if it fails."""
        url = self._base_url + path
        try:
            async with self._session.post(url) as response:
                if response.status >= 400:
                    raise OSError(f"{url} answers HTTP {response.status}: {(await response.text())[:300].strip()}")
        except aiohttp.ClientError as error:
            raise OSError(f"{url} does not answer: {error_text(error)}") from error

    def body(self, prompt: Prompt, output_len: int) -> dict[str, Any]:
        input_field = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        fields = {"model": self.model, **input_field, "max_tokens": output_len, "temperature": 0.0, "stream": True}
        return {k: v for k, v in {**fields, **self._usage, **self.extra_body}.items() if v is not None}

    def _next_id(self) -> dict[str, str] | None:
        if self._request_id_prefix is None:
            return None
        self._num_sent += 1
        return {"X-Request-Id": f"{self._request_id_prefix}{self._num_sent - 1}"}

    async def send(self, prompt: Prompt, prompt_len: int, output_len: int) -> Outcome:
        """Send one request and read its stream to the end. Errors are not raised but reported in the outcome."""
        if self._chat and not isinstance(prompt, str):
            return Outcome(time.perf_counter(), prompt_len, error="a chat endpoint takes no token ids")
        data = msgspec.json.encode(self.body(prompt, output_len))
        outcome = Outcome(time.perf_counter(), prompt_len)
        try:
            async with self._session.post(self.url, data=data, headers=self._next_id()) as response:
                outcome.status = response.status
                if response.status == 200:
                    await _read_stream(response.content, outcome)
                else:
                    outcome.error = f"HTTP {response.status}: {(await response.text(errors='replace'))[:300].strip()}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: invalid JSON
            outcome.error = error_text(error)
        if outcome.error:
            outcome.latency = time.perf_counter() - outcome.start
        return outcome


async def _read_stream(stream: aiohttp.StreamReader, outcome: Outcome) -> None:
    """Read server-sent events into the outcome."""
    events = _Events(outcome)
    rest = b""
    async for piece in stream.iter_any():
        now = time.perf_counter() - outcome.start
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                events.read(line[5:].strip(), now)
    events.close()


class _Events:
    """Adds the events of a stream to an outcome.

    An event contains tokens if it has a choice and its usage has grown. If it has no usage, it contains tokens if it
    has text.
    """

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._last = 0.0  # when the last event with tokens came
        self._finished = False
        self._counted: int | None = None  # tokens, according to the usage
        self._text: list[str] = []

    def read(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._finished = True
            return
        outcome = self._outcome
        chunk = _decode(payload)
        if chunk.error is not None:
            outcome.error = f"error in the stream: {chunk.error}"
        new_text = self._read_choices(chunk.choices, now)
        self._text.append(new_text)
        has_tokens = bool(new_text)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
            has_tokens = bool(chunk.choices) and chunk.usage.completion_tokens > (self._counted or 0)
            self._counted = chunk.usage.completion_tokens
        if has_tokens and not self._last:
            outcome.ttft = self._last = now
        elif has_tokens:
            outcome.itls.append(now - self._last)
            self._last = now

    def _read_choices(self, choices: list[_Choice], now: float) -> str:
        """Add the choices, and return their text."""
        outcome = self._outcome
        text = ""
        for choice in choices:
            outcome.latency = now
            text += _text(choice)
            self._finished |= choice.finish_reason is not None
            if choice.finish_reason in ("error", "abort"):
                outcome.error = outcome.error or f"the server ended it with finish_reason {choice.finish_reason!r}"
        return text

    def close(self) -> None:
        """Complete the outcome at the end of the stream."""
        outcome = self._outcome
        num_events = len(outcome.itls) + (self._last > 0)
        outcome.text = "".join(self._text)
        outcome.output_len = num_events if self._counted is None else self._counted
        if not num_events:  # the tokens have no text, and the server counts them only at the end
            outcome.ttft = outcome.latency
        if not self._finished:
            outcome.error = outcome.error or "the stream ended before the answer did"
        elif not outcome.output_len:
            outcome.error = outcome.error or _NO_TOKENS


def _text(choice: _Choice) -> str:
    if choice.delta is not None:
        return choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning or ""
    return choice.text or ""


async def drive(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], object] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send request i at arrivals[i] seconds or, if max_concurrency requests are running then, as soon as one ends.
    Returns the outcomes and the duration in seconds."""
    limit: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    started = time.perf_counter()

    async def send(request: BenchRequest, arrival: float) -> Outcome:
        await asyncio.sleep(started + arrival - time.perf_counter())
        due = time.perf_counter()
        async with limit:
            queue_time = time.perf_counter() - due
            outcome = await target.send(request.prompt, request.prompt_len, request.output_len)
        outcome.queue_time = queue_time
        outcome.start -= started
        on_done(outcome)
        return outcome

    outcomes = await asyncio.gather(*(send(*pair) for pair in zip(requests, arrivals, strict=True)))
    return outcomes, time.perf_counter() - started
