"""The encoder of PaliGemma: SigLIP and a projection."""

from collections.abc import Mapping

from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import LayerNorm, Linear
from quire.models.towers.vit import VisionTransformer
from quire.multimodal.spec import MediaSpec


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        vision = {"patch_size": 14, **spec.config["vision_config"], "model_type": "siglip_vision_model"}
        self.vision = VisionTransformer(builder, "vision_tower", vision, [-1])
        width = self.vision.hidden_size
        self.norm = LayerNorm(builder, "vision_tower.post_layernorm", width, vision.get("layer_norm_eps", 1e-6))
        hidden = spec.config["text_config"]["hidden_size"]
        self.projection = Linear(builder, "multi_modal_projector.linear", width, hidden)

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.projection(self.norm(self.vision(tensors["pixel_values"][None])[0]))[0]


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
