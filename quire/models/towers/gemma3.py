"""The encoder of Gemma 3: SigLIP, whose patches are pooled before they are projected."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import LayerNorm, RMSNorm
from quire.models.towers.vit import VisionTransformer
from quire.multimodal.spec import MediaSpec


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        config = spec.config
        vision = {"model_type": "siglip_vision_model", **config["vision_config"]}
        self.vision = VisionTransformer(builder, "vision_tower", vision, [-1])
        eps = vision.get("layer_norm_eps", 1e-6)
        width = self.vision.hidden_size
        hidden = config["text_config"].get("hidden_size", 2304)
        self.post_norm = LayerNorm(builder, "vision_tower.post_layernorm", width, eps)
        self.norm = RMSNorm(builder, "multi_modal_projector.mm_soft_emb_norm", width, eps, offset=1.0)
        self.projection = builder.whole("multi_modal_projector.mm_input_projection_weight", width, hidden)
        self.side = vision.get("image_size", 896) // self.vision.patch
        self.pool = self.side // int(config.get("mm_tokens_per_image", 256) ** 0.5)

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        x = self.post_norm(self.vision(tensors["pixel_values"][None])[0])
        pooled = F.avg_pool2d(x.transpose(1, 2).reshape(len(x), -1, self.side, self.side), self.pool)
        return self.norm(pooled.flatten(2).transpose(1, 2)[0]) @ self.projection


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
