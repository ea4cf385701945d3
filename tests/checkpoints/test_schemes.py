"""Every scheme reads exactly the part of a layer that it is asked for: any outputs, and any whole groups of inputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.config import extra_tensors, quantization_method
from quire.checkpoints.formats.scheme import QuantizedWeight
from quire.checkpoints.presented import presented
from quire.checkpoints.weights import SafetensorsCheckpoint, load_weights
from quire.layers.build import Builder
from quire.layers.linear import LinearShape, make_weight
from quire.layers.specs import OutputPart
from quire.ops import Kernels, Target
from support.quantized import FORMATS, FURTHER, Format, float8, metadata_of, packed

IN, ROWS = 192, {"q": 48, "k": 24, "v": 40}
ALL = {**FORMATS, **FURTHER}


def rows_of(name: str, form: Format) -> int:
    return -(-ROWS[name] // form.outputs) * form.outputs


def written(directory: Path, form: Format) -> dict[str, Tensor]:
    """A checkpoint of the layers q, k, v in this format: what their weights mean."""
    torch.manual_seed(0)
    tensors, meant, shapes = {}, {}, {}
    for name in ROWS:
        count = rows_of(name, form)
        parts, meant[name] = form.quantize(torch.randn(count, IN) * 0.1)
        shapes[f"{name}_proj"] = meant[name].shape
        tensors |= {f"{name}_proj.{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata_of(form, shapes))
    return meant


def loaded(directory: Path, form: Format, shape: LinearShape, dtype: torch.dtype = torch.float32) -> Any:
    config = {"quantization_config": form.config}
    checkpoint = presented(SafetensorsCheckpoint(directory), config)
    kernels = Kernels(Target(torch.device("cpu"), dtype))
    builder = Builder(kernels, None, checkpoint.linear_method() or quantization_method(config, checkpoint.has))
    weight = make_weight(builder, shape)
    unwanted = tuple(f"^{name}_proj" for name in ROWS if all(p.name != f"{name}_proj" for p in shape.parts))
    load_weights(checkpoint, builder, (*extra_tensors(config), *unwanted), show_progress=False)
    return weight


def a_part(draw: random.Random, name: str, rows: int) -> OutputPart:
    start, stop = sorted(draw.sample(range(rows + 1), 2))
    return OutputPart(f"{name}_proj", rows, start, stop)


def a_range_of_inputs(draw: random.Random, group: int) -> tuple[int, int]:
    """All inputs, whole groups of them, or any."""
    step = draw.choice((IN, max(group, 1), 8, 1))
    start, stop = sorted(draw.sample(range(IN // step + 1), 2))
    return start * step, stop * step


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", ALL)
def test_any_outputs_of_fused_parts_and_any_range_of_inputs(tmp_path, name):
    form, draw = ALL[name], random.Random(name)
    meant = written(tmp_path, form)
    for _ in range(8 if name in FORMATS else 4):
        layers = draw.choices("qkv", k=draw.randint(1, 4))
        parts = tuple(a_part(draw, layer, rows_of(layer, form)) for layer in layers)
        start, stop = a_range_of_inputs(draw, form.group)
        weight = loaded(tmp_path, form, LinearShape(parts, IN, start, stop))
        expected = torch.cat([meant[p.name[0]][p.start : p.stop, start:stop] for p in parts])
        torch.testing.assert_close(weight.dense(), expected, rtol=1e-6, atol=1e-7)
        in_panels = loaded(tmp_path, form, LinearShape(parts, IN, start, stop), torch.bfloat16)
        torch.testing.assert_close(in_panels.dense(), expected.bfloat16(), rtol=2**-7, atol=1e-6)
        x, bias = torch.randn(5, stop - start), torch.randn(len(expected))
        torch.testing.assert_close(weight(x, bias), x @ expected.T + bias, rtol=1e-5, atol=1e-5)
        assert weight(x[:0], None).shape == (0, len(expected))


WHOLE = LinearShape(tuple(OutputPart(f"{n}_proj", rows, 0, rows) for n, rows in ROWS.items()), IN, 0, IN)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("gptq", 5.5),
        ("awq", 5.5),
        ("packed-4-bits", 4.6),
        ("int8-channel", 8.2),
        ("float8-block", 10),
        ("nvfp4", 5.6),
        ("mxfp4", 4.6),
        ("nf4", 4.6),
    ],
)
def test_the_weight_stays_small_in_memory_and_in_one_piece(tmp_path, name, bits):
    written(tmp_path, FORMATS[name])
    weight = loaded(tmp_path, FORMATS[name], WHOLE)
    assert isinstance(weight, QuantizedWeight)
    (matrix,) = weight.pieces
    assert sum(t.nbytes for t in matrix.by_row.values()) * 8 <= bits * sum(ROWS.values()) * IN
    assert list(vars(weight)) == ["kernels", "dtype", "pieces"]  # it holds none of the checkpoint's tensors


def test_fused_parts_with_other_orders_of_inputs_stay_apart(tmp_path):
    form = FORMATS["gptq-act-order"]
    written(tmp_path, form)
    assert len(loaded(tmp_path, form, WHOLE).pieces) == 1  # all three were made with the same order
    meant = {}
    tensors = {}
    for seed, (name, rows) in enumerate(ROWS.items()):
        order = torch.randperm(IN, generator=torch.Generator().manual_seed(seed))
        parts, dense = FORMATS["gptq-symmetric"].quantize(torch.randn(rows, IN))
        parts["g_idx"] = (order.argsort() // 16).int()
        codes = torch.stack([parts["qweight"].T >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1)
        shuffled = codes[:, order.argsort()].unflatten(1, (-1, 8)).long() << torch.arange(0, 32, 4)
        parts["qweight"] = shuffled.sum(-1).to(torch.int32).T
        meant[name] = dense[:, order.argsort()]
        tensors |= {f"{name}_proj.{end}": part.contiguous() for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weight = loaded(tmp_path, form, WHOLE)
    assert len(weight.pieces) == 3
    torch.testing.assert_close(weight.dense(), torch.cat(list(meant.values())))


@pytest.mark.parametrize("name", ["gptq-act-order", "packed-4-bits-act-order"])
def test_with_act_order_groups_of_which_a_rank_has_parts_are_filled_up_with_zeros(tmp_path, name):
    """A rank has about half of the inputs of each group of 16."""
    meant = written(tmp_path, FORMATS[name])["q"][:, 96:]
    weight = loaded(tmp_path, FORMATS[name], LinearShape(WHOLE.parts[:1], IN, 96, 192))
    (matrix,) = weight.pieces
    assert (matrix.group, matrix.num_inputs) == (16, 96)
    assert 96 < matrix.in_features <= 192
    torch.testing.assert_close(weight.dense(), meant, rtol=1e-6, atol=1e-7)
    in_panels = loaded(tmp_path, FORMATS[name], LinearShape(WHOLE.parts[:1], IN, 96, 192), torch.bfloat16)
    x = torch.randn(5, 96).bfloat16()
    wanted = x.float() @ meant.T
    assert (in_panels(x, None) - wanted).abs().mean() < 0.02 * wanted.std()
    with pytest.raises(ValueError, match="weights for 96 inputs got 90"):
        in_panels(x[:, :90], None)


def test_blocks_may_be_cut_by_the_edge_of_the_weight(tmp_path):
    form = float8("36x40")  # of 48 x 192, 24 x 192, 40 x 192
    meant = written(tmp_path, form)
    torch.testing.assert_close(loaded(tmp_path, form, WHOLE).dense(), torch.cat(list(meant.values())))
    last = LinearShape(WHOLE.parts, IN, 160, 192)
    torch.testing.assert_close(loaded(tmp_path, form, last).dense(), torch.cat(list(meant.values()))[:, 160:])


def test_marlins_layout_needs_whole_tiles(tmp_path):
    form = FURTHER["marlin"]
    written(tmp_path, form)
    with pytest.raises(ValueError, match="q_proj has 192 inputs and 48 outputs, but Marlin's layout needs multiples"):
        loaded(tmp_path, form, LinearShape((OutputPart("q_proj", 48, 0, 48),), IN, 0, IN))


def test_a_checkpoint_that_is_not_what_its_config_says_is_an_error_that_names_the_tensor(tmp_path):
    written(tmp_path, FORMATS["packed-4-bits"])
    with pytest.raises(WeightError, match=r"q_proj.weight_scale has shape \(48, 6\).*asks for \(48, 12\)"):
        loaded(tmp_path, packed(4, 16), WHOLE)
    written(tmp_path, FORMATS["float8-channel"])
    with pytest.raises(WeightError, match=r"q_proj.weight is of type torch.float8_e4m3fn.*asks for torch.int8"):
        loaded(tmp_path, FORMATS["int8-channel"], WHOLE)
