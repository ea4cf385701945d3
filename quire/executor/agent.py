"""The agent of a machine that runs some ranks of another machine's executor: `quire serve --headless`."""

import secrets
import signal
import threading
from pathlib import Path
from types import FrameType

import msgspec

from quire.cluster.addresses import interface_variables, own_address, resolve
from quire.cluster.messages import Join
from quire.cluster.node import Node
from quire.cluster.secret import ClusterSecret, tcp_address
from quire.config.engine import EngineConfig
from quire.executor import messages
from quire.executor.agreement import facts, versions
from quire.executor.local_ranks import END_SECONDS, LocalRanks
from quire.executor.threads import limit_threads
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.platform.termination import end_if_told, end_signals

_orders = msgspec.msgpack.Decoder(messages.ForRanks)
_begins = msgspec.msgpack.Decoder(messages.Begin)
_order = msgspec.msgpack.Decoder(messages.Order)


class Agent:
    """Joins the executor at an address. In each session, it starts the ranks with the given numbers, and forwards
    messages between them and the executor."""

    def __init__(
        self, config: EngineConfig, directory: Path, numbers: range, secret: ClusterSecret, address: str, host: str
    ) -> None:
        """directory: the model's on this machine. host: the executor's address, or any address that leads to it."""
        self._config = config
        self._directory = directory
        self._numbers = numbers
        self._secret = secret
        self._address = address
        own = own_address(host)
        self._variables = interface_variables(own)
        join = Join(
            first=numbers.start,
            count=len(numbers),
            node=secrets.randbits(62),
            host=own,
            facts=facts(config, directory),
            versions=versions(),
        )
        self._node = Node(secret, address, join)
        self._threads = limit_threads(len(numbers), config.kernels.threads)
        self._session: _Session | None = None

    def run(self) -> None:
        """Run until `stop` is called. Raises ConfigError if the executor rejects this machine."""
        self._node.run(self)

    def stop(self) -> None:
        self._node.stop()

    # ---- in a session, on the thread of `run`

    def begin(self, body: bytes) -> None:
        begin = _begins.decode(body)
        start = messages.Start(
            self._config,
            str(self._directory),
            begin.max_model_len,
            begin.sizes,
            begin.meeting,
            self._threads,
            begin.log,
            (self._numbers.start, len(self._numbers)),
            begin.machines,
            begin.replica,
            begin.generation,
        )
        self._session = _Session(self._numbers, self._node)
        self._session.start(start, self._secret.secret, self._variables)

    def received(self, body: bytes) -> None:
        assert self._session is not None
        try:
            order = _orders.decode(body)
            _order.decode(order.order)
        except msgspec.DecodeError as error:
            logger.warning(
                "The executor sent an order of %d bytes that has no meaning: %s", len(body), error_text(error)
            )
            return
        self._session.ranks.order(order.order, range(order.first, order.stop))

    def end(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None


class _Session:
    """The ranks of one session."""

    def __init__(self, numbers: range, node: Node) -> None:
        self.ranks = LocalRanks(numbers, self)
        self._node = node
        self._starter: threading.Thread
        self._has_ended = self._has_failed = False

    def start(self, start: messages.Start, secret: bytes, variables: dict[str, str]) -> None:
        def work() -> None:
            try:
                self.ranks.start(start, secret, variables)
            except Exception as error:
                self.failed(error)

        # On another thread, since the head must keep receiving heartbeats.
        self._starter = threading.Thread(target=work, name="start ranks", daemon=True)
        self._starter.start()

    def replied(self, rank: int, reply: messages.Reply) -> None:
        if not self._has_ended:
            self._node.send(messages.encode(messages.FromRank(rank, reply)))

    def failed(self, problem: Exception) -> None:
        if not self._has_ended:
            logger.error("The ranks have failed: %s", error_text(problem))
            self._has_failed = True
            self._node.send(messages.encode(messages.Failed(error_text(problem), isinstance(problem, ValueError))))

    def end(self) -> None:
        self._has_ended = True
        self.ranks.end(END_SECONDS[self._has_failed])
        self._starter.join()
        self.ranks.end(0)  # those started in the meantime


def run_agent(config: EngineConfig, directory: Path) -> int:
    """The main function of a headless machine that has ranks of a replica. Returns the exit status of the process.

    Raises ConfigError if the executor rejects it.
    """
    options = config.cluster
    layout = config.layout
    assert options.cluster_secret_file is not None
    count = config.parallel.ranks // layout.machines
    agent = Agent(
        config,
        directory,
        range(layout.machine * count, (layout.machine + 1) * count),
        ClusterSecret.read(options.cluster_secret_file),
        tcp_address(resolve(options.master_addr), options.master_port),
        options.master_addr,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        agent.stop()

    for number in end_signals():
        signal.signal(number, stop)
    end_if_told()
    agent.run()
    return 0
