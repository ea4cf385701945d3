"""Creates the drafter chosen by the options."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor

from quire.attention.base import CacheBackend
from quire.checkpoints.metadata import hf_config
from quire.config.conflicts import check
from quire.config.engine import ConfigError, EngineConfig
from quire.config.features import ModelFacts, Setup
from quire.config.speculative import SpeculativeOptions
from quire.kv.specs import StateShape
from quire.layers.attention_spec import CacheShape
from quire.messages.errors import error_text
from quire.models.heads.head import ChainHead, StateHead
from quire.models.heads.load import load_draft_model, load_head
from quire.models.model import Model, Shape
from quire.parallel.mesh import Communicator
from quire.sampling.sampler import Sampler
from quire.worker.device import Device
from quire.worker.drafters.drafter import Cached, Drafter
from quire.worker.drafters.heads import ChainDrafter, HeadLayers, StateDrafter
from quire.worker.drafters.model import ModelDrafter
from quire.worker.drafters.replay import NewestTokenAgain, ReplayedCounts
from quire.worker.forward import Forward
from quire.worker.graphs import RecordedForward
from quire.worker.input_batch import InputBatch
from quire.worker.plan import ForwardKind, RankPlan
from quire.worker.staging import Staging


def _facts(cached: Cached | None) -> ModelFacts:
    """Return the facts that determine which features a drafter's cache can be combined with."""
    shapes = [] if cached is None else [shape for shape in cached.cache_shapes if isinstance(shape, CacheShape)]
    return ModelFacts(
        sparse=any(shape.indexer is not None for shape in shapes),
        chunks=any(shape.chunk is not None for shape in shapes),
        alibi=any(shape.holds_positions for shape in shapes),
    )


class DrafterParts:
    """The model or head that makes drafts, and the attention backends of its own cache."""

    def __init__(
        self,
        options: SpeculativeOptions,
        config: EngineConfig,
        directory: Path,
        target: Model,
        max_model_len: int,
        group: Communicator,
        backends_of: Callable[[Sequence[Shape]], list[CacheBackend]],
    ) -> None:
        self.options = options
        self.target = target
        self.part: Cached | StateHead
        if options.method == "draft_model":
            device = target.kernels.target.device
            self.part = model = load_draft_model(options, config, max_model_len, device, group)
            if model.vocab_size > target.vocab_size:
                raise ConfigError(
                    f"speculative_config: the draft model has {model.vocab_size} tokens, but the model "
                    f"has only {target.vocab_size}: both must have the same vocabulary"
                )
        elif options.method == "replay":
            self.part = NewestTokenAgain()
        else:
            self.part = load_head(options, config, directory, target, max_model_len, group)
        if isinstance(self.part, StateHead) and options.num_speculative_tokens > self.part.most:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is {options.num_speculative_tokens}, but "
                f"the checkpoint of {options.method} makes {self.part.most} drafts at most"
            )
        self.cached: Cached | None = None if isinstance(self.part, StateHead) else self.part
        if self.cached is not None and any(isinstance(shape, StateShape) for shape in self.cached.cache_shapes):
            raise ConfigError(
                "speculative_config: a draft model with recurrent layers could not take its drafts back; "
                "choose one with attention alone"
            )
        try:
            check(Setup(config, model=_facts(self.cached)))
            self.backends: Sequence[CacheBackend] = [] if self.cached is None else backends_of(self.cached.cache_shapes)
        except ConfigError as error:
            raise ConfigError(f"speculative_config: the drafter cannot be used; {error_text(error)}") from None

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of a block for the drafter's entries of all its KV groups."""
        if self.cached is None:
            return 0
        groups = zip(self.cached.kv_specs, self.backends, strict=True)
        return sum(kv_spec.page_bytes(backend.entry_bytes) for kv_spec, backend in groups)

    @property
    def entry_sizes(self) -> set[int]:
        """Return the different numbers of bytes of the drafter's entries."""
        if self.cached is None:
            return set()
        groups = zip(self.cached.kv_specs, self.backends, strict=True)
        return {size for kv_spec, backend in groups for size in kv_spec.entry_sizes(backend.entry_bytes)}

    def bind_cache(self, blocks: Tensor, offset: int) -> None:
        """Let the drafter use the bytes of each block from `offset` on. blocks: uint8, see KVMemory."""
        if self.cached is None:
            return
        memory = []
        for kv_spec, backend in zip(self.cached.kv_specs, self.backends, strict=True):
            first = offset if blocks.dim() == 2 else offset // blocks.shape[2]
            memory.append(blocks[:, first:])
            offset += kv_spec.page_bytes(backend.entry_bytes)
        self.cached.bind_cache(self.backends, memory)

    def count_kept(self, device: Device, batch: InputBatch) -> Callable[..., Tensor] | None:
        """Return the replacement of the op count_kept if the options set the acceptance of drafts, otherwise None."""
        return ReplayedCounts(self.options, device, batch) if self.options.acceptance_rates else None

    def drafter(self, staging: Staging, sampler: Sampler, plan: RankPlan) -> Drafter:
        """Create the drafter from its parts. Raises ConfigError for a draft model that cannot draft in parallel."""
        if self.cached is None:
            return StateDrafter(cast(StateHead, self.part), staging, sampler)
        kind = RecordedForward if plan.drafter_forward is ForwardKind.RECORDED else Forward
        if self.options.method == "draft_model":
            model = cast(Model, self.part)
            mask = None
            if self.options.parallel_drafting:
                mask = hf_config(Path(str(self.options.model)), {}).get("pard_token")
                if mask is None:
                    message = "speculative_config: parallel_drafting needs pard_token in the draft model's config"
                    raise ConfigError(message)
            return ModelDrafter(model, kind(model, self.backends), staging, sampler, plan.most_tokens, mask)
        head = cast(ChainHead, self.part)
        layers = cast(Model, HeadLayers(head))
        return ChainDrafter(
            head,
            kind(layers, self.backends),
            Forward(layers, self.backends),
            staging,
            sampler,
            plan.most_tokens,
            self.target.hidden_size,
            self.target.kernels.target.dtype,
        )
