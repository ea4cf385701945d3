"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL, Qwen3-VL and Qwen3.5: images approximately keep their size and aspect ratio.

An image is a grid of patches, of which 2 x 2 become one embedding. A token has three rotary positions: time, row and
column in its image. The positions of text after an image continue after the largest of them. Since Qwen3-VL, a video is
a text in which each pair of frames is preceded by its time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Frames, Kind, Placed, Prepared
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, HALF, Array, normalized

MOST_STRETCHED = 200  # the maximum aspect ratio of an image that the models support


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        vision = config["vision_config"]
        self.settings = settings
        kind = config.get("model_type", "qwen2_vl")
        is_third = kind.startswith("qwen3")
        first = 248_053 if kind.startswith("qwen3_5") else 151_652  # start, end, an unused token, image, video
        image_id = config.get("image_token_id", first + 3)
        video_id = config.get("video_token_id", first + 4)
        self.texts = {"image": token(image_id), "video": "" if video_id is None else token(video_id)}
        self.kinds = {"image": Kind(self.texts["image"], image_id)}
        self.around = ("", "")  # the text around the embeddings of a pair of frames, if there are times between pairs
        if is_third:
            start = config.get("vision_start_token_id", first)
            end = config.get("vision_end_token_id", first + 1)
            self.around = (token(start), token(end))
        if video_id is not None:
            self.kinds["video"] = Kind(self.texts["video"].join(self.around), video_id)
        self.has_axes = config.get("has_axes", True)
        # The encoder is built with these, regardless of the processor's settings.
        self.patch = vision.get("patch_size", 16 if is_third else 14)
        self.merge, self.frames = vision.get("spatial_merge_size", 2), vision.get("temporal_patch_size", 2)
        self.mean, self.std = (HALF, HALF) if is_third else (CLIP_MEAN, CLIP_STD)
        self.steps_per_second = vision.get("tokens_per_second", 2) if kind == "qwen2_5_vl" else None
        self.limits = limits(settings, (65_536, 16_777_216) if is_third else (56 * 56, 28 * 28 * 1280))
        names = ("min_pixels", "max_pixels", "size.shortest_edge", "size.longest_edge")
        self.adjustable = dict.fromkeys(names, self.limits[1])
        of_videos = settings.get("videos") or {}
        self.limits_of_videos = limits(of_videos, (128 * 32 * 32, 768 * 32 * 32) if is_third else self.limits)

    def image(self, image: Image.Image) -> Prepared:
        patches, rows, columns = self._patches(image, self._size(*image.size, self.limits))
        return self._prepared("image", patches[:, :, None], (1, rows, columns))

    def video(self, frames: Frames) -> Prepared:
        """Frames are taken in pairs; the last one is repeated if it has no partner."""
        images = [*frames.images, *[frames.images[-1]] * (-len(frames.images) % self.frames)]
        timed = bool(self.around[0])
        count = len(frames.images)
        size = self._size(*images[0].size, self.limits_of_videos, count if timed else 1)
        cut = [self._patches(image.resize(images[0].size), size) for image in images]
        _, rows, columns = cut[0]
        patches = np.stack([part for part, _, _ in cut]).reshape(-1, self.frames, *cut[0][0].shape)
        patches = patches.transpose(0, 2, 3, 1, 4, 5)  # [pairs, patches, 3, frames, patch, patch]
        grid = (len(images) // self.frames, rows, columns)
        made = self._prepared("video", patches.reshape(-1, *patches.shape[2:]), grid, self.frames / frames.fps)
        if not timed:
            return made
        embeds = (self.texts["video"] * (made.num_embeds // grid[0])).join(self.around)
        shown = [(pair * self.frames, min((pair + 1) * self.frames, count) - 1) for pair in range(grid[0])]
        times = [(first + last) / 2 / frames.fps for first, last in shown]
        return replace(made, text="".join(f"<{time:.1f} seconds>{embeds}" for time in times))

    def _prepared(self, modality: str, patches: Array, grid: tuple[int, int, int], seconds: float = 1.0) -> Prepared:
        time, rows, columns = grid
        merged = time, rows // self.merge, columns // self.merge
        count = math.prod(merged)
        tensors = {"pixels": np.ascontiguousarray(patches), "grid": np.array(grid, np.int64)}
        return Prepared(tensors, self.texts[modality] * count, count, merged, seconds)

    def _patches(self, image: Image.Image, size: tuple[int, int]) -> tuple[Array, int, int]:
        """Return the patches [patches, 3, patch, patch], with those of one embedding next to each other; rows and
        columns. size: to which the image is resized."""
        patch = self.patch
        merge = self.merge
        if self.settings.get("do_resize", True):
            image = image.resize(size, Image.Resampling(self.settings.get("resample", BICUBIC)))
        values = normalized(np.asarray(image), self.settings, self.mean, self.std)
        _, height, width = values.shape
        if height % (patch * merge) or width % (patch * merge):
            raise MediaError(f"without do_resize, the edges must be multiples of {patch * merge}")
        rows = height // patch
        columns = width // patch
        cut = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch), rows, columns

    def _size(self, width: int, height: int, limits: tuple[int, int], frames: int = 1) -> tuple[int, int]:
        """Return the nearest size whose edges are whole numbers of embeddings, with a number of pixels within the
        limits: of an image, or of all frames of a video."""
        factor, (least, most) = self.patch * self.merge, limits
        if max(height, width) > MOST_STRETCHED * min(height, width):
            raise MediaError(f"the longer edge of the picture is more than {MOST_STRETCHED} times the other")
        if frames > 1 and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height = int(height * scale)
            width = int(width * scale)
        h = round(height / factor) * factor
        w = round(width / factor) * factor
        time = round(frames / self.frames) * self.frames if frames > 1 else 1
        if time * h * w > most:
            shrink = math.sqrt(frames * height * width / most)
            h = max(factor, math.floor(height / shrink / factor) * factor)
            w = max(factor, math.floor(width / shrink / factor) * factor)
        elif time * h * w < least:
            grow = math.sqrt(least / (frames * height * width))
            h = math.ceil(height * grow / factor) * factor
            w = math.ceil(width * grow / factor) * factor
        return w, h

    def rotary_positions(self, token_ids: list[int], placed: Sequence[Placed]) -> Array | None:
        if not placed or not self.has_axes:
            return None
        parts = list[Array]()
        position = 0
        token = 0
        for start, (time, rows, columns), seconds in self._grids(placed):
            text = np.arange(start - token) + position
            position += start - token
            interval = self.steps_per_second * seconds if self.steps_per_second and time > 1 else 1.0
            t, r, c = np.indices((time, rows, columns)).reshape(3, -1)
            parts += [np.stack([text] * 3), np.stack([(t * interval).astype(np.int64), r, c]) + position]
            position = int(parts[-1].max()) + 1
            token = start + time * rows * columns
        parts.append(np.stack([np.arange(len(token_ids) - token) + position] * 3))
        return np.concatenate(parts, 1)

    def _grids(self, placed: Sequence[Placed]) -> Iterator[tuple[int, tuple[int, int, int], float]]:
        """Yield the first position of each run of embeddings, its grid, and the seconds between the grid's time
        steps."""
        for found in placed:
            time, rows, columns = found.item.grid
            steps = 1 if self.around[0] else time  # there is text between the pairs of frames
            for start in found.positions[:: steps * rows * columns]:
                yield start, (steps, rows, columns), found.item.seconds


def limits(settings: Config, default: tuple[int, int]) -> tuple[int, int]:
    """Return the minimum and the maximum number of pixels."""
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or default[0]
    return least, settings.get("max_pixels") or size.get("longest_edge") or default[1]
