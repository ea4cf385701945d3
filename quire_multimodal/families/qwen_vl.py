"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL and Qwen3-VL: pictures keep about their size and their proportions.

A picture is a grid of patches, of which 2 x 2 become one embedding. A token has three rotary positions: time, row and
column in its picture. Text after a picture goes on behind the largest of them.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from quire_multimodal.families.base import Config, Family, Frames, Kind, Placed, Prepared
from quire_multimodal.pictures import MediaError
from quire_multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, Array, normalized

MOST_STRETCHED = 200  # the proportion of the edges of a picture, above which the models cannot see it


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        vision, self.settings = config["vision_config"], settings
        kind = config.get("model_type", "qwen2_vl")
        is_third = kind.startswith("qwen3")
        image_id, video_id = config.get("image_token_id", 151_655), config.get("video_token_id", 151_656)
        self.texts = {"image": token(image_id), "video": token(video_id)}
        self.kinds = {"image": Kind(self.texts["image"], image_id)}
        if not is_third:  # which writes times between the frames of a video
            self.kinds["video"] = Kind(self.texts["video"], video_id)
        self.patch = settings.get("patch_size") or vision.get("patch_size", 16 if is_third else 14)
        self.merge = settings.get("merge_size") or vision.get("spatial_merge_size", 2)
        self.frames = settings.get("temporal_patch_size") or vision.get("temporal_patch_size", 2)
        self.mean, self.std = (HALF, HALF) if is_third else (CLIP_MEAN, CLIP_STD)
        self.steps_per_second = vision.get("tokens_per_second", 2) if kind == "qwen2_5_vl" else None
        size = settings.get("size") or {}
        least, most = (65_536, 16_777_216) if is_third else (56 * 56, 28 * 28 * 1280)
        self.least = settings.get("min_pixels") or size.get("shortest_edge") or least
        self.most = settings.get("max_pixels") or size.get("longest_edge") or most

    def image(self, image: Image.Image) -> Prepared:
        patches, rows, columns = self._patches(image)
        return self._prepared("image", patches[:, :, None], (1, rows, columns))

    def video(self, frames: Frames) -> Prepared:
        """Frames are taken in pairs; the last one is repeated if it has no partner."""
        images = [*frames.images, *[frames.images[-1]] * (-len(frames.images) % self.frames)]
        cut = [self._patches(image.resize(images[0].size)) for image in images]
        _, rows, columns = cut[0]
        patches = np.stack([part for part, _, _ in cut]).reshape(-1, self.frames, *cut[0][0].shape)
        patches = patches.transpose(0, 2, 3, 1, 4, 5)  # [pairs, patches, 3, frames, patch, patch]
        grid = (len(images) // self.frames, rows, columns)
        return self._prepared("video", patches.reshape(-1, *patches.shape[2:]), grid, self.frames / frames.fps)

    def _prepared(self, modality: str, patches: Array, grid: tuple[int, int, int], seconds: float = 1.0) -> Prepared:
        time, rows, columns = grid
        merged = time, rows // self.merge, columns // self.merge
        count = math.prod(merged)
        tensors = {"pixels": np.ascontiguousarray(patches), "grid": np.array(grid, np.int64)}
        return Prepared(tensors, self.texts[modality] * count, count, merged, seconds)

    def _patches(self, image: Image.Image) -> tuple[Array, int, int]:
        """[patches, 3, patch, patch], those that become one embedding next to each other; rows and columns."""
        patch, merge = self.patch, self.merge
        width, height = self._size(*image.size)
        if self.settings.get("do_resize", True):
            image = image.resize((width, height), Image.Resampling(self.settings.get("resample", BICUBIC)))
        values = normalized(np.asarray(image), self.settings, self.mean, self.std)
        _, height, width = values.shape
        if height % (patch * merge) or width % (patch * merge):
            raise MediaError(f"without do_resize, the edges must be multiples of {patch * merge}")
        rows, columns = height // patch, width // patch
        cut = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch), rows, columns

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """The nearest size whose edges are whole numbers of embeddings, with a number of pixels within the limits."""
        factor = self.patch * self.merge
        if max(height, width) > MOST_STRETCHED * min(height, width):
            raise MediaError(f"the longer edge of the picture is more than {MOST_STRETCHED} times the other")
        h, w = round(height / factor) * factor, round(width / factor) * factor
        if h * w > self.most:
            shrink = math.sqrt(height * width / self.most)
            h = max(factor, math.floor(height / shrink / factor) * factor)
            w = max(factor, math.floor(width / shrink / factor) * factor)
        elif h * w < self.least:
            grow = math.sqrt(self.least / (height * width))
            h, w = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return w, h

    def rotary_positions(self, token_ids: list[int], placed: Sequence[Placed]) -> Array | None:
        if not placed:
            return None
        parts, position, token = list[Array](), 0, 0
        for found in placed:
            (time, rows, columns), start = found.item.grid, found.positions[0]
            text = np.arange(start - token) + position
            position += start - token
            video = self.steps_per_second is not None and time > 1
            interval = (self.steps_per_second or 1) * found.item.seconds if video else 1.0
            t, r, c = np.indices((time, rows, columns)).reshape(3, -1)
            parts += [np.stack([text] * 3), np.stack([(t * interval).astype(np.int64), r, c]) + position]
            position = int(parts[-1].max()) + 1
            token = start + time * rows * columns
        parts.append(np.stack([np.arange(len(token_ids) - token) + position] * 3))
        return np.concatenate(parts, 1)
