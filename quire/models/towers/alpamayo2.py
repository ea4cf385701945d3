"""The encoder of Alpamayo 2 Super, which is Qwen3-VL's. Tokens of trajectories are never generated."""

from pathlib import Path

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.layers.build import Builder
from quire.messages.step import NewRequest
from quire.models.towers import qwen_vl
from quire.models.towers.qwen_vl import Tower
from quire.multimodal.spec import MediaSpec
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces


class NoTrajectories(LogitsProcessor):
    """Forbids a range of tokens, which only prompts contain."""

    def __init__(self, config: EngineConfig, device: torch.device, tokens: slice) -> None:
        super().__init__(config, device)
        self.tokens = tokens

    def add(self, row: int, request: NewRequest) -> bool:
        return True

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        logits[:, self.tokens].index_fill_(0, self.upload(at.index), float("-inf"))


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return qwen_vl.make(builder, spec)


def output_rules(directory: Path, spec: MediaSpec, config: EngineConfig, device: torch.device) -> NoTrajectories:
    trajectories = spec.config["trajectories"]
    first = min(trajectories["ids"].values(), default=0)
    count = trajectories["count"] if trajectories["ids"] else 0
    return NoTrajectories(config, device, slice(first, first + count))
