"""What each request went through: waiting, chunks of its prompt, output, drafts and preemptions, with times."""

from collections import deque
from collections.abc import Sequence

import msgspec

from quire.scheduler.request import Request, Status

MOST_ENDED = 60  # requests that are kept after their end
MOST_CHUNKS = 256  # of a request's prompt, and of its preemptions
_PLACES = 4  # decimals of seconds


class Chunk(msgspec.Struct, array_like=True):
    """Tokens of a prompt that one step computed. begin, end: seconds."""

    begin: float
    end: float
    tokens: int


class Life(msgspec.Struct, omit_defaults=True):
    """A request. Times are in seconds, by the clock of the view. arrived: when the server received it; began: of its
    first step; first, last: of its first and latest token; ended: of its end. preemptions: from the latest step before
    a preemption to the next one after it. steps: that generated its output; output: tokens."""

    id: str
    arrived: float
    prompt: int
    began: float = 0.0
    cached: int = 0
    chunks: list[Chunk] = []
    first: float = 0.0
    last: float = 0.0
    output: int = 0
    steps: int = 0
    accepted: int = 0
    rejected: int = 0
    preemptions: list[tuple[float, float]] = []
    ended: float = 0.0


class Lives:
    """The requests of the observed steps."""

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}
        self._ended: deque[str] = deque()
        self._clock = 0  # counts changes
        self._changes: dict[str, int] = {}  # the latest change of each life
        self._begins: dict[int, float] = {}  # of steps in flight, in seconds
        self._prompts: dict[int, Sequence[int]] = {}  # the tokens of prompts that they compute, for each of their rows

    def schedule(self, step_id: int, requests: Sequence[Request], prompts: Sequence[int], now: float) -> None:
        """Register a step. prompts: how many tokens of each request's prompt it computes."""
        now = round(now, _PLACES)
        self._begins[step_id] = now
        self._prompts[step_id] = prompts
        for request in requests:
            life = self._lives.get(request.request_id)
            if life is None:
                arrived = round(request.source.arrival_time, _PLACES)
                life = Life(request.request_id, arrived, request.num_prompt_tokens)
                self._lives[life.id] = life
            if not life.began:
                life.began = now
                life.cached = request.num_cached_tokens
            if len(life.preemptions) < min(request.num_preemptions, MOST_CHUNKS):
                before = max(life.last, life.chunks[-1].end if life.chunks else life.began)
                life.preemptions.append((before, now))

    def withdraw(self, step_id: int) -> None:
        self._begins.pop(step_id, None)
        self._prompts.pop(step_id, None)

    def update(self, step_id: int, rows: Sequence[tuple[Request, int, int]], now: float) -> None:
        """Register a step's results. rows: each request, and its numbers of sampled and of draft tokens."""
        now = round(now, _PLACES)
        begin = self._begins.pop(step_id, now)
        prompts = self._prompts.pop(step_id, ())
        for (request, sampled, drafted), prompt in zip(rows, prompts, strict=False):
            life = self._lives.get(request.request_id)
            if life is None:
                continue
            self._change(life)
            if prompt and len(life.chunks) < MOST_CHUNKS:
                life.chunks.append(Chunk(begin, now, prompt))
            if sampled:
                life.first = life.first or now
                life.last = now
                life.output += sampled
                life.steps += 1
                if drafted:
                    life.accepted += sampled - 1
                    life.rejected += drafted - sampled + 1
            if request.status is Status.FINISHED:
                self._end(life, now)

    def finish(self, request_id: str, now: float) -> None:
        """Register the end of a request, of which no result may follow: it was aborted."""
        life = self._lives.get(request_id)
        if life is not None:
            self._end(life, round(now, _PLACES))

    def _end(self, life: Life, now: float) -> None:
        if life.ended:
            return
        life.ended = now
        self._change(life)
        self._ended.append(life.id)
        if len(self._ended) > MOST_ENDED:
            oldest = self._ended.popleft()
            del self._lives[oldest]
            self._changes.pop(oldest, None)

    def _change(self, life: Life) -> None:
        self._clock += 1
        self._changes[life.id] = self._clock

    def changed_since(self, clock: int) -> tuple[list[Life], int]:
        """Return the lives that have changed since then, and the clock now."""
        return [self._lives[name] for name, change in self._changes.items() if change > clock], self._clock
