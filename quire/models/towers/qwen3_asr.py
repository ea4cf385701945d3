"""The encoder of Qwen3-ASR (arXiv:2601.21337): chunks of a spectrum are convolved, and attend within windows of a few
chunks."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import LayerNorm, Linear
from quire.models.towers.qwen_vl import TwoLayers
from quire.models.towers.whisper import Layer
from quire.multimodal.families.qwen3_asr import halved
from quire.multimodal.spec import MediaSpec

EPS = 1e-5
CONVOLVED = 32  # chunks at a time


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        audio = spec.config["audio_config"]
        hidden = audio["d_model"]
        width = audio.get("downsample_hidden_size", 480)
        bins = audio.get("num_mel_bins", 128)
        self.convolutions = [
            (builder.whole(f"audio_tower.conv2d{i}.weight", width, inputs, 3, 3),
             builder.whole(f"audio_tower.conv2d{i}.bias", width))
            for i, inputs in ((1, 1), (2, width), (3, width))
        ]  # fmt: skip
        self.out = Linear(builder, "audio_tower.conv_out", width * halved(bins), hidden, bias=False)
        self.layers = [
            Layer(builder, f"audio_tower.layers.{i}", audio, takes_adapters=False, key_bias=True)
            for i in range(audio["encoder_layers"])
        ]
        self.norm = LayerNorm(builder, "audio_tower.ln_post", hidden, EPS)
        sizes = (hidden, hidden, audio.get("output_dim", 3584))
        self.projector = TwoLayers(builder, spec.config["projector"], sizes, audio.get("activation_function", "gelu"))
        self.chunk = 2 * audio.get("n_window", 50)
        self.window = audio.get("n_window_infer", 800) // self.chunk * halved(self.chunk)
        self.half = hidden // 2

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """mel: [bins, frames] -> [embeddings, hidden]"""
        mel = tensors["mel"]
        length = mel.shape[1]
        chunks = F.pad(mel, (0, -length % self.chunk)).view(len(mel), -1, self.chunk).transpose(0, 1)
        x = torch.cat([self._convolved(some) for some in torch.split(chunks, CONVOLVED)])  # [chunks, results, hidden]
        x = x + _waves(x.shape[1], self.half, x)
        x = x.flatten(0, 1)[: length // self.chunk * x.shape[1] + halved(length % self.chunk)]
        full = len(x) // self.window * self.window
        windows = [x[:full].view(-1, self.window, x.shape[1]), x[None, full:]]
        states = [self._attended(window).flatten(0, 1) for window in windows if window.numel()]
        return self.projector(self.norm(torch.cat(states)))

    def _convolved(self, chunks: Tensor) -> Tensor:
        """[chunks, bins, frames] -> [chunks, frames / 8, hidden]"""
        x = chunks[:, None].to(self.out.weight.dtype)
        for weight, bias in self.convolutions:
            x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
        return self.out(x.permute(0, 3, 1, 2).flatten(2))

    def _attended(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, None)
        return x


def _waves(length: int, half: int, like: Tensor) -> Tensor:
    """Return the sines and cosines of positions, [length, 2 * half]."""
    steps = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half, device=like.device).float())
    angles = torch.arange(length, device=like.device)[:, None] * steps
    return torch.cat((angles.sin(), angles.cos()), 1).to(like.dtype)


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
