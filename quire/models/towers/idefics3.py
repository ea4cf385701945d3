"""The encoder of Idefics3 and SmolVLM: SigLIP, whose patches are joined in squares before they are projected."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import LayerNorm, Linear
from quire.models.towers.vit import VisionTransformer
from quire.multimodal.spec import MediaSpec


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        vision = {"image_size": 224, "patch_size": 32, **spec.config["vision_config"], "model_type": "idefics3_vision"}
        self.vision = VisionTransformer(builder, "vision_model", vision, [-1])
        width = self.vision.hidden_size
        self.factor = spec.config.get("scale_factor", 2)
        self.norm = LayerNorm(builder, "vision_model.post_layernorm", width, vision.get("layer_norm_eps", 1e-6))
        hidden = spec.config["text_config"]["hidden_size"]
        name = "connector.modality_projection.proj"
        self.projection = Linear(builder, name, width * self.factor**2, hidden, bias=False)
        self.side = vision["image_size"] // self.vision.patch

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        pixels = tensors["pixel_values"]
        factor = self.factor
        side = pixels.shape[-1] // self.vision.patch
        x = self.norm(self.vision(pixels, self._places(side))[0])
        squares = x.view(len(x), side // factor, factor, side // factor, factor, -1).transpose(2, 3)
        return self.projection(squares.reshape(-1, factor**2 * x.shape[-1]))

    def _places(self, side: int) -> Tensor:
        """Return the learned positions of the patches of a tile. Fractions are rounded as in training, so a few patches
        have the same position as a neighbour."""
        borders = torch.arange(1 / self.side, 1.0, 1 / self.side)
        fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
        index = torch.bucketize(fractions, borders, right=True)
        places: Tensor = (index[:, None] * self.side + index).flatten()
        return places.to(self.projection.weight.device)


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
