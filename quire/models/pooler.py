"""The pooler: turns the final hidden states of whole texts into embeddings or scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.weights import TorchCheckpoint, load_dummy, load_weights, open_checkpoint
from quire.layers.build import Builder
from quire.layers.linear import DenseWeight, LinearShape
from quire.layers.mlp import activation
from quire.layers.norm import make_norm
from quire.layers.specs import DenseSpec, OutputPart, PoolerSpec


class Dense:
    """See DenseSpec."""

    def __init__(self, builder: Builder, spec: DenseSpec) -> None:
        spans = [(row, row + 1) for row in spec.rows] or [(0, spec.out_features)]
        parts = tuple(OutputPart(spec.name, spec.out_features, *span) for span in spans)
        self.weight = DenseWeight(builder, LinearShape(parts, spec.in_features, 0, spec.in_features))
        bias = spec.bias_name or f"{spec.name}.bias"
        has_bias = builder.shape_of(bias) is not None if spec.bias is None else spec.bias
        self.bias = builder.whole(bias, spec.out_features) if has_bias else None
        self.name = spec.activation
        self.activation = None
        if spec.activation not in ("identity", "tanh", "log1p_relu", "difference"):
            self.activation = activation(builder.kernels, spec.activation, gated=False)
        self.norm = None if spec.norm is None else make_norm(builder, spec.norm_name, spec.out_features, spec.norm)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]"""
        x = self.weight(x, self.bias)
        if self.activation is not None:
            x = self.activation(x)
        elif self.name == "tanh":
            x = torch.tanh(x)
        elif self.name == "log1p_relu":
            x = torch.log1p(torch.relu(x.float()))
        elif self.name == "difference":
            x = x[:, 1:] - x[:, :1]
        return x if self.norm is None else self.norm(x)


class Pooler:
    """See PoolerSpec. Its layers are whole on every rank. The choice of tokens is the caller's."""

    def __init__(self, builder: Builder, spec: PoolerSpec, directory: Path | None) -> None:
        """builder: the model's. Its checkpoint contains the layers without a folder of their own. directory: contains
        the folders of the other layers; None for random weights."""
        self.spec = spec

        def made(layers: Sequence[DenseSpec]) -> list[Dense]:
            return [self._made(builder, layer, directory) for layer in layers]

        self.of_tokens, self.layers = made(spec.of_tokens), made(spec.layers)

    @staticmethod
    def _made(builder: Builder, spec: DenseSpec, directory: Path | None) -> Dense:
        if not spec.folder:
            return Dense(builder, spec)
        own = Builder(builder.kernels, builder.tensor_group, lambda name: DenseWeight)
        dense = Dense(own, spec)
        if directory is None:
            load_dummy(own, show_progress=False)
        else:
            path = directory / spec.folder
            checkpoint = TorchCheckpoint(path) if path.suffix == ".pt" else open_checkpoint(path)
            load_weights(checkpoint, own, (), show_progress=False)
        return dense

    def __call__(self, hidden: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """hidden: [tokens, hidden], of whole texts one after the other; the pooling "last" only reads the last token of
        each text. starts, lengths: [texts], the first token and the number of tokens of each text -> [texts, out], or
        [tokens, out] if each token has a vector. Without the activation or the normalization of `finish`."""
        for layer in self.of_tokens:
            hidden = layer(hidden)
        pooled = self._pool(hidden, starts, lengths)
        for layer in self.layers:
            pooled = layer(pooled.to(hidden.dtype) if pooled.dtype is not hidden.dtype else pooled)
        return pooled.float()

    def _pool(self, hidden: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        pooling = self.spec.pooling
        if pooling == "all":
            return hidden
        if pooling in ("cls", "last"):
            return hidden[starts if pooling == "cls" else starts + lengths - 1]
        wide = hidden.float()
        counts = lengths[:, None].float()
        if pooling == "weighted_mean":
            firsts = starts.repeat_interleave(lengths, output_size=len(hidden))
            places = torch.arange(len(hidden), device=hidden.device) - firsts
            wide = wide * (places[:, None] + 1)
            counts = counts * (counts + 1) / 2
        reduce = "max" if pooling == "max" else "sum"
        # unsafe: a check of the lengths would wait for the device.
        initial = 0 if reduce == "max" and self.spec.tokens is not None else None  # of a text without a chosen token
        pooled = torch.segment_reduce(wide, reduce, lengths=lengths, axis=0, unsafe=True, initial=initial)
        if pooling == "max":
            return pooled
        return pooled / (counts.sqrt() if pooling == "mean_sqrt_len" else counts)

    def finish(self, pooled: Tensor, use_activation: bool | None, dimensions: int | None) -> Tensor:
        """Return the result of one text, [out] or [tokens, out]. use_activation: None follows the spec. dimensions: the
        number of an embedding's elements to keep (Matryoshka, arXiv:2205.13147)."""
        spec = self.spec
        if spec.is_classifier:
            if (spec.mean, spec.sigma) != (0.0, 1.0):
                pooled = (pooled - spec.mean) / spec.sigma
            if use_activation is False or spec.activation == "identity":
                return pooled
            if spec.activation == "relu":
                return torch.relu(pooled)
            return torch.sigmoid(pooled) if spec.activation == "sigmoid" else torch.softmax(pooled, -1)
        pooled = pooled if dimensions is None else pooled[..., :dimensions]
        if spec.normalize if use_activation is None else use_activation:
            return torch.nn.functional.normalize(pooled, dim=-1)
        return pooled


def make_poolers(builder: Builder, specs: Mapping[str, PoolerSpec], directory: Path | None) -> Mapping[str, Pooler]:
    """Return the pooler of each task. Tasks with equal specs share one. builder, directory: see Pooler."""
    made = {spec: Pooler(builder, spec, directory) for spec in dict.fromkeys(specs.values())}
    return {task: made[spec] for task, spec in specs.items()}
