"""Loads a rank's part of the model and of a drafter."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.checkpoints.weights import Checkpoint
from quire.config.engine import ConfigError, EngineConfig
from quire.layers.lora import AdapterSlots
from quire.models.kv_groups import KVGroups
from quire.models.load import load_model
from quire.models.model import LoadedModel, Model
from quire.observability.logging import logger
from quire.parallel.mesh import Mesh
from quire.worker import memory
from quire.worker.assembly.backends import make_backends
from quire.worker.plan import RankPlan, plan_rank
from quire.worker.resident_memory import weights_of

if TYPE_CHECKING:
    from quire.worker.drafters.load import DrafterParts


@dataclass(frozen=True)
class LoadedRank:
    """target: this rank's part of the model. weights: see weights_of. load: loads the same model again, see
    ResidentMemory. drafter: None if this rank makes no drafts for the target."""

    plan: RankPlan
    target: LoadedModel
    weights: list[Tensor]
    load: Callable[[Path | Checkpoint | None], LoadedModel]
    drafter: "DrafterParts | None"

    @property
    def model(self) -> Model:
        return self.target.model

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, including those of the drafter, which come last."""
        return self.plan.page_bytes + (0 if self.drafter is None else self.drafter.entry_bytes)

    def parts_of_a_block(self) -> int:
        """Return the number of entries in a block if all of them are equally large, also those of the drafter.

        Raises ConfigError if they are not.
        """
        sizes = {size for group in self.plan.groups for size in group.spec.entry_sizes(group.backend.entry_bytes)}
        if self.drafter is not None:
            sizes |= self.drafter.entry_sizes
        if len(sizes) > 1:
            listed = ", ".join(str(size) for size in sorted(sizes))
            raise ConfigError(
                f"kv_cache_layout='layer_by_layer' needs equally large entries of all layers, but those of this model "
                f"have {listed} bytes in a block; use layers_together"
            )
        return self.block_bytes // sizes.pop() if sizes else 1

    @property
    def backends(self) -> list[CacheBackend]:
        """All backends that store entries in a block, each once."""
        drafter = [] if self.drafter is None else self.drafter.backends
        return [*dict.fromkeys(self.plan.backends), *drafter]

    def bind_cache(self, blocks: Tensor) -> None:
        """Let model and drafter use the cache. blocks: uint8, see KVMemory."""
        backends = self.plan.backends
        self.model.bind_cache(backends, [blocks] * len(backends))
        if self.drafter is not None:
            self.drafter.bind_cache(blocks, self.plan.page_bytes)


def load_rank(
    config: EngineConfig, directory: Path, max_model_len: int, device: torch.device, mesh: Mesh
) -> LoadedRank:
    """Load the weights, and log what was loaded. All ranks of a replica call this together.

    Raises ConfigError, ValueError or an error of loading.
    """
    started = time.perf_counter()
    lora = config.lora
    slots = None
    if lora.enable_lora:
        targets = lora.lora_target_modules
        slots = AdapterSlots(lora.max_loras, lora.max_lora_rank, targets, mesh.dp.rank, mesh.dp.size)
    with memory.explained("the model's weights", device):
        load = partial(load_model, directory, config, max_model_len, device, mesh, mesh.rank == 0)
        loaded = load(slots)
    model = loaded.model
    weights = weights_of(loaded)
    plan = plan_rank(config, max_model_len, mesh, model.kernels, KVGroups(model.kv_specs, model.cache_shapes))
    drafter = None
    if plan.drafter_forward is not None:
        with memory.explained("the drafter's weights", device):
            drafter = _load_drafter(config, directory, max_model_len, model, mesh, plan)
    num_parameters = mesh.pp.total(model.num_parameters)
    if mesh.rank == 0:
        _log(config, mesh, loaded, plan, num_parameters, time.perf_counter() - started)
    return LoadedRank(plan, loaded, weights, lambda weights: load(weights=weights), drafter)


def _load_drafter(
    config: EngineConfig, directory: Path, max_model_len: int, model: Model, mesh: Mesh, plan: RankPlan
) -> "DrafterParts":
    from quire.worker.drafters.load import DrafterParts

    options = config.scheduler.speculation
    assert options is not None
    backends_of = partial(make_backends, config, plan.shape_block_size, model.kernels, mesh)
    return DrafterParts(options, config, directory, model, max_model_len, mesh.tp, backends_of)


def _log(
    config: EngineConfig, mesh: Mesh, loaded: LoadedModel, plan: RankPlan, num_parameters: int, seconds: float
) -> None:
    """num_parameters: of all ranks. seconds: the loading time."""
    target = loaded.model.kernels.target
    device = target.device
    logger.info(
        "Model %s loaded%s in %.1f s: %s parameters, %s, %.2f GiB in memory%s, attention backend %s",
        config.model.model or "quire-demo (bundled)",
        f" on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "",
        seconds,
        count_text(num_parameters),
        str(target.dtype).removeprefix("torch."),
        memory.weights_in_memory(loaded) / 2**30,
        f" on the first of {mesh.replica.size} ranks" if mesh.replica.size > 1 else "",
        ", ".join(dict.fromkeys(backend.name for backend in plan.backends)) or "none",
    )
    speculation = config.scheduler.speculation
    if speculation is not None and speculation.on_device:
        logger.info("Drafts are made by %s (%s)", speculation.model or "the model's own head", speculation.method)


def count_text(number: int) -> str:
    """135_000_000 -> "135 M"."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
