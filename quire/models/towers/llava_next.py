"""The encoder of LLaVA-NeXT and LLaVA-OneVision: the encoder of LLaVA-1.5, applied to each tile."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers import llava
from quire.multimodal.families.llava_next import SIZES, best_size, kept, most_tiles, tile_sizes
from quire.multimodal.spec import MediaSpec


class Tower(llava.Tower):
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        super().__init__(builder, spec)
        self.newline = builder.whole("image_newline", spec.config["text_config"]["hidden_size"])
        self.side, self.per_edge = tile_sizes(spec.config)
        self.sizes = spec.config.get("image_grid_pinpoints") or SIZES
        self.most_tiles = most_tiles(spec.config)

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        x = self.project(tensors["pixel_values"])
        if modality == "video":
            half = math.ceil(self.per_edge / 2)
            frames = x.view(len(x), self.per_edge, self.per_edge, -1).permute(0, 3, 1, 2)
            frames = F.interpolate(frames, size=(half, half), mode="bilinear")
            return torch.cat([frames.permute(0, 2, 3, 1).flatten(0, 2), self.newline[None]])
        height, width = tensors["size"].tolist()
        high, wide = (edge // self.side for edge in best_size(height, width, self.sizes))
        tiles = x[1:].view(high, wide, self.per_edge, self.per_edge, -1)
        whole = tiles.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)  # [hidden, rows, columns]
        _, rows, columns = whole.shape
        found, (top, left) = kept(rows, columns, height, width, self.per_edge, self.most_tiles)
        whole = whole[:, top : rows - top, left : columns - left]
        if whole.shape[1:] != found:
            whole = F.interpolate(whole[None], list(found), mode="bilinear")[0]
        ends = self.newline[:, None, None].expand(-1, whole.shape[1], 1)
        return torch.cat([x[0], torch.cat([whole, ends], -1).flatten(1).T])


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
