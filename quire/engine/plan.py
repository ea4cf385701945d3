"""The plan of an engine's parts, made before anything is loaded, for the core, the start log and `quire doctor`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quire._version import __version__
from quire.checkpoints.formats.config import quantization_kind
from quire.config.engine import EngineConfig
from quire.config.speculative import SpeculativeOptions
from quire.engine.adjustments import Adjustment, adjustments_of_rank
from quire.engine.machine import Machine
from quire.models.description import ModelDescription
from quire.observability.logging import logger
from quire.scheduler.compression import Compression
from quire.scheduler.limits import SchedulerLimits
from quire.worker.plan import RankPlan


@dataclass(frozen=True)
class EnginePlan:
    """config: includes the values chosen for the machine. compression: of the KV cache, None if disabled. threads: per
    process of this replica. machine: its measured speed, from which some values are derived."""

    config: EngineConfig
    directory: Path
    description: ModelDescription
    limits: SchedulerLimits
    compression: Compression | None
    machine: Machine
    threads: int
    adjustments: tuple[Adjustment, ...]

    @property
    def _quantization(self) -> str | None:
        """Return the quantization format of the weights, None for dense weights."""
        stored = "gguf" if self.directory.is_file() else quantization_kind(self.description.config)
        return self.config.model.quantization or stored

    def log(self) -> None:
        """Log the plan at start."""
        if self.machine.is_cpu:
            tokens = f"{self.limits.max_num_batched_tokens:,}"
            logger.info("Threads: %d, steps of up to %s tokens: %s", self.threads, tokens, self.machine.reason)
        for adjustment in self.adjustments:
            logger.debug("%s", adjustment.text)

    def as_data(self, rank: RankPlan) -> dict[str, Any]:
        """Return the plan in JSON types. rank: the plan of the first rank."""
        config = self.config
        parallel = config.parallel
        return {
            "quire": __version__,
            "model": config.model.model or "quire-demo (bundled)",
            "directory": str(self.directory),
            "architectures": list(self.description.config.get("architectures") or []),
            "quantization": self._quantization,
            "ranks": {
                "tensor_parallel": parallel.tensor_parallel_size,
                "pipeline_parallel": parallel.pipeline_parallel_size,
                "prefill_context_parallel": parallel.prefill_context_parallel_size,
                "decode_context_parallel": parallel.decode_context_parallel_size,
                "data_parallel": parallel.data_parallel_size,
                "expert_parallel": parallel.enable_expert_parallel,
            },
            "threads": self.threads,
            "limits": limits_data(self.limits),
            "prefix_caching": config.cache.enable_prefix_caching and bool(rank.groups),
            "kv_compression": config.cache.compression is not None,
            "drafter": _drafter_data(config.scheduler.speculation),
            "adapters": config.lora.max_loras if config.lora.enable_lora else 0,
            "tiers": _tiers(config),
            "rank": rank.as_data(),
            "adjusted": [asdict(adjustment) for adjustment in (*self.adjustments, *adjustments_of_rank(config, rank))],
        }


def limits_data(limits: SchedulerLimits) -> dict[str, Any]:
    """Return the limits in JSON types, by name."""
    data = {field.name: getattr(limits, field.name) for field in fields(limits) if field.name != "pace"}
    return {**data, "max_itl": None if limits.pace is None else round(limits.pace.seconds * 1000)}


def _drafter_data(options: SpeculativeOptions | None) -> dict[str, Any] | None:
    if options is None:
        return None
    return {
        "method": options.method,
        "model": options.model,
        "num_speculative_tokens": options.num_speculative_tokens,
        "on_device": options.on_device,
        "adaptive": options.adaptive,
    }


def _tiers(config: EngineConfig) -> list[dict[str, Any]]:
    """Return the tiers that can hold blocks in addition to the pool, in lookup order."""
    options = config.cache
    tiers: list[dict[str, Any]] = []
    if options.kv_offloading_bytes:
        tiers.append({"kind": "memory", "bytes": options.kv_offloading_bytes})
    if options.kv_offloading_path is not None:
        tiers.append({"kind": "disk", "path": options.kv_offloading_path, "bytes": options.kv_offloading_disk_size})
    if options.transfer is not None:
        transfer = options.transfer
        tiers.append({"kind": "engines", "role": transfer.kv_role, "connector": transfer.kv_connector_module_path})
    return tiers
