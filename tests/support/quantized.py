"""Quantized checkpoints of every format, written plainly as the formats are described, and the weights they mean."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
LINEAR = r"\.((self_attn|mlp)\..*_proj|experts\.\d+\.w[123])\.weight$"


@dataclass(frozen=True)
class Format:
    """quantize: a weight [out, in] -> (tensors of the layer by the ends of their names, the weight that they mean)."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], tuple[Tensors, Tensor]]
    group: int = 1  # inputs that must stay on one rank; 0: all of them
    left_over: Tensors = field(default_factory=dict)  # other tensors of each layer in such checkpoints
    outputs: int = 1  # a layer has a multiple of this
    torchao: tuple[str, int] | None = None  # class and group of each weight, for the files' metadata


def integers(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in], scales [out, groups], zero points [out, groups]), for weight = (code - zero) * scale"""
    parts = weight.float().unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scales = parts.abs().amax(-1) / (top // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (parts.amax(-1) - parts.amin(-1)) / top
        zeros = (-parts.amin(-1) / scales).round().clamp(1, top)
    scales = scales.half().float()
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.flatten(1).int(), scales, zeros.int()


def meaning(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: list[int]) -> Tensor:
    columns = [(codes[:, i] - zeros[:, g]) * scales[:, g] for i, g in enumerate(group_of)]
    return torch.stack(columns, dim=1).float()


def words(rows: Tensor, bits: int) -> Tensor:
    """Each row's numbers, concatenated as bits from the lowest up, and cut into words of 32 bits."""
    length = -(-rows.shape[1] * bits // 32) * 4
    numbers = [sum(value << (bits * i) for i, value in enumerate(row)) for row in rows.tolist()]
    return torch.from_numpy(np.stack([np.frombuffer(n.to_bytes(length, "little"), np.int32).copy() for n in numbers]))


def gptq(bits: int, group: int, *, v2: bool = False, act_order: bool = False, symmetric: bool = False) -> Format:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        width = weight.shape[1]
        size = width if group == -1 else group
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(width)
        codes, scales, zeros = integers(weight[:, order], bits, size, symmetric)
        group_of = torch.empty(width, dtype=torch.int32)
        group_of[order] = torch.arange(width, dtype=torch.int32) // size
        codes = codes[:, order.argsort()]
        stored = zeros if v2 else zeros - 1
        tensors = {
            "qweight": words(codes, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": group_of,
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return tensors, meaning(codes, scales, zeros, group_of.tolist())

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    return Format({**config, **({"checkpoint_format": "gptq_v2"} if v2 else {})}, quantize, 0 if act_order else group)


def awq(group: int) -> Format:
    def interleaved(rows: Tensor) -> Tensor:
        """Of eight neighbours, those at even indices fill the low half of a word, the others the high half."""
        return words(rows.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, zeros = integers(weight, 4, group, symmetric=False)
        tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T.half()}
        return tensors, meaning(codes, scales, zeros, [i // group for i in range(weight.shape[1])])

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, quantize, group)


def marlin_places() -> tuple[list[int], list[int]]:
    """(input, output) of each of the 1024 codes of a tile of Marlin's layout, 16 inputs and 64 outputs.

    From the kernel's use of them: the codes of four blocks of 16 outputs are the operand B of `mma.m16n8k16`, in halves
    of 8 outputs. Of such an operand, a thread has the output thread / 4, and in its two registers the pair of inputs
    2 (thread mod 4) and the pair 8 behind it. A word has these eight codes, first all of even inputs, then the others,
    since the kernel extracts two numbers at a time, 16 bits apart.
    """
    places = []
    for thread in range(32):
        for block in range(4):
            held = [
                (8 * register + 2 * (thread % 4) + odd, 16 * block + 8 * half + thread // 4)
                for half in range(2)
                for register in range(2)
                for odd in range(2)
            ]
            places += held[::2] + held[1::2]
    return [i for i, _ in places], [o for _, o in places]


def marlin(group: int, config: dict[str, Any], names: tuple[str, str] = ("B", "s")) -> Format:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        width, inputs = weight.shape[1], marlin_places()
        size = width if group == -1 else group
        codes, scales, zeros = integers(weight, 4, size, symmetric=True)
        tiles = codes.T.unflatten(0, (-1, 16)).unflatten(2, (-1, 64)).transpose(1, 2)
        if size == width:  # a thread needs the scales of its outputs in the result: two neighbours of each half block
            order = [8 * half + 2 * thread + odd for thread in range(4) for half in range(4) for odd in range(2)]
        else:  # those of its column of operands
            order = [thread + 8 * half for thread in range(8) for half in range(8)]
        packed = words(tiles[..., inputs[0], inputs[1]].flatten(1), 4)
        stored = scales.T.unflatten(1, (-1, len(order)))[..., order].flatten(1).half()
        tensors = dict(zip(names, (packed, stored), strict=True)) | {"workspace": torch.zeros(16, dtype=torch.int32)}
        return tensors, meaning(codes, scales, zeros, [i // size for i in range(width)])

    return Format({"bits": 4, "group_size": group, **config}, quantize, group, outputs=64)


def hqq(bits: int, group: int | None) -> Format:
    """Groups of the flattened weight, with zero points that are floats."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        parts = weight.float().reshape(-1, group or weight.shape[1])
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().float()
        zero = (-low / scale).half().float()
        codes = (parts / scale + zero).round().clamp(0, 2**bits - 1).int()
        packed = sum(part << bits * i for i, part in enumerate(reversed(codes.chunk(8 // bits))))
        tensors = {"W_q": packed.to(torch.uint8), "scale": scale.half(), "zero": zero.half()}
        tensors |= {"nbits": torch.tensor(bits), "shape": torch.tensor(weight.shape), "axis": torch.tensor(1)}
        return tensors, ((codes - zero) * scale).view(weight.shape)

    weights = {"nbits": bits, "channel_wise": True, "group_size": group, "optimize": True, "round_zero": bits == 4}
    options = {"weight_quant_params": {**weights, "axis": 1, "view_as_float": False}, "offload_meta": False}
    options |= {"scale_quant_params": None, "zero_quant_params": None}
    return Format({"quant_method": "hqq", "quant_config": options, "skip_modules": ["lm_head"]}, quantize, group or 1)


def torchao(kind: str, group: int, zeros: bool = True, old_names: bool = False) -> Format:
    """The class `kind` of torchao. group: inputs that share a scale; -1: all; 0: the whole weight has one scale."""
    begin = "weight:" if old_names else "_weight_"

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group < 1 else group
        if kind == "Float8Tensor":
            rows = weight.flatten()[None] if group == 0 else weight
            scale = rows.abs().amax(-1, keepdim=True) / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            return {begin + "qdata": codes, begin + "scale": scale}, codes.float() * scale
        bits = 8 if kind == "Int8Tensor" else 4
        codes, scales, points = integers(weight, bits, size, symmetric=not zeros)
        scales, centred = scales.bfloat16().float(), 2 ** (bits - 1)
        if kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
            stored = {"qdata": codes - centred, "zero_point": points - centred}
            tensors = {begin + end: part.to(torch.int8) for end, part in stored.items()}
            tensors[begin + "scale"] = scales
            return tensors, meaning(codes, scales, points, [i // size for i in range(inputs)])
        zero = ((centred - points) * scales).bfloat16()  # what is in the middle of the codes
        means = (codes - 8).float() * scales.repeat_interleave(size, 1) + zero.float().repeat_interleave(size, 1)
        if kind == "Int4Tensor":
            tensors = {"qdata": paired((codes - 8) & 15).view(torch.int8), "scale": scales.T.bfloat16()}
            return {begin + end: part for end, part in {**tensors, "zero_point": zero.T}.items()}, means
        padded = torch.nn.functional.pad(codes, (0, -inputs % 1024, 0, -outputs % 8))
        both = torch.stack([scales.bfloat16(), zero], dim=-1).transpose(0, 1)
        both = torch.nn.functional.pad(both, (0, 0, 0, -outputs % 8, 0, padded.shape[1] // size - both.shape[0]))
        return {begin + "qdata": tinygemm_words(padded), begin + "scale_and_zero": both}, means

    return Format({"quant_method": "torchao"}, quantize, max(group, 1), torchao=(kind, group))


def tinygemm_words(codes: Tensor) -> Tensor:
    """[out, in] -> int32 [out / 8, in / 128, 32, 4], as the CUDA version of `_convert_weight_to_int4pack` describes it:
    thread t has of each pair of tiles (16 inputs, 8 outputs each) the output t / 4 and the inputs 2 (t mod 4), the next
    one, and those 8 behind these; in a word, those at even places come first."""
    tiles = codes.unflatten(1, (-1, 4, 32)).unflatten(0, (-1, 8))  # [out / 8, 8, in / 128, 4, 32]
    threads = []
    for thread in range(32):
        pair = 2 * (thread % 4)
        held = [pair + 16 * tile + 8 * half + odd for tile in range(2) for half in range(2) for odd in range(2)]
        threads.append(tiles[:, thread // 4, :, :, held[::2] + held[1::2]])
    nibbles = torch.stack(threads, dim=2)  # [out / 8, in / 128, 32, 4, 8]
    return words(nibbles.flatten(0, 3), 4).view(nibbles.shape[:4])


def metadata_of(form: Format, shapes: dict[str, torch.Size]) -> dict[str, str] | None:
    """Of a file with layers of these shapes."""
    if form.torchao is None:
        return None
    kind, group = form.torchao
    entries = {}
    for layer, shape in shapes.items():
        block = list(shape) if group == 0 else [1, shape[1] if group == -1 else group]
        fields = {"block_size": block, "shape": list(shape), "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
        entries[f"{layer}.weight"] = json.dumps({"_type": kind, "_data": fields})
    return {"tensor_names": json.dumps(list(entries)), **entries}


def compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    weights = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}},
    }


def packed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Format:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        made, means = gptq(bits, group, v2=True, act_order=act_order, symmetric=symmetric).quantize(weight)
        size = weight.shape[1] if group == -1 else group
        zeros = integers(weight, bits, size, symmetric)[2]
        if act_order:
            zeros = integers(weight[:, made["g_idx"].argsort(stable=True)], bits, size, symmetric)[2]
        tensors = {
            "weight_packed": made["qweight"].T,
            "weight_scale": made["scales"].T.float(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = made["g_idx"]
        return tensors, means

    options = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel" if group == -1 else "group"}
    options |= {"group_size": None if group == -1 else group, "actorder": "group" if act_order else None}
    return Format(compressed("pack-quantized", options), quantize, 0 if act_order else group)


def int8(strategy: str, symmetric: bool = True) -> Format:
    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows = weight.flatten()[None] if strategy == "tensor" else weight
        codes, scales, zeros = integers(rows, 8, rows.shape[1], symmetric)
        tensors = {"weight": (codes - 128).to(torch.int8).view(weight.shape), "weight_scale": scales}
        if strategy == "tensor":
            tensors["weight_scale"] = scales[0]
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, ((codes - zeros) * scales).view(weight.shape).float()

    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    options = {"num_bits": 8, "strategy": strategy, "symmetric": symmetric}
    return Format(compressed("int-quantized", options, input_activations=activations), quantize)


def float8(strategy: str, config: dict[str, Any] | None = None, name: str = "weight_scale") -> Format:
    """strategy: "tensor", "channel" or a block, "32x48"."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = weight.shape
        block = {"tensor": (rows, columns), "channel": (1, columns)}.get(strategy) or tuple(
            map(int, strategy.split("x"))
        )
        scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
        codes, means = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                here = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = weight[here].abs().max() / 448
                codes[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
                means[here] = codes[here].float() * scales[i, j]
        shaped = scales if strategy != "tensor" else scales[0] if config is None else scales[0, 0]
        return {"weight": codes, name: shaped.clone(), "input_scale": torch.ones(1)}, means

    options = {"type": "float", "num_bits": 8, "strategy": "block" if "x" in strategy else strategy}
    if "x" in strategy:
        options["block_structure"] = [int(n) for n in strategy.split("x")]
    group = int(strategy.split("x")[1]) if "x" in strategy else 1
    return Format(config or compressed("float-quantized", options), quantize, group)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def paired(codes: Tensor, first: int = 0) -> Tensor:
    """Two codes of four bits in a byte, the one of the even input in the low half, or in the other if first is 1."""
    return (codes[..., first::2] | codes[..., 1 - first :: 2] << 4).to(torch.uint8)


def nearest(parts: Tensor, table: Tensor) -> Tensor:
    return (parts[..., None] - table).abs().argmin(-1)


def nvfp4(modelopt: bool) -> Format:
    """Groups of 16 with scales in float8, and one scale of the whole weight."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        table, parts = torch.tensor(E2M1), weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (6 * 448)
        scales = (parts.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        if not modelopt:
            whole = 1 / (1 / whole)
        steps = scales.float() * whole
        codes = nearest(parts / steps[..., None], table)
        tensors = {"weight_scale": scales, "input_scale": torch.ones(())}
        if modelopt:
            tensors |= {"weight": paired(codes.flatten(1)), "weight_scale_2": whole}
        else:
            tensors |= {"weight_packed": paired(codes.flatten(1)), "weight_global_scale": (1 / whole).view(1)}
            tensors["input_global_scale"] = torch.ones(1)
        return tensors, (table[codes] * steps[..., None]).flatten(1)

    if modelopt:
        settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        return Format(settings, quantize, 16)
    weights = {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group"}
    return Format(compressed("nvfp4-pack-quantized", weights), quantize, 16)


def mxfp4() -> Format:
    """Groups of 32 with exponents as scales, in compressed-tensors' form."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        table, parts = torch.tensor(E2M1), weight.unflatten(1, (-1, 32))
        exponents = parts.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2
        codes = nearest(parts / 2 ** exponents[..., None], table)
        tensors = {"weight_packed": paired(codes.flatten(1)), "weight_scale": (exponents + 127).to(torch.uint8)}
        return tensors, (table[codes] * 2 ** exponents[..., None]).flatten(1)

    weights = {"type": "float", "num_bits": 4, "group_size": 32, "strategy": "group"}
    return Format(compressed("mxfp4-pack-quantized", weights), quantize, 32)


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12]


def bitsandbytes(kind: str, nested: bool) -> Format:
    """Blocks of 64 of the flattened weight; in `nested`, their scales are codes of 8 bits in blocks of 256."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-v for v in FP4)])
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        absmax = flat.abs().amax(-1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors = {"weight.quant_map": table, "weight.absmax": absmax}
        if nested:
            offset, values = absmax.mean().item(), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            outer = rest.abs().amax(-1)
            found = nearest(rest / outer[:, None], values)
            absmax = (values[found] * outer[:, None]).flatten()[: len(absmax)] + offset
            tensors |= {"weight.absmax": found.flatten()[: len(absmax)].to(torch.uint8)}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": values}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = nearest(flat / absmax[:, None], table)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        size = -(-weight.numel() // 2)
        tensors |= {"weight": paired(codes.flatten(), 1)[:size, None], f"weight.quant_state.bitsandbytes__{kind}": text}
        return tensors, (table[codes] * absmax[:, None]).flatten()[: weight.numel()].view(weight.shape)

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format({**settings, "bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]}, quantize, 64)


def llm_int8() -> Format:
    """bitsandbytes' eight bits: a row's largest magnitude is the code 127."""

    def quantize(weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight.abs().amax(-1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * (largest / 127)[:, None]

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, quantize)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FORMATS = {
    "gptq": gptq(4, 32),
    "gptq-symmetric": gptq(4, 16, symmetric=True),
    "gptq-v2": gptq(4, 32, v2=True),
    "gptq-act-order": gptq(4, 16, act_order=True),
    "gptq-8-bits-a-channel": gptq(8, -1),
    "gptq-3-bits": gptq(3, 32),
    "gptq-2-bits": gptq(2, 16),
    "awq": awq(32),
    "packed-4-bits": packed(4, 32),
    "packed-4-bits-asymmetric": packed(4, 16, symmetric=False),
    "packed-4-bits-act-order": packed(4, 16, symmetric=False, act_order=True),
    "packed-8-bits-a-channel": packed(8, -1),
    "int8-channel": int8("channel"),
    "int8-tensor": int8("tensor"),
    "int8-asymmetric": int8("channel", symmetric=False),
    "float8-tensor": float8("tensor"),
    "float8-channel": float8("channel"),
    "float8-block": float8("32x16"),
    "fp8": float8("tensor", FP8),
    "modelopt-fp8": float8("tensor", MODELOPT),
    "nvfp4": nvfp4(modelopt=False),
    "modelopt-nvfp4": nvfp4(modelopt=True),
    "mxfp4": mxfp4(),
    "nf4": bitsandbytes("nf4", nested=False),
    "nf4-nested": bitsandbytes("nf4", nested=True),
    "fp4": bitsandbytes("fp4", nested=False),
    "llm-int8": llm_int8(),
    "fp8-block": float8("24x32", {**FP8, "weight_block_size": [24, 32]}, "weight_scale_inv"),
}

# Formats that quire.checkpoints.formats reads
FURTHER = {
    "marlin": marlin(32, {"quant_method": "marlin"}),
    "marlin-gptq": marlin(-1, {"quant_method": "gptq", "checkpoint_format": "marlin", "desc_act": False, "sym": True}),
    "marlin-awq": marlin(64, {"quant_method": "awq", "version": "marlin", "zero_point": False}, ("qweight", "scales")),
    "hqq": hqq(4, 64),
    "hqq-8-bits": hqq(8, 16),
    "hqq-2-bits-a-row": hqq(2, None),
    "hqq-groups-over-rows": hqq(4, 128),
    "torchao-int8": torchao("Int8Tensor", -1, zeros=False),
    "torchao-int8-groups": torchao("Int8Tensor", 32),
    "torchao-intx": torchao("IntxUnpackedToInt8Tensor", 32),
    "torchao-float8": torchao("Float8Tensor", -1),
    "torchao-float8-tensor-0.14": torchao("Float8Tensor", 0, old_names=True),
    "torchao-int4": torchao("Int4Tensor", 32),
    "torchao-int4-tiles": torchao("Int4TilePackedTo4dTensor", 64),
}


def write_quantized(source: Path, directory: Path, form: Format, linear: str = LINEAR) -> tuple[Path, Path]:
    """(a checkpoint with the linear layers of `source` in this format, a dense checkpoint of the weights they mean)"""
    quantized, dense = directory / "quantized", directory / "dense"
    state = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    made, meant, shapes = {}, {}, {}
    for name, tensor in state.items():
        made[name] = meant[name] = tensor
        if re.search(linear, name):
            del made[name]
            parts, meant[name] = form.quantize(tensor.float())
            stem = name.removesuffix(".weight")
            shapes[stem] = tensor.shape
            made |= {
                f"{stem}.{end}": part for end, part in parts.items() if end != "bias" or f"{stem}.bias" not in state
            }
    for path, tensors, metadata in ((quantized, made, metadata_of(form, shapes)), (dense, meant, None)):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, path / "model.safetensors", metadata)
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return quantized, dense
