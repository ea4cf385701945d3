"""The scheduler against a brute-force model of a worker and of what its KV memory holds.

The model executes the stream of SchedulerOutputs as a worker would, alone: rows, block tables from the edits, and an
entry in every slot that says which token after which history was written there, for which KV group. At every step each
row must read exactly its own history at every position that its windows see. Everything else (reference counts,
owners of hashes, budget, order of service, nothing lost, nothing leaked) is checked after every move.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice, product
from struct import pack
from zlib import crc32

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.config.kv_compression import KVCompressionOptions
from quire.engine.kv_events import KVEvents
from quire.engine.pause import PauseGate
from quire.kv.block_pool import HashedTokens
from quire.kv.hashing import hash_root
from quire.kv.specs import CacheEntry, KVCacheSpec, StateSpec, attention_spec
from quire.messages.engine import EngineCoreRequest, FinishReason
from quire.messages.kv_events import KVCacheEvent, KVEventBatch
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.compression import Compression
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request, Status
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.speculation.lengths import DraftLengths
from quire.speculation.proposer import Text
from support.kv_router import RouterView
from support.kv_specs import HeadBudgetSpec
from support.tiers import MoverModel

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
EOS, STOP_TOKEN = 0, 1
DOCUMENTS = [[2 + (i * (k + 3) + i // 5) % 6 for i in range(28)] for k in range(3)]
KV_GROUPS: dict[str, list[str]] = {
    "full": ["full"],
    "window": ["6"],
    "narrow": ["1"],
    "mixed": ["full", "6"],
    "three": ["full", "4", "9"],
    "chunks": ["full", "chunks of 8"],
    "state": ["state"],
    "hybrid": ["full", "state", "6"],
    "two states": ["full", "state", "state"],
    "heads": ["full", "heads"],
    "compressed": ["full"],
    "compressed again": ["full"],
    "compressed again and again": ["full"],
}
COMPRESSION = {
    "compressed": KVCompressionOptions(ratio=2, window=3, sinks=1),
    "compressed again": KVCompressionOptions(ratio=2, window=3, sinks=1, interval=7),
    "compressed again and again": KVCompressionOptions(ratio=3, window=2, sinks=1, interval=4),
}
HEAD_BUDGETS = (8, 20, 4)


# (index in the block table, offset in the block, position of the token whose history the entry stands for)
Place = tuple[int, int, int]


class WindowModel:
    """What a step does with the entries of a group: attention to all tokens, or to the last `window`.

    whole_blocks: what is stored in a block takes the place of all that was there.
    """

    whole_blocks = False

    def __init__(self, window: int | None) -> None:
        self.window = window

    def reads_first(self, start: int, end: int) -> list[Place]:
        """What is read before anything of the step is stored."""
        return []

    def stores(self, start: int, end: int) -> list[Place]:
        return [(position // BLOCK_SIZE, position % BLOCK_SIZE, position) for position in range(start, end)]

    def of_a_full_block(self) -> list[Place]:
        """What a block has when it can be found by its hash."""
        return self.stores(0, BLOCK_SIZE)

    def reads(self, start: int, end: int) -> list[Place]:
        """What is read when all of the step is stored."""
        return self.stores(0 if self.window is None else max(0, start - self.window + 1), end)


class ChunkModel(WindowModel):
    """Attention to the tokens of one's own chunk of the text."""

    def __init__(self, chunk: int) -> None:
        super().__init__(window=None)
        self.chunk = chunk

    def reads(self, start: int, end: int) -> list[Place]:
        return self.stores(start // self.chunk * self.chunk, end)


class StateModel(WindowModel):
    """A state: read behind the token before a step, and stored in each block of the step.

    The next step may start behind any token that is not a draft of this one, so the newest block knows the states
    behind the last `drafts` tokens, too.
    """

    whole_blocks = True

    def __init__(self, drafts: int) -> None:
        super().__init__(window=None)
        self.drafts = drafts

    def of_a_full_block(self) -> list[Place]:
        return self._places(BLOCK_SIZE - 1, BLOCK_SIZE)

    def reads_first(self, start: int, end: int) -> list[Place]:
        return self._places(start - 1, start)

    def stores(self, start: int, end: int) -> list[Place]:
        borders = [(block + 1) * BLOCK_SIZE for block in range(start // BLOCK_SIZE, end // BLOCK_SIZE)]
        return sorted(
            {
                *self._places(max(start, end - 1 - self.drafts), end),
                *(place for border in borders for place in self._places(border - 1, border)),
            }
        )

    def _places(self, start: int, end: int) -> list[Place]:
        return [(position // BLOCK_SIZE, position % BLOCK_SIZE, position) for position in range(max(0, start), end)]

    def reads(self, start: int, end: int) -> list[Place]:
        return []


class HeadModel(WindowModel):
    """Each head keeps its last tokens in a ring of blocks of its own."""

    def __init__(self, spec: HeadBudgetSpec) -> None:
        super().__init__(window=None)
        self.spec = spec

    def reads_first(self, start: int, end: int) -> list[Place]:
        return self.stores(0, start)

    def stores(self, start: int, end: int) -> list[Place]:
        return [
            (self.spec.index(head, position % budget // BLOCK_SIZE, BLOCK_SIZE), position % BLOCK_SIZE, position)
            for head, budget in enumerate(self.spec.budgets)
            for position in range(max(start, end - budget), end)
        ]

    def reads(self, start: int, end: int) -> list[Place]:
        return []


def make_group(kind: str, layer: int, drafts: int) -> tuple[KVCacheSpec, WindowModel]:
    entries = (CacheEntry(layer),)
    if kind == "state":
        return StateSpec(entries), StateModel(drafts)
    if kind == "heads":
        return (spec := HeadBudgetSpec(entries, HEAD_BUDGETS)), HeadModel(spec)
    if kind.startswith("chunks"):
        chunk = int(kind.split()[-1])
        return attention_spec([layer], chunk=chunk), ChunkModel(chunk)
    window = None if kind == "full" else int(kind)
    return attention_spec([layer], window), WindowModel(window)


class Histories:
    """A tree: one node for each (cache salt, token ids so far). What a key or value depends on is its node."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}
        self._roots: dict[str | None, int] = {}
        self.parent: list[int] = []
        self.token: list[int] = []
        self.depth: list[int] = []  # tokens so far
        self.salt: list[str | None] = []

    def _new(self, parent: int, token: int, depth: int, salt: str | None) -> int:
        self.parent.append(parent)
        self.token.append(token)
        self.depth.append(depth)
        self.salt.append(salt)
        return len(self.parent) - 1

    def root(self, salt: str | None) -> int:
        if salt not in self._roots:
            self._roots[salt] = self._new(-1, -1, 0, salt)
        return self._roots[salt]

    def child(self, node: int, token: int) -> int:
        key = (node, token)
        if key not in self._ids:
            self._ids[key] = self._new(node, token, self.depth[node] + 1, self.salt[node])
        return self._ids[key]

    def last_tokens(self, node: int, count: int) -> tuple[int, list[int]]:
        """The node `count` tokens before, and the tokens between."""
        tokens = []
        for _ in range(count):
            tokens.append(self.token[node])
            node = self.parent[node]
        return node, tokens[::-1]

    def block_hash(self, node: int) -> bytes:
        """The hash of the block that ends with this node."""
        before, tokens = self.last_tokens(node, BLOCK_SIZE)
        parent = self.block_hash(before) if self.depth[before] else hash_root("")
        salt = self.salt[node] if self.depth[node] == BLOCK_SIZE else None
        extra = b"" if salt is None else sha256(msgspec.msgpack.encode([(0, 0, salt)])).digest()
        return sha256(parent + pack(f"<{BLOCK_SIZE}i", *tokens) + extra).digest()


@dataclass
class Truth:
    """What is known of a request from outside the scheduler."""

    source: EngineCoreRequest
    tokens: list[int]  # prompt and delivered tokens
    request: Request
    ended: bool = False

    def deliver(self, sampled: list[int]) -> tuple[str, list[int], FinishReason | None, int | None] | None:
        """The output that these samples must lead to."""
        if self.ended:
            return None
        params = self.source.sampling_params
        for index, token in enumerate(sampled):
            self.tokens.append(token)
            count = len(self.tokens) - len(self.source.prompt_token_ids)
            stops = token in (self.source.eos_token_id, *self.source.stop_token_ids) and count > params.min_tokens
            if stops or count == self.source.max_tokens:
                self.ended = True
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                named = token if stops and token != self.source.eos_token_id else None
                return self.source.request_id, sampled[: index + 1], reason, named
        return self.source.request_id, sampled, None, None


@dataclass
class Access:
    """The blocks that a row of a step touches."""

    request_id: str
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)  # once the step has run

    def forget(self, blocks: set[int]) -> None:
        self.read -= blocks
        self.written -= blocks


@dataclass
class Row:
    request_id: str
    nodes: list[int]
    tokens: list[int]
    computed: int
    num_prompt: int
    drafts: list[int] = field(default_factory=list)
    kept: list[int] | None = None  # the blocks that a compressed text keeps, the last of which may be partly filled

    def moved(self, places: list[Place]) -> list[Place]:
        """Where these places are in the block table, without those that were dropped."""
        if self.kept is None:
            return places
        index_of, behind = {block: index for index, block in enumerate(self.kept)}, len(self.kept) - self.kept[-1] - 1
        return [
            (index_of.get(index, index + behind), offset, position)
            for index, offset, position in places
            if index in index_of or index > self.kept[-1]
        ]


class WorkerModel:
    """Rows, tables and memory, from the stream of steps alone.

    When it refuses a request of a step, it skips the later steps of that epoch. Nothing that such steps would have
    written, and none of their rows, may be used afterwards.
    """

    def __init__(self, groups: list[WindowModel], histories: Histories, seed: int) -> None:
        self.groups = groups
        self.histories = histories
        self.seed = seed
        self.rows: dict[int, Row] = {}
        self.tables: dict[tuple[int, int, int], int] = {}  # (group, row, index) -> block; stale entries stay
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (group, node)
        self.skipped_epoch = -1
        self.dice = random.Random(seed)

    def refuse(self, step: SchedulerOutput, truths: dict[str, Truth], out_of_memory: bool) -> None:
        """Skip this step. out_of_memory: after it has spoilt every slot that it was to fill."""
        self.skipped_epoch = step.epoch
        if out_of_memory:
            before = dict(self.memory)
            self.execute(step, truths)
            for slot, entry in self.memory.items():
                if before.get(slot) is not entry:
                    self.memory[slot] = (-1, -1)
        for row in step.rows:
            self.rows.pop(row, None)

    def sample(self, node: int, style: int) -> int:
        """A deterministic model, so that equal prompts go on alike; one token in eight or so ends a request."""
        return crc32(pack("<iii", node, style, self.seed)) % 9

    def read(self, step: SchedulerOutput, group: int, number: int, places: list[Place]) -> set[int]:
        """Check that a row finds its own history at these places. The blocks that were read."""
        row = self.rows[number]
        places = row.moved(places)
        for index, offset, position in places:
            entry = self.memory.get((self.tables[group, number, index], offset))
            assert entry == (group, row.nodes[position]), (
                f"step {step.step_id}: {row.request_id} reads a wrong entry: position {position}, group {group}"
            )
        return {self.tables[group, number, index] for index, _, _ in places}

    def execute(self, step: SchedulerOutput, truths: dict[str, Truth]) -> tuple[list[list[int]], list[Access]]:
        for new in step.new_requests:
            node = self.histories.root(truths[new.request_id].source.cache_salt)
            nodes = [node := self.histories.child(node, token) for token in new.token_ids]
            self.rows[new.row] = Row(
                new.request_id, nodes, list(new.token_ids), new.num_computed_tokens, new.num_prompt_tokens
            )
        edits = step.block_table_edits
        for group, number, index, block in zip(edits.groups, edits.rows, edits.indices, edits.block_ids, strict=True):
            self.tables[group, number, index] = block
        drafts = step.draft_tokens
        for number, position, token in zip(drafts.rows, drafts.positions, drafts.token_ids, strict=True):
            assert position == len(self.rows[number].tokens), f"a draft of {self.rows[number]} is out of place"
            self.append(self.rows[number], token)
        for place, _, again in step.compressions:
            self.rows[step.rows[place]].computed -= again
        num_drafts = step.num_draft_tokens or [0] * len(step.rows)
        if not drafts.rows:  # they are on the device already
            for number, count in zip(step.rows, num_drafts, strict=True):
                row = self.rows[number]
                assert count <= len(row.drafts), f"{row} has fewer drafts"
                for token in row.drafts[:count]:
                    self.append(row, token)
        accesses = [Access(self.rows[number].request_id) for number in step.rows]
        work = [(number, self.rows[number], count) for number, count in zip(step.rows, step.num_tokens, strict=True)]
        for (number, row, count), access in zip(work, accesses, strict=True):
            assert row.computed + count <= len(row.tokens), f"{row} has no token to compute"
            for group, model in enumerate(self.groups):
                places = model.reads_first(row.computed, row.computed + count)
                access.read |= self.read(step, group, number, places)
        slots: set[tuple[int, int]] = set()
        for (number, row, count), access in zip(work, accesses, strict=True):
            for group, model in enumerate(self.groups):
                places = row.moved(model.stores(row.computed, row.computed + count))
                for index in {index for index, _, _ in places} if model.whole_blocks else ():
                    for offset in range(BLOCK_SIZE):
                        self.memory.pop((self.tables[group, number, index], offset), None)
                for index, offset, position in places:
                    block = self.tables[group, number, index]
                    assert block > 0, f"{row} writes to the null block"
                    assert (block, offset) not in slots, f"two tokens of step {step.step_id} are written to one slot"
                    slots.add((block, offset))
                    self.memory[block, offset] = (group, row.nodes[position])
                    access.written.add(block)
        sampled: list[list[int]] = []
        asked = step.num_next_drafts or [0] * len(step.rows)
        for (number, row, count), access, places, next_drafts in zip(work, accesses, num_drafts, asked, strict=True):
            for group, model in enumerate(self.groups):
                access.read |= self.read(step, group, number, model.reads(row.computed, row.computed + count))
            row.computed += count
            sampled.append([])
            if row.computed == len(row.tokens):
                known = len(row.tokens) - places
                sampled[-1] = self.verified(row, known)
                del row.tokens[known:], row.nodes[known:]
                for token in sampled[-1]:
                    self.append(row, token)
                row.computed = len(row.tokens) - 1
            row.drafts = self.drafts(row, next_drafts)
            for group, position in product(range(len(self.groups)), range(next_drafts)):
                [(index, _, _)] = row.moved([((row.computed + position) // BLOCK_SIZE, 0, 0)])
                assert self.tables[group, number, index] > 0, f"{row} has no slots for its drafts"
        for place, num_kept, _ in step.compressions:
            self.compress(step.rows[place], num_kept, accesses[place])
        return sampled, accesses

    def compress(self, number: int, num_kept: int, access: Access) -> None:
        """Drop blocks of a text. (A real worker puts the tokens that it keeps into the others.)"""
        row = self.rows[number]
        full, tail = divmod(row.computed, BLOCK_SIZE)
        before = row.kept or []
        held = [*before, *range(before[-1] + 1 if before else 0, full + 1)]  # the last one may be of tokens to come
        full = held.index(full)
        assert num_kept < full
        access.dropped = {self.tables[0, number, index] for index in range(num_kept, full)}
        row.kept = held[:num_kept] + held[full:]
        if tail:
            self.tables[0, number, num_kept] = self.tables[0, number, full]

    def append(self, row: Row, token: int) -> None:
        row.tokens.append(token)
        row.nodes.append(self.histories.child(row.nodes[-1], token))

    def drafts(self, row: Row, count: int) -> list[int]:
        """What a drafter makes behind the tokens of a row: right tokens for the most part."""
        made, node = [], row.nodes[-1]
        for _ in range(count):
            token = self.sample(node, int(row.request_id.partition("/")[2]))
            made.append(token if self.dice.random() < 0.7 else self.dice.randrange(9))
            node = self.histories.child(node, made[-1])
        return made

    def verified(self, row: Row, known: int) -> list[int]:
        """The drafts behind the first `known` tokens that the model would say, and the token after them."""
        tokens: list[int] = []
        for node, draft in zip(row.nodes[known - 1 :], [*row.tokens[known:], -1], strict=True):
            tokens.append(self.sample(node, int(row.request_id.partition("/")[2])))
            if tokens[-1] != draft:
                break
        return tokens


@dataclass
class InFlight:
    step: SchedulerOutput
    sampled: list[list[int]]
    accesses: list[Access]
    refusals: dict[int, str] = field(default_factory=dict)
    was_skipped: bool = False

    @property
    def num_drafts(self) -> list[int]:
        return self.step.num_draft_tokens or [0] * len(self.step.rows)

    @property
    def output(self) -> ModelRunnerOutput:
        sampled = [] if self.was_skipped else self.sampled
        return ModelRunnerOutput(self.step.step_id, sampled, refusals=self.refusals, was_skipped=self.was_skipped)


@dataclass(frozen=True)
class Setting:
    groups: str
    depth: int
    policy: str
    caching: bool
    max_num_seqs: int
    budget: int
    spare_blocks: int  # beyond what one request of max_model_len needs
    seed: int = 0
    threshold: int = 0  # long_prefill_token_threshold
    drafts: int = 0  # the most drafts of a request in a step
    skill: float = 0.5  # the share of drafts that are right
    drafts_stay: bool = False  # a drafter makes them, and only their number is known to the scheduler
    tiers: str = ""  # memory, disk, or both


class Guesses:
    """Proposes tokens of which a part is right."""

    def __init__(self, house: House, skill: float) -> None:
        self.house, self.dice = house, random.Random(skill)
        self.skill = skill

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        return [self.guess(text, self.dice.randint(0, count)) for text, count in zip(texts, most, strict=True)]

    def guess(self, text: Text, count: int) -> list[int]:
        node = self.house.histories.root(text.cache_salt)
        for token in text.token_ids:
            node = self.house.histories.child(node, token)
        drafts: list[int] = []
        for _ in range(count):
            token = self.house.worker.sample(node, int(text.request_id.partition("/")[2]))
            drafts.append(token if self.dice.random() < self.skill else self.dice.randrange(9))
            node = self.house.histories.child(node, drafts[-1])
        return drafts

    def finish(self, text: Text) -> None:
        pass


class Doors:
    """A gate that lets a request pass unless its door is closed."""

    def __init__(self) -> None:
        self.closed: set[str] = set()

    def ready(self, request: EngineCoreRequest) -> bool:
        return request.request_id not in self.closed

    def connect(self, wake: Callable[[], None]) -> None:
        raise AssertionError("the tests call Scheduler.wake")


class Listener:
    """Which block has which hash, as the pool tells it."""

    def __init__(self) -> None:
        self.stored: dict[tuple[int, bytes], int] = {}

    def on_stored(self, group: int, tokens: HashedTokens, index: int, block_id: int) -> None:
        assert self.stored.setdefault((group, tokens.block_hashes[index]), block_id) == block_id

    def on_removed(self, group: int, block_hash: bytes, block_id: int) -> None:
        assert self.stored.pop((group, block_hash)) == block_id

    def on_cleared(self) -> None:
        self.stored.clear()


class House:
    """A scheduler and the model side by side; every move is checked."""

    def __init__(self, setting: Setting) -> None:
        groups = [make_group(kind, layer, setting.drafts) for layer, kind in enumerate(KV_GROUPS[setting.groups])]
        specs = [spec for spec, _ in groups]
        self.compression = COMPRESSION.get(setting.groups)
        if self.compression is not None:  # which excludes drafters on the device
            setting = replace(setting, drafts_stay=False)
        budget, threshold, compression = max(setting.budget, setting.max_num_seqs), setting.threshold, None
        if self.compression is not None:
            window, compression = self.compression.window, Compression(self.compression, BLOCK_SIZE)
            budget, threshold = max(budget, setting.max_num_seqs - 1 + window), threshold and max(threshold, window)
        limits = SchedulerLimits(
            setting.max_num_seqs,
            budget,
            MAX_MODEL_LEN,
            setting.policy,
            setting.depth,
            threshold,
            setting.drafts if setting.drafts_stay else 0,
        )
        least = sum(spec.max_blocks(MAX_MODEL_LEN, limits.most_in_flight, BLOCK_SIZE) for spec in specs)
        num_blocks = 1 + least + setting.spare_blocks
        doors, self.pause_gate = Doors(), PauseGate()
        can_roll_back = "heads" not in KV_GROUPS[setting.groups]
        speculation = None
        if setting.drafts and can_roll_back:
            proposer = None if setting.drafts_stay else Guesses(self, setting.skill)
            speculation = Speculation(proposer, DraftLengths(setting.drafts), setting.drafts_stay)
        self.histories = Histories()
        self.worker = WorkerModel([model for _, model in groups], self.histories, setting.seed)
        self.mover = MoverModel(self.worker.memory, BLOCK_SIZE, setting.seed)
        self.scheduler = Scheduler(
            limits,
            num_blocks,
            specs,
            BLOCK_SIZE,
            setting.caching,
            gates=[doors, self.pause_gate],
            speculation=speculation,
            tiers=self.mover.tiers(setting.tiers) if setting.caching else [],
            mover=self.mover,
            compression=compression,
        )
        if self.scheduler.transfers is not None:
            self.mover.attach(self.scheduler.transfers)
            self.scheduler.transfers.connect(self.scheduler.wake)
        self.doors = doors
        self.pool = self.scheduler.kv.pool
        self.listener = Listener()
        self.pool.listeners.append(self.listener)
        self.router = RouterView()
        self.events = KVEvents(specs, BLOCK_SIZE, self._route, lambda: None)
        self.pool.listeners.append(self.events)
        self.in_flight: deque[InFlight] = deque()
        self.truths: dict[str, Truth] = {}
        self.owners: dict[tuple[int, bytes], int] = {}
        self.num_steps = 0

    @property
    def flying(self) -> list[InFlight]:
        """The steps that the scheduler counts on: not those that it has withdrawn."""
        return [flight for flight in self.in_flight if flight.step.epoch == self.scheduler.epoch]

    def _route(self, events: list[KVCacheEvent]) -> None:
        self.router.apply(msgspec.msgpack.encode(KVEventBatch(0.0, events, 0)))

    # ---- moves

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        style: int = 0,
        priority: int = 0,
        salt: str | None = None,
        min_tokens: int = 0,
        stops: bool = True,
        closed: bool = False,
    ) -> None:
        prompt = prompt[: MAX_MODEL_LEN - max_tokens]
        source = EngineCoreRequest(
            request_id=f"{len(self.truths)}/{style}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)),
            seed=0,
            max_tokens=max_tokens,
            eos_token_id=EOS if stops else None,
            stop_token_ids=[STOP_TOKEN] if stops else [],
            arrival_time=float(len(self.truths) // 2),
            priority=priority,
            cache_salt=salt,
        )
        if closed:
            self.doors.closed.add(source.request_id)
        self.scheduler.add(source)
        request = self.scheduler.requests[source.request_id]
        self.truths[source.request_id] = Truth(source, list(prompt), request)
        self.check()

    def schedule(self) -> SchedulerOutput:
        scheduler, limits = self.scheduler, self.scheduler.limits
        assert len(self.in_flight) < limits.depth
        before = list(scheduler.running)
        flying_ids = {access.request_id for other in self.flying for access in other.accesses}
        blocks_come_back = bool(flying_ids - {request.request_id for request in before})
        assert scheduler.open_gates() == []
        gated = {id for id, request in scheduler.requests.items() if request.status is Status.GATED}
        assert gated == set(scheduler._gated.requests)
        loading = set() if scheduler.transfers is None else set(scheduler.transfers._loads)
        assert gated <= self.doors.closed | loading or self.pause_gate.is_closed
        tables = {id: {b.block_id for t in r.blocks.tables for b in t} for id, r in scheduler.requests.items()}
        step = scheduler.schedule()
        compressed = {step.rows[place] for place, _, _ in step.compressions}
        self.check_compressed(step)
        for request in scheduler.running:  # steps are run in their order, so later ones may write to what is dropped
            for access in (access for other in self.in_flight for access in other.accesses):
                if request.row in compressed and access.request_id == request.request_id:
                    kept = {block.block_id for table in request.blocks.tables for block in table}
                    access.forget(tables[request.request_id] - kept)
        assert not gated & {new.request_id for new in step.new_requests}
        live = [truth.request for truth in self.truths.values()]
        assert len(step.rows) == len(step.num_tokens) == len(set(step.rows))
        assert all(0 <= row < limits.max_num_seqs for row in step.rows)
        assert all(1 <= count <= (limits.long_prefill_token_threshold or count) for count in step.num_tokens)
        assert sum(step.num_tokens) <= limits.max_num_batched_tokens
        assert len(scheduler.running) <= limits.max_num_seqs
        assert [r.key for r in scheduler.running] == sorted(r.key for r in scheduler.running)
        gated = {id for id, request in scheduler.requests.items() if request.status is Status.GATED}
        if not step.rows and not self.mover.pending:
            assert self.flying or len(scheduler.requests) == len(gated), "nothing runs, and nothing will change that"
        for new in step.new_requests:
            truth = self.truths[new.request_id]
            assert new.token_ids == truth.tokens, "a request entered with other tokens than it has"
            assert new.num_prompt_tokens == len(truth.source.prompt_token_ids)
            assert new.num_computed_tokens < len(new.token_ids)
            assert all(new.row not in flying.step.rows for flying in self.flying), "the row is still in use"
        names = {request.row: request.request_id for request in scheduler.running}
        scheduled = {names[row] for row in step.rows}
        leaving = flying_ids - set(names.values())
        for request in scheduler.running:
            truth = self.truths[request.request_id]
            flying = sum(  # at most
                1 + num_drafts
                for other in self.flying
                for access, sampled, num_drafts in zip(other.accesses, other.sampled, other.num_drafts, strict=True)
                if access.request_id == request.request_id and sampled
            )
            last = len(truth.tokens) + flying >= len(truth.source.prompt_token_ids) + truth.source.max_tokens
            left = request.compression.at - request.num_computed_tokens  # a step must have room for all of these
            waits = self.compression is not None and 0 < left <= self.compression.window
            if request.request_id not in scheduled and not last and not waits:
                assert leaving, f"{request} got no token"
                assert not step.new_requests, f"requests entered while {request} waits for blocks"
        entered = {new.request_id for new in step.new_requests}
        outside = [r.key for r in live if r.status in (Status.WAITING, Status.PREEMPTED)]
        for request in scheduler.running:
            if request.request_id in entered:
                assert all(request.key < key for key in outside), "a request entered before its turn"
        stayed = [r.key for r in before if r.status is Status.RUNNING and r.request_id not in entered]
        for request in before:
            if request.status is not Status.RUNNING:
                assert not blocks_come_back, "preempted, though blocks were coming back"
                assert all(key < request.key for key in stayed), "not the last in the order of service was preempted"
        return step

    def check_compressed(self, step: SchedulerOutput) -> None:
        """Requests are compressed at the right numbers of tokens to the right numbers of blocks, and stay small."""
        options = self.compression
        if options is None:
            assert not step.compressions
            return
        interval = -(-options.interval // BLOCK_SIZE) * BLOCK_SIZE
        compressed = {step.rows[place]: (kept, again) for place, kept, again in step.compressions}
        for request in self.scheduler.running:
            end, num_prompt = request.num_computed_tokens, request.num_prompt_tokens
            table = request.blocks.tables[0]
            if request.row in compressed:
                kept, again = compressed[request.row]
                assert end == num_prompt or (end - num_prompt) % interval == 0
                assert kept == options.kept_blocks(end, BLOCK_SIZE)
                assert len(table) == kept + (end % BLOCK_SIZE > 0)
                assert again < step.num_tokens[step.rows.index(request.row)]
                assert again == 0 or end > num_prompt
            points = [num_prompt, *(range(num_prompt + interval, end + 1, interval) if interval else ())]
            last = max((p for p in points if p <= end), default=0)
            most = options.kept_blocks(last, BLOCK_SIZE) if last else None
            if most is not None and last < num_prompt + self.truths[request.request_id].source.max_tokens:
                ahead = -(-max(request.blocks.capacity, end) // BLOCK_SIZE) - last // BLOCK_SIZE
                assert len(table) <= most + ahead, f"{request} holds more than it keeps"

    def submit(self, step: SchedulerOutput, refused: Sequence[int] = (), out_of_memory: bool = False) -> None:
        """refused: places of the step. The worker skips it if there are any, or if it has skipped one of its epoch."""
        if not step.rows:
            return
        self.num_steps += 1
        if refused and step.epoch > self.worker.skipped_epoch:
            believed = self.believed(step)
            self.worker.refuse(step, self.truths, out_of_memory)
            refusals = dict.fromkeys(refused, "it does not compile")
            self.in_flight.append(InFlight(step, *believed, refusals, was_skipped=True))
            return
        if step.epoch <= self.worker.skipped_epoch:
            self.in_flight.append(InFlight(step, *self.believed(step), was_skipped=True))
            return
        sampled, accesses = self.worker.execute(step, self.truths)
        for earlier in self.in_flight:
            for used in earlier.accesses:
                for access in accesses:
                    assert access.request_id == used.request_id or not access.written & (used.read | used.written), (
                        f"{access.request_id} overwrites a block of {used.request_id} that step "
                        f"{earlier.step.step_id} still needs"
                    )
        for access in accesses:
            access.forget(access.dropped)
        self.in_flight.append(InFlight(step, sampled, accesses))

    def believed(self, step: SchedulerOutput) -> tuple[list[list[int]], list[Access]]:
        """Which rows sample and which requests take part, if the step is run. It is not, so no block is touched."""
        requests = {request.row: request for request in self.scheduler.running}
        sampled, accesses = [], []
        for row in step.rows:
            request = requests[row]
            tokens = len(self.truths[request.request_id].tokens)
            sampled.append([-1] if request.num_computed_tokens >= tokens else [])
            accesses.append(Access(request.request_id))
        return sampled, accesses

    def refuse(self, victim: int, out_of_memory: bool) -> None:
        """A step that the worker skips: for lack of memory, or because it refuses some of the new requests."""
        step = self.schedule()
        places = [step.rows.index(new.row) for new in step.new_requests]
        if out_of_memory:
            self.submit(step, [len(step.rows) - 1], out_of_memory=True)
        else:
            self.submit(step, [place for bit, place in enumerate(places) if victim >> bit & 1])
        self.check(set(step.block_table_edits.block_ids))

    def step(self) -> None:
        step = self.schedule()
        taken = set(step.block_table_edits.block_ids)
        self.submit(step)
        self.check(taken)

    def retire(self) -> None:
        flying = self.in_flight.popleft()
        epoch, expected = self.scheduler.epoch, []
        if flying.step.epoch < epoch:
            assert flying.was_skipped, "the worker ran a step that the scheduler has withdrawn"
            return
        for place, (access, sampled) in enumerate(zip(flying.accesses, flying.sampled, strict=True)):
            truth = self.truths[access.request_id]
            if not flying.was_skipped:
                output = truth.deliver(sampled) if sampled else None
                if output is not None:
                    expected.append(output)
            elif place in flying.refusals and not truth.ended:
                truth.ended = True
                expected.append((access.request_id, [], FinishReason.ERROR, flying.refusals[place]))
        outputs = self.scheduler.update(flying.output)
        assert self.scheduler.epoch == epoch + flying.was_skipped
        if flying.was_skipped:
            self.owners.clear()
            assert all(not request.holds for request in self.scheduler.requests.values())
        assert [(o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason) for o in outputs] == expected
        self.check()

    def move_door(self, request_id: str) -> None:
        """Close or open the door of a request, which may have passed it."""
        self.doors.closed ^= {request_id}
        self.scheduler.wake()
        assert self.scheduler.has_work

    def abort(self, request_id: str) -> None:
        truth = self.truths[request_id]
        assert self.scheduler.abort(request_id) is not truth.ended
        truth.ended = True
        self.check()

    def withdraw(self) -> None:
        """A step that is given up before the worker sees it."""
        step = self.schedule()
        if not step.rows:
            return
        self.scheduler.withdraw(step)
        self.owners.clear()
        self.check()

    def pause(self) -> None:
        """All steps retire, and all requests wait until the pause ends."""
        while self.in_flight:
            self.retire()
        self.pause_gate.close()
        self.scheduler.hold()
        self.check()
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        held = set(self.mover.held()) if self.scheduler.transfers is not None else set()
        assert self.pool.num_free + len(held) == self.pool.num_usable
        assert not self.schedule().rows
        self.pause_gate.open()
        self.scheduler.wake()

    def advance(self) -> None:
        """A turn of the core's loop."""
        if self.mover.pending and self.mover.dice.random() < 0.3:
            self.mover.end_one()
        if len(self.in_flight) < self.scheduler.limits.depth:
            self.step()
        if len(self.in_flight) == self.scheduler.limits.depth or (self.in_flight and not self.scheduler.running):
            self.retire()

    def finish(self) -> None:
        """Everything that was not ended from outside ends by itself, in a bounded number of turns; nothing is left."""
        self.doors.closed.clear()
        self.scheduler.wake()
        turns = 20 + 3 * sum(len(t.source.prompt_token_ids) + t.source.max_tokens for t in self.truths.values())
        while self.scheduler.requests:
            turns -= 1
            assert turns >= 0, f"no end: {list(self.scheduler.requests.values())}"
            if len(self.in_flight) < self.scheduler.limits.depth:
                self.step()
            if self.in_flight:
                self.retire()
            elif self.mover.pending:
                self.mover.end_one()
        while self.in_flight:
            self.retire()
        while self.mover.pending:
            self.mover.end_one()
            self.scheduler.open_gates()
        assert all(truth.ended for truth in self.truths.values())
        assert not self.scheduler.has_unfinished
        self.scheduler.open_gates()
        assert not self.scheduler.has_work
        assert not self.scheduler.running
        assert len(self.scheduler.waiting) == 0
        assert self.pool.num_free == self.pool.num_usable
        assert sorted(self.scheduler._free_rows) == list(range(self.scheduler.limits.max_num_seqs))
        assert self.scheduler._num_leaving == 0

    # ---- what must always hold

    def check(self, taken: set[int] | None = None) -> None:
        pool = self.pool
        live = [truth.request for truth in self.truths.values()]
        waiting = sum(request.status is Status.WAITING for request in live)
        assert len(self.scheduler.waiting) == waiting == sum(1 for _ in self.scheduler.waiting)
        named = Counter(b.block_id for request in live for table in request.blocks.tables for b in table)
        if self.scheduler.transfers is not None:
            held = self.mover.held()
            named.update(held)
            taken = {*(taken or ()), *held}
        for block in pool.blocks[1:]:
            assert block.ref_cnt == named[block.block_id], f"{block} is named by {named[block.block_id]} tables"
        for request in live:
            blocks = sum(b is not pool.null_block for table in request.blocks.tables for b in table)
            assert blocks <= self.scheduler.kv.max_blocks(request.blocks.capacity), (
                f"{request} keeps blocks it does not need"
            )
        free = [block.block_id for block in islice(pool.free_list, len(pool.blocks))]  # it may be a ring
        assert len(free) == len(set(free)) == pool.num_free
        assert set(free) == {block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0}
        assert pool.null_block.block_hash is None
        for flying in self.in_flight:
            for access in flying.accesses:
                for block_id in access.read | access.written:
                    assert pool.blocks[block_id].ref_cnt, f"step {flying.step.step_id} needs block {block_id}, freed"
        self.check_cache(taken or set())

    def check_cache(self, taken: set[int]) -> None:
        if any(flying.was_skipped for flying in self.flying):
            return  # the cache names blocks that were not written, until the scheduler learns of it
        owners = {block.block_hash: block.block_id for block in self.pool.blocks if block.block_hash is not None}
        assert {key: block.block_id for key, block in self.pool._cached.items()} == owners
        assert self.listener.stored == owners
        self.events.publish()
        assert self.router.blocks == {(group, int.from_bytes(name[-8:])) for group, name in owners}
        for request in self.scheduler.running:
            for index, name in enumerate(request.block_hashes):
                text = tuple(request.token_ids[: (index + 1) * BLOCK_SIZE]), request.source.cache_salt, None
                assert self.router.texts.get(int.from_bytes(name[-8:]), text) == text
        for (group, block_hash), block_id in owners.items():
            places = self.worker.groups[group].of_a_full_block()
            last = self.worker.memory.get((block_id, places[-1][1]))
            assert last is not None, f"block {block_id} is findable, and empty"
            for _, offset, position in places:
                node, _ = self.histories.last_tokens(last[1], BLOCK_SIZE - 1 - position)
                entry = self.worker.memory.get((block_id, offset))
                assert entry == (group, node), f"block {block_id} is findable with mixed content"
            assert self.histories.block_hash(last[1]) == block_hash, f"block {block_id} has another block's hash"
        for key, block_id in self.owners.items():
            if owners.get(key) != block_id:
                assert block_id in taken, f"block {block_id} lost its hash without being reused"
        self.owners = owners


# ---- hypothesis drives


SETTINGS = st.builds(
    Setting,
    groups=st.sampled_from(list(KV_GROUPS)),
    depth=st.sampled_from([1, 2, 2, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.sampled_from([True, True, True, False]),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
    spare_blocks=st.integers(0, 8),
    seed=st.integers(0, 3),
    threshold=st.sampled_from([0, 0, 1, 3, 7, 30]),
    drafts=st.sampled_from([0, 1, 3, 6]),
    skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    drafts_stay=st.booleans(),
    tiers=st.sampled_from(["", "memory", "disk", "both"]),
)
LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 20, 27])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(setting=SETTINGS)
    def begin(self, setting: Setting) -> None:
        self.house = House(setting)

    @rule(
        document=st.sampled_from(DOCUMENTS),
        length=LENGTHS,
        suffix=st.lists(st.integers(2, 7), max_size=5),
        max_tokens=st.sampled_from([1, 2, 3, 6, 12]),
        style=st.integers(0, 1),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
        min_tokens=st.sampled_from([0, 0, 2]),
        copies=st.sampled_from([1, 1, 2, 3]),
        closed=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        document: list[int],
        length: int,
        suffix: list[int],
        max_tokens: int,
        style: int,
        priority: int,
        salt: str | None,
        min_tokens: int,
        copies: int,
        closed: bool,
    ) -> None:
        for _ in range(copies):
            self.house.add(document[:length] + suffix, max_tokens, style, priority, salt, min_tokens, closed=closed)

    @precondition(lambda self: self.house.scheduler.requests)
    @rule(data=st.data())
    def move_door(self, data: st.DataObject) -> None:
        self.house.move_door(data.draw(st.sampled_from(sorted(self.house.scheduler.requests))))

    @rule(turns=st.integers(1, 6))
    def advance(self, turns: int) -> None:
        for _ in range(turns):
            self.house.advance()

    @precondition(lambda self: len(self.house.in_flight) < self.house.scheduler.limits.depth)
    @rule()
    def step(self) -> None:
        self.house.step()

    @precondition(lambda self: self.house.in_flight)
    @rule()
    def retire(self) -> None:
        self.house.retire()

    @precondition(lambda self: self.house.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.house.abort(data.draw(st.sampled_from(sorted(self.house.scheduler.requests))))

    @precondition(lambda self: len(self.house.in_flight) < self.house.scheduler.limits.depth)
    @rule()
    def withdraw(self) -> None:
        self.house.withdraw()

    @precondition(lambda self: len(self.house.in_flight) < self.house.scheduler.limits.depth)
    @rule(victim=st.integers(0, 7), out_of_memory=st.booleans())
    def refuse(self, victim: int, out_of_memory: bool) -> None:
        self.house.refuse(victim, out_of_memory)

    @rule()
    def pause(self) -> None:
        self.house.pause()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.house.scheduler.kv.reset_prefix_cache()
        self.house.owners.clear()
        self.house.check()

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.house.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = (
    settings(  # half of the profile's 100 examples, or of those of --hypothesis-profile=thorough
        settings(), max_examples=settings().max_examples // 2, deadline=None, suppress_health_check=list(HealthCheck)
    )
)


# ---- long random walks, for what needs a history


@pytest.mark.sampled(31)
@pytest.mark.parametrize("groups", list(KV_GROUPS))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_walk_loses_and_leaks_nothing(groups: str, depth: int, seed: int) -> None:
    walk(groups, depth, seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_walks_load_what_has_left_the_pool(tiers: str) -> None:
    walks = [walk(groups, 2, seed, tiers=tiers) for groups, seed in (("full", 10), ("mixed", 11))]
    assert sum(house.mover.loads for house in walks) > 5
    assert sum(house.mover.failures for house in walks) > 5


def walk(groups: str, depth: int, seed: int, moves: int = 300, tiers: str | None = None) -> House:
    dice = random.Random(f"{groups} {depth} {seed}")
    house = House(
        Setting(
            groups,
            depth,
            policy=dice.choice(["fcfs", "priority"]),
            caching=dice.random() < 0.8 or tiers is not None,
            max_num_seqs=dice.randint(2, 6),
            budget=dice.choice([6, 8, 13, 24]),
            spare_blocks=dice.randint(0, 10),
            drafts=dice.choice([0, 2, 5]),
            drafts_stay=dice.random() < 0.5,
            tiers=dice.choice(["", "memory", "disk", "both"]) if tiers is None else tiers,
            skill=dice.choice([0.3, 0.9]),
            seed=seed,
        )
    )
    for _ in range(moves):
        move = dice.random()
        if move < 0.2 and len(house.scheduler.waiting) < 8:
            length = dice.choice([1, 3, 4, 5, 8, 9, 12, 16, 20, 27])
            suffix = [dice.randint(2, 7) for _ in range(dice.randint(0, 4))]
            salt = dice.choice([None, None, "a"])
            prompt = dice.choice(DOCUMENTS)[:length] + suffix
            tokens, closed = dice.choice([1, 3, 8, 16]), dice.random() < 0.2
            house.add(prompt, tokens, dice.randint(0, 1), dice.randint(0, 2), salt, closed=closed)
        elif move < 0.23 and house.scheduler.requests:
            house.move_door(dice.choice(sorted(house.scheduler.requests)))
        elif move < 0.25 and house.scheduler.requests:
            house.abort(dice.choice(sorted(house.scheduler.requests)))
        elif move < 0.27 and len(house.in_flight) < depth:
            house.withdraw()
        elif move < 0.29 and len(house.in_flight) < depth:
            house.refuse(dice.randrange(8), dice.random() < 0.5)
        elif move < 0.295:
            house.pause()
        elif move < 0.3:
            house.scheduler.kv.reset_prefix_cache()
            house.owners.clear()
        else:
            house.advance()
    house.finish()
    return house
