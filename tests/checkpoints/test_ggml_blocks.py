"""Further types of ggml's blocks: what is not in test_gguf.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from ops.test_quantized import needs_kernels
from safetensors.torch import load_file, save_file

from quire.checkpoints.formats import ggml_blocks
from quire.checkpoints.formats.gguf import decode
from quire.checkpoints.formats.gguf_types import TYPES
from quire.checkpoints.gguf import read_gguf
from quire.cli.models.facts import facts_of
from quire.ops.cpu.quantized_linear import quantized_linear_cpu
from quire.ops.reference.quantized import QuantizedMatrix
from support.checkpoints import write_checkpoint
from support.engines import logits_of_ranks, make_llm, runners_of_ranks, teacher_forced_logits
from support.ggml_blocks import set_factors
from support.gguf_files import FURTHER_TYPES, TABLE_TYPES, WIDE, reference, with_tensors, write_gguf, write_meaning
from support.reference import logits, prompts

TEXT = prompts(300, 9)[8][:60]
SMALL = {**WIDE, "num_hidden_layers": 1}


def matrix_of(name: str, shape: tuple[int, int]) -> QuantizedMatrix:
    draw, (kind,) = np.random.default_rng(0), (kind for kind in TYPES.values() if kind.name == name)
    data = draw.integers(0, 256, (*shape, kind.nbytes), dtype=np.uint8)
    set_factors(data, name, draw.normal(0, 0.01, shape))
    made = decode(kind, torch.from_numpy(data.reshape(len(data), -1)))
    assert isinstance(made, QuantizedMatrix)
    return made


@pytest.mark.parametrize("name", [*TABLE_TYPES, *FURTHER_TYPES, "Q2_0"])
def test_weights_take_four_bits_and_rows_that_are_decoded_in_parts_are_the_same(name, monkeypatch):
    whole = matrix_of(name, (37, 4))
    assert whole.codes.dtype is torch.uint8
    assert whole.codes.shape == (37, whole.in_features // 2)
    assert whole.scales.element_size() == (1 if name.startswith("IQ") and name != "IQ4_NL" else 2)
    monkeypatch.setattr(ggml_blocks, "_CHUNK", 5 * 4 * 256)
    parts = matrix_of(name, (37, 4))
    assert {n: t.dtype for n, t in parts.by_row.items()} == {n: t.dtype for n, t in whole.by_row.items()}
    assert torch.equal(parts.dequantize(), whole.dequantize())


@needs_kernels
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q5_1", 6.0),
        ("Q8_0", 8.5),
        ("Q2_K", 3.125),
        ("Q3_K", 3.5625),
        ("Q4_K", 4.625),
        ("Q5_K", 5.625),
        ("Q6_K", 6.5625),
        ("IQ4_XS", 4.3125),
        ("IQ1_M", 4.5625),
        ("NVFP4", 5),
        ("TQ2_0", 4.0625),
    ],
)
def test_the_kernels_weights_take_little_more_memory_than_those_of_the_file(name, bits):
    matrix = matrix_of(name, (64, 2048 // next(kind.elements for kind in TYPES.values() if kind.name == name)))
    exact = matrix.dequantize()
    packed = quantized_linear_cpu.pack(matrix)
    assert sum(part.nbytes for part in packed.by_row.values()) * 8 == bits * exact.numel()
    assert torch.equal(packed.pick(torch.arange(64)).dequantize(), exact)


@pytest.fixture
def hide_gguf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    def hide() -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        ggml_blocks._codebook.cache_clear()

    yield hide
    ggml_blocks._codebook.cache_clear()


@pytest.mark.parametrize("kind", ["IQ2_S", "IQ1_M"])
def test_without_the_gguf_package_an_error_names_the_extra(tmp_path, kind, hide_gguf):
    path = write_gguf(write_checkpoint(tmp_path / "source", "llama", SMALL), tmp_path / "model.gguf", kind)
    hide_gguf()
    with pytest.raises(ValueError, match=rf"{kind} need ggml\'s codebooks.*: pip install .*\[gguf\]"):
        make_llm(path)
    assert facts_of(path).format == f"GGUF {kind}"


def test_types_without_codebooks_do_not_need_the_package(tmp_path, hide_gguf):
    path = write_gguf(write_checkpoint(tmp_path / "source", "llama", SMALL), tmp_path / "model.gguf", "TQ2_0")
    hide_gguf()
    assert teacher_forced_logits(make_llm(path), TEXT).isfinite().all()


def with_scales(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """A file of Llama's architecture in which each matrix has a scale, and those of experts one each, and the
    checkpoint that it means."""
    path, dense = write_gguf(source, folder / "plain.gguf", kind), write_meaning(source, folder / "dense", kind)
    draw, scales = np.random.default_rng(0), {}
    for name, tensor in read_gguf(path).tensors.items():
        if name.startswith("blk") and tensor.kind.name == kind:
            stem, count = name.removesuffix("weight"), tensor.shape[0] if len(tensor.shape) == 3 else 1
            scales[f"{stem}scale"] = draw.uniform(0.5, 2, count).astype(np.float32)
            scales[f"{stem}input_scale"] = np.ones(1, np.float32)
    names, state = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8), load_file(dense / "model.safetensors")
    for name, tensor in state.items():
        expert = re.search(r"\.experts\.(\d+)", name)
        stem = (name if expert is None else name.replace(expert[0], ".experts")).removesuffix(".weight")
        if (scale := scales.get(f"{names.get_name(stem)}.scale")) is not None:
            tensor *= float(scale[0 if expert is None else int(expert[1])])
    save_file(state, dense / "model.safetensors", metadata={"format": "pt"})
    return with_tensors(path, folder / "scaled.gguf", scales), dense


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "NVFP4"), ("mixtral", "NVFP4"), ("llama", "Q4_K"), ("llama", "Q8_0"), ("llama", "F16")],
)
def test_matrices_have_scales_beside_them(tmp_path, family, kind):
    """As llama.cpp writes NVFP4; other types might have them, too."""
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    source = write_checkpoint(tmp_path / "source", family, {**SMALL, **experts})
    path, dense = with_scales(source, tmp_path, kind)
    wanted = logits(reference(dense), TEXT)
    torch.testing.assert_close(teacher_forced_logits(make_llm(path), TEXT), wanted, rtol=1e-4, atol=5e-4)
    plain = teacher_forced_logits(make_llm(tmp_path / "plain.gguf"), TEXT)
    assert (plain - wanted).abs().max() > 0.1
    if kind == "NVFP4":
        made = logits_of_ranks(runners_of_ranks(path, 2), TEXT)
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=5e-4)


def test_a_scale_of_another_shape_is_an_error(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama", SMALL)
    path = write_gguf(source, tmp_path / "plain.gguf", "NVFP4")
    odd = with_tensors(path, tmp_path / "odd.gguf", {"blk.0.attn_q.scale": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"odd.gguf: blk.0.attn_q.scale has shape \(3,\), which blk.0.attn_q.weight"):
        make_llm(odd)
