"""Whisper's encoder (arXiv:2212.04356), and the rules of its decoder's output."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.layers.build import Builder
from quire.messages.step import NewRequest
from quire.models.towers.layers import ACTIVATIONS, LayerNorm, Linear, attend
from quire.multimodal.families.base import Config
from quire.multimodal.spec import MediaSpec
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces

_NEVER = float("-inf")


class Layer:
    def __init__(
        self, builder: Builder, name: str, config: Config, takes_adapters: bool, key_bias: bool = False
    ) -> None:
        hidden = config["d_model"]
        inner = config["encoder_ffn_dim"]
        self.heads = config["encoder_attention_heads"]
        self.activation = ACTIVATIONS[config.get("activation_function", "gelu")]
        self.norm1 = LayerNorm(builder, f"{name}.self_attn_layer_norm", hidden, 1e-5)
        self.q, self.k, self.v, self.out = (
            Linear(
                builder,
                f"{name}.self_attn.{part}",
                hidden,
                hidden,
                bias=part != "k_proj" or key_bias,
                takes_adapters=takes_adapters,
            )
            for part in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        self.norm2 = LayerNorm(builder, f"{name}.final_layer_norm", hidden, 1e-5)
        self.fc1 = Linear(builder, f"{name}.fc1", hidden, inner, takes_adapters=takes_adapters)
        self.fc2 = Linear(builder, f"{name}.fc2", inner, hidden, takes_adapters=takes_adapters)

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        attended = attend(self.q(normed, slots), self.k(normed, slots), self.v(normed, slots), self.heads)
        x = x + self.out(attended, slots)
        return x + self.fc2(self.activation(self.fc1(self.norm2(x), slots)), slots)


class Encoder:
    def __init__(
        self, builder: Builder, config: Config, name: str = "model.encoder", takes_adapters: bool = False
    ) -> None:
        hidden = config["d_model"]
        bins = config["num_mel_bins"]
        self.convolutions = [
            (builder.whole(f"{name}.{conv}.weight", hidden, width, 3), builder.whole(f"{name}.{conv}.bias", hidden))
            for conv, width in (("conv1", bins), ("conv2", hidden))
        ]
        self.positions = builder.whole(f"{name}.embed_positions.weight", config["max_source_positions"], hidden)
        self.layers = [
            Layer(builder, f"{name}.layers.{i}", config, takes_adapters) for i in range(config["encoder_layers"])
        ]
        self.norm = LayerNorm(builder, f"{name}.layer_norm", hidden, 1e-5)

    def states(self, mel: Tensor, length: int | None = None, slots: Tensor | None = None) -> Tensor:
        """mel: [bins, frames] -> the results of the last layer before its norm: [1, frames / 2, hidden], or only the
        first `length` frames, which then attend only to each other. slots: see Tower."""
        x = mel.to(self.positions.dtype)[None]
        for stride, (weight, bias) in enumerate(self.convolutions, 1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        x = (x.transpose(1, 2) + self.positions)[:, :length]
        for layer in self.layers:
            x = layer(x, slots)
        return x

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """mel: [bins, frames] -> [frames / 2, hidden]"""
        return self.norm(self.states(tensors["mel"], slots=tensors.get("slots")))[0]


class OutputRules(LogitsProcessor):
    """The decoding rules from the publication of Whisper (section 4.5 of the paper). They apply to prompts that end
    where a transcript begins: with a task or <|notimestamps|>. Tokens in suppress_tokens of generation_config.json are
    forbidden, and those in begin_suppress_tokens are forbidden as the first token. Without <|notimestamps|>, each piece
    of text is surrounded by a pair of timestamps, which never decrease. If all timestamps together are likelier than
    any text token, a timestamp follows.
    """

    def __init__(self, config: EngineConfig, device: torch.device, settings: Mapping[str, Any], eos: int) -> None:
        """settings: of generation_config.json. eos: the token that ends a transcript."""
        super().__init__(config, device)
        self.no_timestamps = int(settings.get("no_timestamps_token_id") or -1)
        self.first, self.eos = self.no_timestamps + 1, eos  # the first timestamp, <|0.00|>
        self.latest_begin = settings.get("max_initial_timestamp_index")
        self.tasks = {*(settings.get("task_to_id") or {}).values()}
        if not settings.get("is_multilingual", True):  # an English-only model, whose prompts have no task
            self.tasks = {settings.get("decoder_start_token_id", -1)}
        self.never = torch.tensor(settings.get("suppress_tokens") or [], dtype=torch.int64, device=device)
        self.never_first = torch.tensor(settings.get("begin_suppress_tokens") or [], dtype=torch.int64, device=device)
        self._never = torch.full((), _NEVER, device=device)  # a Python number would be copied to a GPU each time
        self._with_times = np.zeros(config.scheduler.max_num_seqs, bool)

    def add(self, row: int, request: NewRequest) -> bool:
        last = request.token_ids[request.num_prompt_tokens - 1]
        self._with_times[row] = last in self.tasks
        return last in self.tasks or last == self.no_timestamps

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        index = self.upload(at.index)
        begins = self.upload(at.index[at.num_output == 0])
        logits.index_put_((index[:, None], self.never), self._never)
        logits.index_put_((begins[:, None], self.never_first), self._never)
        for place in self._with_times[at.rows].nonzero()[0].tolist():
            self._keep_times(logits[at.index[place]], at.token_ids(place)[1])

    def _keep_times(self, logits: Tensor, output: list[int]) -> None:
        """logits: [vocab], changed in place. output: the tokens generated so far."""
        first = self.first
        times = [token for token in output if token >= self.first]
        logits[self.no_timestamps] = _NEVER
        if not output:
            logits[:first] = _NEVER
            if self.latest_begin is not None:
                logits[first + self.latest_begin + 1 :] = _NEVER
        elif output[-1] >= first:
            if len(output) == 1 or output[-2] >= first:  # a piece begins
                logits[first:] = _NEVER
            else:  # a piece has ended; the next one may begin at the same time
                logits[: self.eos] = _NEVER
                logits[first : times[-1]] = _NEVER
        elif times:
            logits[first : times[-1] + 1] = _NEVER
        logits[:first].masked_fill_(logits[first:].logsumexp(0) > logits[:first].max(), _NEVER)


def make(builder: Builder, spec: MediaSpec) -> Encoder:
    return Encoder(builder, spec.config, takes_adapters=True)


def output_rules(directory: Path, spec: MediaSpec, config: EngineConfig, device: torch.device) -> OutputRules:
    """Return the rules of the checkpoint in this folder."""
    file = directory / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    given = {**spec.config, **settings}
    eos = given.get("eos_token_id", 50_257)
    return OutputRules(config, device, given, eos[0] if isinstance(eos, list) else eos)
