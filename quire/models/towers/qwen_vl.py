"""The encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: vision transformers for images of any size.

Patches have rotary positions in two dimensions. In Qwen2.5-VL, most layers attend within windows. Since Qwen3-VL,
patches also have learned positions. In Qwen3-VL, some layers have features that are added to the first layers of the
language model (DeepStack, arXiv:2406.04334).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.models.towers.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, rotate
from quire.multimodal.families.base import Config
from quire.multimodal.spec import MediaSpec

EPS = 1e-6
Norm = Callable[[Tensor], Tensor]


class Gated:
    """The feed-forward layer of Qwen2.5-VL."""

    def __init__(self, builder: Builder, name: str, hidden: int, inner: int, activation: str) -> None:
        self.gate, self.up = (Linear(builder, f"{name}.{part}_proj", hidden, inner) for part in ("gate", "up"))
        self.down = Linear(builder, f"{name}.down_proj", inner, hidden)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class TwoLayers:
    """Two linear layers, by their names."""

    def __init__(self, builder: Builder, names: tuple[str, str], sizes: tuple[int, int, int], activation: str) -> None:
        self.first = Linear(builder, names[0], sizes[0], sizes[1])
        self.second = Linear(builder, names[1], sizes[1], sizes[2])
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Block:
    def __init__(
        self, builder: Builder, name: str, heads: int, hidden: int, norm: Callable[..., Norm], mlp: Norm
    ) -> None:
        self.heads = heads
        self.mlp = mlp
        self.norm1, self.norm2 = (norm(builder, f"{name}.norm{i}", hidden, EPS) for i in (1, 2))
        self.qkv = Linear(builder, f"{name}.attn.qkv", hidden, 3 * hidden)
        self.proj = Linear(builder, f"{name}.attn.proj", hidden, hidden)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [patches, hidden]; lengths: of the sequences that attend to themselves."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).unbind(1)  # [patches, heads, dim] each
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        parts = []
        for sequence in zip(*(torch.split(part, list(lengths)) for part in (q, k, v)), strict=True):
            queries, keys, values = (part.transpose(0, 1)[None] for part in sequence)
            parts.append(F.scaled_dot_product_attention(queries, keys, values)[0].transpose(0, 1))
        x = x + self.proj(torch.cat(parts).flatten(1))
        return x + self.mlp(self.norm2(x))


class Merger:
    """Merges 2 x 2 patches into one embedding. joined: whether they are normed as one vector."""

    def __init__(self, norm: Norm, mlp: Norm, width: int, joined: bool) -> None:
        self.norm = norm
        self.mlp = mlp
        self.width = width
        self.joined = joined

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width)) if self.joined else self.norm(x).view(-1, self.width)
        return self.mlp(x)


class Tower:
    def __init__(self, builder: Builder, spec: MediaSpec) -> None:
        config: Config = spec.config["vision_config"]
        kind = spec.config.get("model_type", "qwen2_vl")
        is_first = kind == "qwen2_vl"
        is_third = kind.startswith("qwen3")
        hidden = config.get("embed_dim", 1280) if is_first else config["hidden_size"]
        out = config.get("hidden_size", 3584) if is_first else config["out_hidden_size"]
        heads = config.get("num_heads", 16)
        self.merge = config.get("spatial_merge_size", 2)
        inner = int(hidden * config.get("mlp_ratio", 4)) if is_first else config["intermediate_size"]
        activation = config.get("hidden_act", "quick_gelu" if is_first else "gelu_pytorch_tanh" if is_third else "silu")
        patch = config.get("patch_size", 16 if is_third else 14)
        frames = config.get("temporal_patch_size", 2)
        self.patch = patch
        self.head_dim = hidden // heads
        self.frames = frames
        kernel = (frames, patch, patch)
        width = hidden * self.merge**2
        self.embedding = Linear(builder, "visual.patch_embed.proj", 3 * frames * patch**2, hidden, is_third, kernel)
        norm: Callable[..., Norm] = RMSNorm if kind == "qwen2_5_vl" else LayerNorm
        self.positions = None
        if is_third:
            count = config.get("num_position_embeddings", 2304)
            self.positions = builder.whole("visual.pos_embed.weight", count, hidden)
            self.side = int(count**0.5)
        self.blocks = []
        for i in range(config.get("depth", 32)):
            name = f"visual.blocks.{i}"
            names = (
                (f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2")
                if is_third
                else (f"{name}.mlp.fc1", f"{name}.mlp.fc2")
            )
            mlp: Norm = (
                Gated(builder, f"{name}.mlp", hidden, inner, activation)
                if kind == "qwen2_5_vl"
                else TwoLayers(builder, names, (hidden, inner, hidden), activation)
            )
            self.blocks.append(Block(builder, name, heads, hidden, norm, mlp))
        self.window = None
        self.whole = range(len(self.blocks))
        if kind == "qwen2_5_vl":
            self.window = config.get("window_size", 112) // self.merge // patch  # in embeddings
            self.whole = config.get("fullatt_block_indexes", (7, 15, 23, 31))

        def merger(name: str, joined: bool) -> Merger:
            names = (f"{name}.linear_fc1", f"{name}.linear_fc2") if is_third else (f"{name}.mlp.0", f"{name}.mlp.2")
            before = norm(builder, f"{name}.{'norm' if is_third else 'ln_q'}", width if joined else hidden, EPS)
            return Merger(before, TwoLayers(builder, names, (width, width, out), "gelu"), width, joined)

        self.merger = merger("visual.merger", joined=False)
        taps = config.get("deepstack_visual_indexes", (8, 16, 24)) if spec.levels else ()
        self.levels = {layer: merger(f"visual.deepstack_merger_list.{i}", joined=True) for i, layer in enumerate(taps)}
        self.taps = list(taps)

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        time, rows, columns = tensors["grid"].tolist()
        pixels = tensors["pixels"].to(self.embedding.weight.dtype)  # [patches, 3, 1 or frames, patch, patch]
        x = self.embedding(pixels.expand(-1, -1, self.frames, -1, -1).flatten(1))
        row, column = self._places(rows, columns, x.device)
        if self.positions is not None:
            x = x + self._learned(row, column, rows, columns).repeat(time, 1).to(x.dtype)
        cos, sin = self._rotation(row.repeat(time), column.repeat(time))
        frame = [rows * columns] * time
        order = None
        windows = list[int]()
        if self.window is not None:
            order, windows = self._windows(time, rows // self.merge, columns // self.merge)
            order = order.to(x.device)
            x, cos, sin = (self._permuted(part, order) for part in (x, cos, sin))
        taps: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, frame if index in self.whole else windows)
            if index in self.levels:
                taps[index] = self.levels[index](x)
        merged = self.merger(x)
        if order is not None:
            merged = merged[order.argsort()]
        return torch.cat([merged, *(taps[layer] for layer in self.taps)], 1)

    def _places(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each patch of a frame, with the patches of an embedding next to each
        other."""
        cut = torch.arange(rows * columns, device=device).view(
            rows // self.merge, self.merge, columns // self.merge, self.merge
        )
        index = cut.transpose(1, 2).reshape(-1)
        return index // columns, index % columns

    def _rotation(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Half of the pairs rotate with the row, and half with the column. cos, sin: [patches, 1, head_dim], float32"""
        half = self.head_dim // 2
        frequencies = 1.0 / 10_000 ** (torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half)
        angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), 1)
        angles = torch.cat((angles, angles), 1)[:, None]
        return angles.cos(), angles.sin()

    def _learned(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """Interpolate the square table of learned positions to the size of the image: [patches, hidden]."""
        assert self.positions is not None
        total: Tensor | None = None
        y = row * ((self.side - 1) / max(rows - 1, 1))
        x = column * ((self.side - 1) / max(columns - 1, 1))
        y0 = y.floor()
        x0 = x.floor()
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            index = (y0 + down).clamp(max=self.side - 1) * self.side + (x0 + right).clamp(max=self.side - 1)
            weight = (y - y0 if down else 1 - (y - y0)) * (x - x0 if right else 1 - (x - x0))
            part = self.positions[index.long()] * weight[:, None].to(self.positions.dtype)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _windows(self, time: int, rows: int, columns: int) -> tuple[Tensor, list[int]]:
        """Return the embeddings' order, window after window, and the number of patches in each window."""
        assert self.window is not None
        order = list[Tensor]()
        lengths = list[int]()
        grid = torch.arange(time * rows * columns).view(time, rows, columns)
        for frame in grid:
            for top in range(0, rows, self.window):
                for left in range(0, columns, self.window):
                    part = frame[top : top + self.window, left : left + self.window].flatten()
                    order.append(part)
                    lengths.append(len(part) * self.merge**2)
        return torch.cat(order), lengths

    def _permuted(self, x: Tensor, order: Tensor) -> Tensor:
        """x: [patches, ...], in the order of their embeddings"""
        return x.view(-1, self.merge**2, *x.shape[1:])[order].flatten(0, 1)


def make(builder: Builder, spec: MediaSpec) -> Tower:
    return Tower(builder, spec)
