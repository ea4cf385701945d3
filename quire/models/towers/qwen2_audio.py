"""The encoder of Qwen2-Audio (arXiv:2407.10759): Whisper's, whose results are averaged in pairs, and a projector."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import Linear
from quire.models.towers.whisper import Encoder
from quire.multimodal.spec import MediaSpec


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        audio = spec.config["audio_config"]
        text = spec.config["text_config"]
        self.encoder = Encoder(builder, audio, "audio_tower")
        self.linear = Linear(builder, "multi_modal_projector.linear", audio["d_model"], text["hidden_size"])

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """mel: [bins, frames], padded with silence; frames: [1], the number of frames without padding."""
        [frames] = tensors["frames"].tolist()
        x = self.encoder.states(tensors["mel"], (frames - 1) // 2 + 1)
        x = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        return self.linear(self.encoder.norm(x))[0]


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
