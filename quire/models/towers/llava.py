"""The encoder of LLaVA-1.5: a layer of CLIP or SigLIP, and a projector of two layers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import ACTIVATIONS, LayerNorm, Linear
from quire.models.towers.vit import VisionTransformer
from quire.multimodal.spec import MediaSpec


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        config = spec.config
        read = config.get("vision_feature_layer", -2)
        self.vision = VisionTransformer(
            builder, "vision_tower", config["vision_config"], [read] if isinstance(read, int) else read
        )
        self.keeps_class = config.get("vision_feature_select_strategy", "default") != "default"
        self.activation = ACTIVATIONS[config.get("projector_hidden_act", "gelu")]
        width = self.vision.hidden_size * len(self.vision.read)
        hidden = config["text_config"]["hidden_size"]
        bias = config.get("multimodal_projector_bias", True)
        inner = config.get("projector_hidden_size", hidden)
        self.linear_1 = Linear(builder, "multi_modal_projector.linear_1", width, inner, bias)
        self.linear_2 = Linear(builder, "multi_modal_projector.linear_2", inner, hidden, bias)
        self.norm = None
        if (eps := config.get("projector_norm_eps")) is not None:
            self.norm = LayerNorm(builder, "multi_modal_projector.pre_norm", width, eps)

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.project(tensors["pixel_values"][None])[0]

    def project(self, pixels: Tensor) -> Tensor:
        """[pictures, 3, side, side] -> [pictures, embeddings, hidden]"""
        x = torch.cat(self.vision(pixels), -1)
        if not self.keeps_class:
            x = x[:, 1:]  # also for SigLIP, whose first token is a patch, as in transformers
        if self.norm is not None:
            x = self.norm(x)
        return self.linear_2(self.activation(self.linear_1(x)))


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
