"""Two schedulers, a producer's and a consumer's, with real links on loopback. The model of the devices knows the
content of every block, so a block that is read too late, or used too early, is noticed."""

import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from quire.cluster.secret import ClusterSecret, NoSecret
from quire.kv.manager import KVCacheManager
from quire.kv.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.messages.transfers import Peer, Transfer, TransferParams
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.transfer import exports, imports, link
from quire.transfer.exchange import Exchange
from quire.transfer.link import Link
from support.server import eventually
from support.waiting import LONGEST

SIZE = 4  # tokens of a block
FACTS = {"the model": "a"}
SPECS: dict[str, list[KVCacheSpec]] = {
    "full": [attention_spec([0])],
    "window": [SlidingWindowSpec(attention_spec([0]).entries, 6)],
    "both": [FullAttentionSpec(attention_spec([0]).entries), SlidingWindowSpec(attention_spec([1]).entries, 6)],
}
Content = dict[int, Any]  # by block id: the KV group and the tokens up to the block's end


class Rank:
    """Another rank of the producer, which lags behind: what its blocks contain, and the steps that it has still to
    run."""

    def __init__(self) -> None:
        self.content: Content = {}
        self.steps = deque[tuple[int, Content | None]]()  # None: it skips the step
        self.last, self.has_run = 0, set[int]()

    def run(self) -> None:
        self.last, computed = self.steps.popleft()
        if computed is not None:
            self.content.update(computed)
            self.has_run.add(self.last)


class Mover:
    """Copies what the producer's rank has, when it is told to."""

    def __init__(self, dice: random.Random, rank: Rank) -> None:
        self.dice, self.rank, self.orders = dice, rank, deque[tuple[Transfer, Future[list[int]]]]()
        self.target: Content = {}

    def transfer(self, order: Transfer) -> Future[list[int]]:
        future: Future[list[int]] = Future()
        self.orders.append((order, future))
        return future

    def move(self, fails: bool = False) -> None:
        order, future = self.orders.popleft()
        assert order.step
        if order.step > self.rank.last:
            self.orders.append((order, future))  # it waits
            return
        if order.step not in self.rank.has_run:
            future.set_result(list(range(len(order.keys))))
            return
        failed = []
        for index, (block_id, slot) in enumerate(zip(order.block_ids, order.slots, strict=True)):
            if fails and self.dice.random() < 0.5:
                failed.append(index)
                self.target[block_id] = "rubbish"
            else:
                self.target[block_id] = self.rank.content.get(slot)
        future.set_result(failed)


class Engine:
    """A scheduler, and a device whose blocks contain what was computed."""

    def __init__(
        self,
        specs: list[KVCacheSpec],
        listen: int | None,
        mover: Mover | None,
        secret: ClusterSecret,
        facts: dict[str, str],
        num_blocks: int = 60,
        depth: int = 1,
        name: str = "p",
    ) -> None:
        limits = SchedulerLimits(4, 16, 64, depth=depth)
        self.link = Link(secret, None if listen is None else ("127.0.0.1", listen))
        peer = Peer("p", "127.0.0.1", ())

        def connect_engines(kv: KVCacheManager) -> Exchange:
            self.exchange = Exchange(kv, mover, 0, self.link, facts, peer)
            return self.exchange

        self.scheduler = Scheduler(limits, num_blocks, specs, SIZE, fingerprint=name, connect_engines=connect_engines)
        self.exchange.connect(self.scheduler.wake)
        self.content: Content = {}
        self.other_rank = Rank()
        self.withdraws = lambda: False  # whether a step is withdrawn, and whether the other rank runs it all the same
        self.flying: deque[tuple[SchedulerOutput, list[tuple[Request, int, int]]]] = deque()
        self.ended: set[str] = set()
        self.cached: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], params: TransferParams, max_tokens: int = 1) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(EngineCoreRequest(name, prompt, sampling, 0, max_tokens, transfer=params))

    def step(self) -> None:
        scheduler = self.scheduler
        scheduler.open_gates()
        while len(self.flying) < scheduler.limits.depth:
            step = scheduler.schedule()
            if not step.rows:
                break
            requests = scheduler._submitted[-1][1]
            parts, computed = [], Content()
            for request, count in zip(requests, step.num_tokens, strict=True):
                start, end = request.num_computed_tokens - count, request.num_computed_tokens
                self.cached.setdefault(request.request_id, request.num_cached_tokens)
                self._compute(request, start, end, computed)
                parts.append((request, start, end))
            if self.withdraws():
                self.other_rank.steps.append((step.step_id, computed if self.withdraws() else None))
                scheduler.withdraw(step)
                break
            self.other_rank.steps.append((step.step_id, computed))
            self.flying.append((step, parts))
        if self.flying:
            step, parts = self.flying.popleft()
            sampled = [[1] if end >= len(request.token_ids) else [] for request, _, end in parts]
            for output in scheduler.update(ModelRunnerOutput(step.step_id, sampled)):
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)

    def _compute(self, request: Request, start: int, end: int, computed: Content) -> None:
        tokens = [*request.token_ids, *[1] * request.num_in_flight_samples]
        for group, (spec, table) in enumerate(zip(self.scheduler.kv.specs, request.blocks.tables, strict=True)):
            for index in range(spec.first_needed_token(start) // SIZE, start // SIZE):
                wanted = (group, tokens[: (index + 1) * SIZE])
                assert self.content[table[index].block_id] == wanted, "it would read something else"
            for index in range(start // SIZE, -(-end // SIZE)):
                table_entry = table[index]
                if table_entry is not self.scheduler.kv.pool.null_block:
                    full = (index + 1) * SIZE <= end
                    computed[table_entry.block_id] = (group, tokens[: (index + 1) * SIZE]) if full else "partial"
                    self.content[table_entry.block_id] = computed[table_entry.block_id]

    @property
    def leaked(self) -> int:
        pool = self.scheduler.kv.pool
        return pool.num_usable - pool.num_free

    def close(self) -> None:
        self.exchange.close()


@pytest.fixture
def be_impatient(monkeypatch) -> Callable[[], None]:
    """Engines that are called impatient soon give up what does not come; before, nothing is given up."""
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(link, "_TICK_MILLISECONDS", 20)

    def wait_for(seconds: float) -> None:
        for module, name in ((exports, "UNKNOWN"), (exports, "UNWANTED"), (imports, "WAIT"), (link, "LOST")):
            monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
        monkeypatch.setattr(link, "HOLD_SECONDS", 2 * seconds)

    wait_for(LONGEST)
    return lambda: wait_for(1.0)


class Pair:
    def __init__(
        self,
        free_port: int,
        groups: str = "full",
        depth: int = 1,
        seed: int = 0,
        facts: Any = None,
        secret: ClusterSecret | None = None,
        num_blocks: int = 60,
    ) -> None:
        self.port, self.dice = free_port, random.Random(seed)
        own = ClusterSecret(b"x" * 32)
        self.producer = Engine(SPECS[groups], free_port, None, own, FACTS, num_blocks, depth)
        self.lagging = self.producer.other_rank
        self.mover = Mover(self.dice, self.lagging)
        self.consumer = Engine(SPECS[groups], None, self.mover, secret or own, facts or FACTS, num_blocks, depth, "c")
        self.mover.target = self.consumer.content

    def ask(self, name: str, prompt: list[int], at_producer: bool = True, transfer_id: str | None = None) -> None:
        transfer_id = transfer_id or name
        if at_producer:
            self.producer.add(name, prompt, TransferParams(do_remote_decode=True, transfer_id=transfer_id))
        self.consumer.add(name, prompt, TransferParams(False, True, transfer_id, "127.0.0.1", self.port), 3)

    def run(self, until: Callable[[], bool], moves: bool = True) -> None:
        eventually(lambda: until() or self.turn(moves=moves))

    def turn(self, fails: bool = False, moves: bool = True) -> None:
        self.producer.step()
        self.consumer.step()
        if self.mover.orders and moves:
            self.mover.move(fails)
        if self.lagging.steps and self.dice.random() < 0.5:
            self.lagging.run()
        if not self.consumer.flying and not self.producer.flying:
            time.sleep(0.002)

    def close(self) -> None:
        self.run(lambda: not self.mover.orders)
        self.run(lambda: not self.producer.leaked and not self.consumer.leaked)
        self.producer.close()
        self.consumer.close()


@pytest.fixture
def make_pair(free_tcp_port, be_impatient):
    pairs = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(free_tcp_port, **options))
        return pairs[-1]

    yield make
    be_impatient()
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", SPECS)
def test_a_prompt_is_computed_once(make_pair, groups, depth):
    pair = make_pair(groups=groups, depth=depth)
    prompt = list(range(10, 51))
    pair.ask("a", prompt)
    pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.cached["a"] == 40
    assert pair.consumer.exchange.num_hits > 0


def test_blocks_are_read_while_the_prompt_is_still_computed(make_pair):
    pair = make_pair()
    pair.ask("a", list(range(10, 70)))
    pair.producer.step()  # the first of several

    def has_offered() -> bool:
        pair.producer.scheduler.open_gates()
        pair.consumer.step()
        return bool(pair.mover.orders)

    eventually(has_offered)
    assert "a" not in pair.producer.ended
    pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.cached["a"] == 56


def test_a_prompt_waits_for_its_reader_for_a_while(make_pair, be_impatient):
    pair = make_pair()
    prompt = list(range(10, 50))
    pair.producer.add("a", prompt, TransferParams(do_remote_decode=True, transfer_id="a"))
    pair.run(lambda: "a" in pair.producer.ended)
    pair.ask("a", prompt, at_producer=False)
    pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.cached["a"] == 36
    pair.producer.add("b", prompt, TransferParams(do_remote_decode=True, transfer_id="b"))
    pair.run(lambda: "b" in pair.producer.ended)
    assert pair.producer.leaked
    be_impatient()
    pair.run(lambda: not pair.producer.leaked)


def test_what_the_consumer_has_is_not_read_again(make_pair):
    pair = make_pair()
    prompt = list(range(10, 50))
    pair.ask("a", prompt)
    pair.run(lambda: "a" in pair.consumer.ended)
    hits = pair.consumer.exchange.num_hits
    pair.ask("b", [*prompt[:24], *range(100, 120)])
    pair.run(lambda: "b" in pair.consumer.ended)
    assert pair.consumer.exchange.num_hits - hits == 40 - 24
    assert pair.consumer.cached["b"] == 40


def test_completions_of_a_prompt_read_it_once(make_pair):
    pair = make_pair()
    prompt = list(range(10, 50))
    pair.ask("a", prompt, transfer_id="t")
    pair.ask("b", prompt, at_producer=False, transfer_id="t")
    pair.run(lambda: {"a", "b"} <= pair.consumer.ended)
    assert pair.consumer.exchange.num_hits == 36


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case", ["unknown", "other prompt", "aborted", "no producer", "other facts", "other secret", "other secret: none"]
)
def test_what_does_not_come_is_computed(make_pair, be_impatient, case, caplog):
    options: dict[str, Any] = {}
    if not case.startswith("other "):
        be_impatient()
    if case == "other facts":
        options["facts"] = {"the model": "b"}
    if case == "other secret":
        options["secret"] = ClusterSecret(b"y" * 32)
    if case == "other secret: none":
        options["secret"] = NoSecret()
    pair = make_pair(**options)
    prompt = list(range(10, 50))
    pair.ask("a", prompt, at_producer=case not in ("unknown", "other prompt"))
    if case == "other prompt":
        pair.producer.add("a", prompt[:-1], TransferParams(do_remote_decode=True, transfer_id="a"))
    if case == "aborted":
        pair.producer.step()
        pair.producer.scheduler.abort("a")
    if case == "no producer":
        pair.producer.close()
    pair.run(lambda: "a" in pair.consumer.ended)
    assert pair.consumer.cached["a"] < 36
    if case == "other facts":
        assert "the model is a there and b here" in caplog.text
    if case.startswith("other secret"):
        assert "same cluster_secret_file" in caplog.text


def test_a_read_counts_only_if_the_producer_still_holds_the_blocks(make_pair):
    """The producer has given up the consumer, which does not know it, and has computed something else."""
    pair = make_pair()
    prompt = list(range(10, 50))
    pair.ask("a", prompt)
    pair.run(lambda: ("a" in pair.producer.ended and len(pair.mover.orders) == 0) or len(pair.mover.orders) > 1)
    for counts in pair.producer.link._num_sent.values():
        counts.clear()  # as if it had been restarted
    pair.run(lambda: "a" in pair.consumer.ended)


def test_a_consumer_that_vanishes_holds_nothing_for_long(make_pair, be_impatient):
    pair = make_pair()
    pair.ask("a", list(range(10, 50)))
    pair.run(lambda: bool(pair.mover.orders), moves=False)
    pair.consumer.close()
    be_impatient()
    eventually(lambda: (pair.producer.step(), not pair.producer.leaked)[1])
    pair.consumer.scheduler.abort("a")
    pair.consumer.exchange._imports.drop_all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_and_faults(make_pair, be_impatient, seed):
    be_impatient()
    dice = random.Random(seed)
    groups = dice.choice(list(SPECS))
    pair = make_pair(groups=groups, depth=dice.choice([1, 2]), seed=seed, num_blocks=dice.choice([36, 60]))
    pair.producer.withdraws = lambda: dice.random() < 0.05
    names = []
    for number in range(25):
        name = str(number)
        prompt = [dice.randrange(3) for _ in range(dice.randrange(1, 60))]
        where = dice.random()
        pair.ask(name, prompt, at_producer=where > 0.15)
        if 0.1 < where < 0.15:
            pair.producer.add(name, [*prompt, 9], TransferParams(do_remote_decode=True, transfer_id=name))
        names.append(name)
        for _ in range(dice.randrange(12)):
            pair.turn(fails=dice.random() < 0.2)
        if dice.random() < 0.2:
            pair.producer.scheduler.abort(dice.choice(names))
        if dice.random() < 0.2:
            gone = dice.choice(names)
            if pair.consumer.scheduler.abort(gone):
                pair.consumer.ended.add(gone)
        if dice.random() < 0.1:
            pair.consumer.scheduler.kv.reset_prefix_cache()
    pair.run(lambda: set(names) <= pair.consumer.ended)
