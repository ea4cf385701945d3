"""Places parts of an engine on the machines of a Ray cluster. Ray finds the machines and starts an actor process on
each; everything else uses Quire's own connections."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoints.hub import hub_name
from quire.config.engine import ConfigError, EngineConfig
from quire.executor import messages
from quire.messages.errors import error_text
from quire.models.heads.resolve import with_files
from quire.observability.logging import LogOptions, configure_logging, log_options, logger
from quire.platform.extras import install_command

PLACE_SECONDS = 600.0  # time limit for the cluster to provide the resources
_LOOK_SECONDS = 1.0  # how often the actors are checked


class RayCluster:
    """The connection of this process to the Ray cluster named by RAY_ADDRESS, or running on this machine, or otherwise
    started by this process. It lasts as long as the process. Raises ConfigError if Ray is missing or cannot be
    reached."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"the backend ray needs the package ray: {install_command('ray')}") from error
        self.ray: Any = ray
        if not ray.is_initialized():
            before = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
            try:
                ray.init(log_to_driver=True, logging_level="WARNING", include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"the Ray cluster cannot be reached: {error_text(error)}") from error
            if before is not None:
                signal.signal(signal.SIGTERM, before)  # Ray has replaced it with its own
        self.host = str(ray.util.get_node_ip_address())

    @property
    def has_gpus(self) -> bool:
        return bool(self.ray.cluster_resources().get("GPU"))


def uses_gpus(config: EngineConfig, cluster: RayCluster) -> bool:
    """Whether the ranks should have GPUs. The driver's machine need not have one."""
    option = config.kernels.device
    if option == "cuda" and not cluster.has_gpus:
        raise ConfigError("device='cuda' was asked for, but the Ray cluster has no GPU")
    return option == "cuda" or (option == "auto" and cluster.has_gpus)


def resources(gpu: bool, ranks: int = 1) -> dict[str, float]:
    """Return the resources of this many ranks: one GPU each, or OMP_NUM_THREADS processors each on CPUs (default 1)."""
    return {"GPU": ranks} if gpu else {"CPU": ranks * int(os.environ.get("OMP_NUM_THREADS", 1))}


class Actors:
    """Actors in a placement group, each of which runs a function. They end with this process."""

    def __init__(self, cluster: RayCluster, bundles: Sequence[dict[str, float]], strategy: str) -> None:
        """bundles: the resources of each actor. Waits until the cluster provides them. Raises RuntimeError if it does
        not in time."""
        self._cluster = cluster
        self._ray = cluster.ray
        self._bundles = bundles
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._is_open = True
        util = cluster.ray.util
        self._group = util.placement_group(list(bundles), strategy=strategy)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        nodes = util.placement_group_table(self._group)["bundles_to_node_id"]
        own = cluster.ray.get_runtime_context().get_node_id()
        # Consecutive numbers are on the same machine, beginning with this one.
        self._order = sorted(nodes, key=lambda bundle: (nodes[bundle] != own, nodes[bundle], bundle))
        names = list(dict.fromkeys(nodes[bundle] for bundle in self._order))
        self.machines = [names.index(nodes[bundle]) for bundle in self._order]

    def _wait(self) -> None:
        deadline = time.monotonic() + PLACE_SECONDS
        ready = self._group.ready()
        said = False
        while not self._ray.wait([ready], timeout=_LOOK_SECONDS)[0]:
            if not said:
                said = True
                logger.info(
                    "Waiting for the Ray cluster to have %s; it has %s", self._bundles, self._ray.available_resources()
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"the Ray cluster has not got {self._bundles} for {PLACE_SECONDS:.0f} s")

    def run(self, number: int, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on an actor. It must be in a Quire module."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._order[number]
        needs = self._bundles[bundle]
        actor_class = self._ray.remote(num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0))(_Actor)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = actor_class.options(scheduling_strategy=strategy).remote()
        self._actors.append(actor)
        self._runs.append(actor.run.remote(function, *arguments))

    def watch(self, ended: Callable[[int, Exception], None]) -> None:
        """Call `ended` on a thread when an actor has ended, with its number and its `result`."""

        def work() -> None:
            left = list(self._runs)
            while left and self._is_open:
                done, left = self._ray.wait(left, timeout=_LOOK_SECONDS)
                for run in done if self._is_open else ():
                    ended(self._runs.index(run), self.result(self._runs.index(run)))

        threading.Thread(target=work, name="ray actors", daemon=True).start()

    def result(self, number: int) -> Exception:
        """Wait until an actor has ended. Returns the reason: ValueError if an option or the model is wrong."""
        try:
            self._ray.get(self._runs[number])
        except ValueError as error:
            return ValueError(error_text(getattr(error, "cause", None) or error))
        except Exception as error:
            return RuntimeError(error_text(error).strip().split("\n")[0])
        return RuntimeError("it was told to end")

    def close(self) -> None:
        """End the actors, and release their resources."""
        self._is_open = False
        with contextlib.suppress(Exception):  # the cluster may have ended
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)


class _Actor:
    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)


def portable(config: EngineConfig) -> bytes:
    """Return the encoded config for another machine, which finds its files itself. A drafter from the hub is sent by
    name."""
    given = config.scheduler.speculative_config
    if given.get("model") and (found := hub_name(Path(given["model"]))):
        given = {**given, "model": found[0], "revision": found[1]}
    return messages.encode(
        _Config(replace(config, scheduler=replace(config.scheduler, speculative_config=given)), log_options())
    )


def unpacked(config: bytes) -> tuple[EngineConfig, Path]:
    """Decode the result of `portable` on the other machine. Returns the config, and the model's directory there."""
    found = msgspec.msgpack.decode(config, type=_Config)
    configure_logging(*found.log)
    return with_files(found.config)


class _Config(msgspec.Struct, array_like=True):
    config: EngineConfig
    log: LogOptions
