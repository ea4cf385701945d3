"""The data that an engine core records about itself while a viewer is active.

Recording begins with the first look, and stops after IDLE_SECONDS without one. While it is on, the observer receives
the scheduler's steps, and measures the times of calls in the core's loop.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.observation.lives import Life, Lives
from quire.engine.observation.ranks import RankView, RankWatch
from quire.engine.observation.tiers import TierView, TierWatch, views, watch_tiers
from quire.messages.engine import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.observability.profiling.watched_calls import watch
from quire.scheduler.request import Request, Status

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

IDLE_SECONDS = 5.0
WINDOW_SECONDS = 10.0  # for rates and percentiles
MOST_CELLS = 2048  # in the block map
MOST_SCANNED = 512  # blocks per look: a larger pool is scanned over several looks
_STATES_OF_BLOCKS = "0123456789"
MOST_REQUESTS = 100  # listed in a look
MOST_STEPS = 256  # kept for the next look
MOST_TIMES = 4000  # used for percentiles
_STATIONS = ("schedule", "submit", "sample", "wait", "update")
_STATES = {Status.RUNNING: "running", Status.GATED: "gated", Status.PREEMPTED: "preempted"}


class Step(msgspec.Struct, omit_defaults=True):
    """A completed step. Token counts: prompt (computed), cached (found in the cache), decode, and accepted and rejected
    drafts. ms: milliseconds that the core's thread spent in each station since the previous step."""

    id: int
    requests: int
    prompt: int = 0
    cached: int = 0
    decode: int = 0
    accepted: int = 0
    rejected: int = 0
    ms: dict[str, float] = {}


class Seen(msgspec.Struct, omit_defaults=True):
    """A request. computed: tokens of completed steps; known: prompt and output so far; most: the maximum length.
    blocks: its block ids, if they have changed and each cell of the map is one block."""

    id: str
    state: str
    computed: int
    prompt: int
    known: int
    most: int
    cached: int = 0
    preemptions: int = 0
    blocks: list[int] | None = None


class Cells(msgspec.Struct):
    """A part of the block map, from cell `start` on, with one character per cell: "0" free, "1" cached, "2" used by one
    request, "3" by two, ... up to "9". A cell with several blocks shows the most used one."""

    start: int
    states: str


class View(msgspec.Struct):
    """The changes since a viewer's last look. All lists are complete, except that steps, cells and lives contain only
    new or changed ones."""

    time: float
    num_blocks: int
    block_size: int
    block_bytes: int
    blocks_per_cell: int
    num_free: int
    cells: list[Cells]
    steps: list[Step]
    requests: list[Seen]
    lives: list[Life]
    num_running: int
    num_waiting: int
    rates: dict[str, float]
    ttft: list[float]
    gaps: list[float]
    totals: dict[str, float]
    tiers: list[TierView]
    ranks: list[RankView]


class _Viewer:
    """The data already sent to a viewer: the map, the last step, the lives, and how many blocks of each request."""

    def __init__(self) -> None:
        self.map = ""
        self.step = 0
        self.lives = 0  # the clock of the lives
        self.looked_at = 0.0
        self.blocks: dict[str, int] = {}


class Observer:
    """Records the activity of a core, whose scheduler calls it as a Connector."""

    num_queries = num_hits = 0

    def __init__(self, core: "EngineCore") -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._viewers: dict[str, _Viewer] = {}
        self._is_on = False
        self._looked_at = 0.0
        self._ends: list[Callable[[], None]] = []  # end the watching of calls
        blocks = len(self._scheduler.kv.pool.blocks) - 1
        self._per_cell = -(-blocks // MOST_CELLS)
        self._cells = ["0"] * -(-blocks // self._per_cell)
        self._scanned, self._used = 0, set[int]()  # cells scanned in this round; cells of requests at the last look
        self._forget()

    def _forget(self) -> None:
        self._steps: deque[Step] = deque(maxlen=MOST_STEPS)
        self._open: dict[int, Step] = {}  # steps in flight
        self._rows: dict[int, Sequence[Request]] = {}  # their requests
        self._drafts: dict[int, list[int]] = {}  # and numbers of drafts
        self._ms: dict[str, float] = {}
        self._mark = 0.0  # when the last call of a station ended
        self._tokens: deque[tuple[float, int, int]] = deque()  # time, prompt and output tokens
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)
        self._last: dict[str, float] = {}  # when each request received its last token
        self._lives = Lives()
        self._tiers: list[TierWatch] = []
        self._ranks: RankWatch | None = None

    # ---- on and off

    def _begin(self) -> None:
        """Watch the calls of the core's loop."""
        self._forget()
        scheduler = self._scheduler
        executor = self._core.executor
        self._ends = [
            self._watch(scheduler, "schedule", self._scheduled),
            self._watch(executor, "submit"),
            self._watch(executor, "sample"),
            self._watch(scheduler, "update", self._updated),
        ]
        scheduler.connectors.append(self)
        self._tiers = watch_tiers(scheduler.transfers)
        self._ranks = RankWatch(executor)
        self._is_on = True

    def _end(self) -> None:
        for end in self._ends:
            end()
        self._scheduler.connectors.remove(self)
        for tier in self._tiers:
            tier.end()
        self._is_on = False
        self._forget()

    def _watch(self, owner: Any, name: str, after: Callable[..., None] | None = None) -> Callable[[], None]:
        def timed(call: Callable[..., Any], *arguments: Any) -> Any:
            began = time.perf_counter()
            if name == "update" and self._mark:
                self._add("wait", began - self._mark)
            result = call(*arguments)
            self._mark = time.perf_counter()
            self._add(name, self._mark - began)
            if after is not None:
                after(*arguments, result)
            return result

        return watch(owner, name, timed)

    def _add(self, station: str, seconds: float) -> None:
        self._ms[station] = self._ms.get(station, 0.0) + 1000 * seconds

    # ---- steps

    def scheduled(self, step_id: int, requests: Sequence[Request]) -> None:
        self._rows[step_id] = requests

    def _scheduled(self, step: SchedulerOutput) -> None:
        requests = self._rows.get(step.step_id)
        if requests is None:
            return
        seen = self._open[step.step_id] = Step(step.step_id, len(requests))
        drafts = self._drafts[step.step_id] = step.num_draft_tokens or [0] * len(requests)
        new = {request.request_id for request in step.new_requests}
        prompts: list[int] = []
        for request, count, drafted in zip(requests, step.num_tokens, drafts, strict=True):
            start = request.num_computed_tokens - count
            prompt = max(0, min(count, request.num_prompt_tokens - start))
            prompts.append(prompt)
            seen.prompt += prompt
            seen.decode += count - prompt - drafted
            if request.request_id in new:
                seen.cached += request.num_cached_tokens
        self._lives.schedule(step.step_id, requests, prompts, time.monotonic())

    def withdrawn(self, step_id: int) -> None:
        for kept in (self._rows, self._open, self._drafts):
            kept.pop(step_id, None)
        self._lives.withdraw(step_id)

    def retired(self, step_id: int) -> None:
        """Do nothing: `_updated` records the step with more detail."""

    def _updated(self, output: ModelRunnerOutput, _: object) -> None:
        seen = self._open.pop(output.step_id, None)
        rows = self._rows.pop(output.step_id, ())
        drafts = self._drafts.pop(output.step_id, [])
        if time.monotonic() - self._looked_at > IDLE_SECONDS:
            self._end()
            return
        if seen is None or output.was_skipped:
            self._lives.withdraw(output.step_id)
            return
        now = time.monotonic()
        made = 0
        results: list[tuple[Request, int, int]] = []
        for request, sampled, drafted in zip(rows, output.sampled_token_ids, drafts, strict=False):
            results.append((request, len(sampled), drafted))
            if sampled:
                made += len(sampled)
                seen.accepted += len(sampled) - 1 if drafted else 0
                self._take_time(request, now)
            seen.rejected += drafted - (len(sampled) - 1 if sampled else 0) if drafted else 0
            if request.status is Status.FINISHED:
                self._last.pop(request.request_id, None)
        self._lives.update(output.step_id, results, now)
        self._tokens.append((now, seen.prompt, made))
        while now - self._tokens[0][0] > WINDOW_SECONDS:
            self._tokens.popleft()
        seen.ms = {name: round(self._ms.get(name, 0.0), 3) for name in _STATIONS}
        self._ms = {}
        self._steps.append(seen)

    def _take_time(self, request: Request, now: float) -> None:
        last = self._last.get(request.request_id)
        if last is not None:
            self._gaps.append((now, now - last))
        elif len(request.token_ids) <= request.num_prompt_tokens + 1:
            self._ttft.append((now, now - request.source.arrival_time))
        self._last[request.request_id] = now

    # ---- a look

    def look(self, viewer: str) -> bytes:
        """Return the changes since the viewer's last look: a View, in JSON."""
        now = time.monotonic()
        self._looked_at = now
        if not self._is_on:
            self._begin()
        for name in [name for name, other in self._viewers.items() if now - other.looked_at > IDLE_SECONDS]:
            del self._viewers[name]
        seen = self._viewers.setdefault(viewer, _Viewer())
        seen.looked_at = now
        scheduler = self._scheduler
        pool = self._scheduler.kv.pool
        self._scan()
        steps = [step for step in self._steps if step.id > seen.step]
        lives, seen.lives = self._lives.changed_since(seen.lives)
        if steps:
            seen.step = steps[-1].id
        stats = self._core.stats
        totals: dict[str, float] = {
            "preemptions": stats.preemptions,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "external_queries": stats.external_queries,
            "external_hits": stats.external_hits,
        }
        view = View(
            round(now, 3),
            pool.num_usable,
            scheduler.kv.block_size,
            sum(self._core.executor.kv_cache.rank_bytes),
            self._per_cell,
            pool.num_free,
            self._changed(seen),
            steps,
            self._requests(seen),
            lives,
            stats.num_running,
            stats.num_waiting,
            self._rates(now),
            _percentiles(self._ttft, now),
            _percentiles(self._gaps, now),
            totals,
            views(self._tiers, scheduler.transfers),
            [] if self._ranks is None else self._ranks.views(),
        )
        return msgspec.json.encode(view)

    def _scan(self) -> None:
        """Scan the cells of requests that run or were running at the last look, and some further cells in turn."""
        blocks = self._scheduler.kv.pool.blocks
        size = self._per_cell
        number = len(self._cells)
        count = min(number, max(1, MOST_SCANNED // size))
        ids = (
            block.block_id for request in self._scheduler.running for table in request.blocks.tables for block in table
        )
        used = {(block_id - 1) // size for block_id in islice(ids, MOST_SCANNED) if block_id}
        in_turn = {cell % number for cell in range(self._scanned, self._scanned + count)}
        for cell in in_turn | used | self._used:
            most = 0
            for block in blocks[1 + cell * size : 1 + (cell + 1) * size]:
                state = block.ref_cnt + 1 if block.ref_cnt else 0 if block.block_hash is None else 1
                if state > most:
                    most = state
            self._cells[cell] = _STATES_OF_BLOCKS[min(most, 9)]
        self._used = used
        self._scanned = (self._scanned + count) % number

    def _changed(self, viewer: _Viewer) -> list[Cells]:
        new = "".join(self._cells)
        old = viewer.map
        viewer.map = new
        if len(old) != len(new):
            return [Cells(0, new)]
        parts: list[Cells] = []
        for start in range(0, len(new), 32):
            part = new[start : start + 32]
            if part != old[start : start + 32]:
                if parts and parts[-1].start + len(parts[-1].states) == start:
                    parts[-1].states += part
                else:
                    parts.append(Cells(start, part))
        return parts

    def _requests(self, viewer: _Viewer) -> list[Seen]:
        scheduler = self._scheduler
        running = list(scheduler.running)[:MOST_REQUESTS]
        found = running
        names = {request.request_id for request in running}
        for request in scheduler.requests.values():
            if len(found) >= MOST_REQUESTS:
                break
            if request.request_id not in names:
                found.append(request)
        known = viewer.blocks
        viewer.blocks = {}
        return [self._see(request, known, viewer.blocks) for request in found]

    def _see(self, request: Request, before: dict[str, int], after: dict[str, int]) -> Seen:
        blocks = None
        if self._per_cell == 1:
            count = sum(map(len, request.blocks.tables))
            after[request.request_id] = count
            if count != before.get(request.request_id, 0):
                blocks = [block.block_id for table in request.blocks.tables for block in table if block.block_id]
        return Seen(
            request.request_id,
            _STATES.get(request.status, "waiting"),
            request.num_retired_tokens,
            request.num_prompt_tokens,
            len(request.token_ids),
            request.max_total_tokens,
            request.num_cached_tokens,
            request.num_preemptions,
            blocks,
        )

    def _rates(self, now: float) -> dict[str, float]:
        recent = [(at, prompt, made) for at, prompt, made in self._tokens if now - at < WINDOW_SECONDS / 5]
        span = WINDOW_SECONDS / 5
        return {
            "prompt": round(sum(prompt for _, prompt, _ in recent) / span, 1),
            "output": round(sum(made for *_, made in recent) / span, 1),
        }

    # ---- the other methods of a Connector

    def connect(self, wake: Callable[[], None]) -> None: ...

    def ready(self, request: EngineCoreRequest) -> bool:
        return True

    def finish(self, request: EngineCoreRequest) -> None:
        self._last.pop(request.request_id, None)
        self._lives.finish(request.request_id, time.monotonic())

    def settle(self) -> bool:
        return False

    def check_time(self) -> None: ...

    def finish_all(self, wait: Callable[[float], bool]) -> None: ...

    def close(self) -> None: ...


def _percentiles(times: deque[tuple[float, float]], now: float) -> list[float]:
    """Return the 50th, 90th and 99th percentiles in milliseconds; an empty list if there are no times."""
    values = sorted(seconds for at, seconds in times if now - at < WINDOW_SECONDS)
    if not values:
        return []
    return [round(1000 * values[min(len(values) - 1, int(share * len(values)))], 2) for share in (0.5, 0.9, 0.99)]
