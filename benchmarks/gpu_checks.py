"""Correctness checks on a device, which run before the performance is measured: every kernel against its reference, and
greedy text.

Used by gpu_suite.py. Each check raises an AssertionError that describes the difference.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.reference import ReferenceAttention
from quire.attention.selection import BACKENDS
from quire.ops import OPS, Target
from quire.ops.reference.drafts import draft_seeds
from quire.ops.reference.quantized import QuantizedMatrix, RoundedRows, quantize
from quire.worker.kv_memory import KVMemory

Check = Callable[[], None]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
VOCAB = 151_936


def on_host(result: Any) -> tuple[Tensor, ...]:
    """Return a result's tensors, copied to the host for comparison. On a simulated device they arrive as zeros, so that
    every comparison runs there, too.
    """
    results = result if isinstance(result, tuple) else (result,)
    return tuple((x.dequantize() if isinstance(x, RoundedRows) else x).cpu() for x in results)


def assert_close(result: Any, expected: Any, dtype: torch.dtype) -> None:
    for a, b in zip(on_host(result), on_host(expected), strict=True):
        tolerance = TOLERANCE[dtype] if a.is_floating_point() else 0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def ops(device: torch.device, big: bool = True) -> Iterator[tuple[str, Check]]:
    """Return a check for every implementation of every operation that supports the device. big: real sizes."""
    torch.manual_seed(0)
    for name in CASES:
        for implementation in [i for i in OPS[name].implementations if i.name not in ("reference", "cpu")]:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                if implementation.supports(Target(device, dtype)):
                    check = partial(_check_op, name, implementation, device, dtype, big)
                    yield f"{name} {implementation.name} {str(dtype)[6:]}", check


def _check_op(name: str, implementation: Any, device: torch.device, dtype: torch.dtype, big: bool) -> None:
    for arguments in CASES[name](device, dtype, big):
        expected = OPS[name].reference(*copied(arguments))
        result = implementation.function(*copied(arguments))
        if name == "keep_top_k_top_p":  # sums in another order may differ at the threshold
            (kept,), (expected_kept,) = on_host(result), on_host(expected)
            differ = kept.isfinite() != expected_kept.isfinite()
            assert int(differ.sum()) <= len(kept), "more than the tokens at the bound differ"
            assert_close(kept[~differ], expected_kept[~differ], dtype)
        elif "quantized" in name or "round" in name:  # rounds to 8 bits
            for found, exact in zip(on_host(result), on_host(expected), strict=True):
                difference = (found - exact).float().norm()
                assert difference <= 0.05 * exact.float().norm(), "the result differs by more than 5 %"
        else:
            assert_close(result, expected, dtype)


def copied(arguments: tuple[Any, ...]) -> list[Any]:
    """Return copies of the inputs, for functions that may overwrite them."""
    return [x.clone() if isinstance(x, Tensor) else x for x in arguments]


def _draw(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def _norms(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for rows, dim in ((1, 64), (7, 128), (33, 1000)) + ((300, 4096),) * big:
        yield _draw(device, dtype, rows, dim), _draw(device, dtype, dim), 1e-6


def _add_norms(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for x, weight, eps in _norms(device, dtype, big):
        yield x, _draw(device, dtype, *x.shape), weight, eps


def _gates(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for rows, half in ((1, 64), (9, 1000)) + ((256, 14_336),) * big:
        yield (_draw(device, dtype, rows, 2 * half),)


def _rounded(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for code in (torch.int8, torch.float8_e4m3fn):
        for rows, dim in ((1, 64), (7, 1000)) + ((300, 4096),) * big:
            yield _draw(device, dtype, rows, dim), code


def _rounded_norms(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for x, code in _rounded(device, dtype, big):
        yield x, _draw(device, dtype, *x.shape), _draw(device, dtype, x.shape[1]), 1e-6, code


def _products(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for rows in (1, 9, 16, 40):
        weight = _draw(device, dtype, 8192 if big else 512, 512) / 512**0.5
        yield _draw(device, dtype, rows, 512), weight, _draw(device, dtype, len(weight))


def _partials(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for parts, tokens, heads, dim in ((2, 5, 4, 64), (8, 1, 3, 80)):
        outs = _draw(device, dtype, parts, tokens, heads, dim)
        yield outs, torch.randn(parts, tokens, heads, device=device), torch.randn(heads, device=device)


def _rotary(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for heads, kv_heads, dim, half in ((4, 2, 64, 32), (8, 1, 128, 32), (3, 3, 80, 16)):
        angles = torch.rand(17, half, device=device) * 6
        for interleaved in (False, True):
            q = _draw(device, dtype, 17, heads, dim)
            k = _draw(device, dtype, 17, kv_heads, dim)
            yield q, k, angles.cos(), angles.sin(), interleaved


def _experts(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for counts, outs, ins in (((3, 0, 14), 48, 64), ((0, 200, 1, 80), 256, 128)):
        offsets = torch.tensor([0, *counts], device=device).cumsum(0)
        weight = _draw(device, dtype, len(counts), outs, ins) / ins**0.5
        yield _draw(device, dtype, sum(counts), ins), weight, _draw(device, dtype, len(counts), outs), offsets


def _quantized(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for rows, outs, ins in ((1, 64, 256), (19, 200, 384)) + ((130, 1024, 4096),) * big:
        weight = torch.randn(outs, ins) / ins**0.5
        integers = quantize.reference(weight, 8, ins), quantize.reference(weight, 4, 128)
        for matrix in (*integers, _float8(weight), _looked_up(weight)):
            yield _draw(device, dtype, rows, ins), _moved(matrix, device), _draw(device, dtype, outs)


def _quantized_experts(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    offsets = torch.tensor([0, 40, 40, 57, 200], device=device)
    weight = torch.randn(4 * 192, 256) / 16
    for matrix in (quantize.reference(weight, 8, 256), quantize.reference(weight, 4, 128), _looked_up(weight)):
        yield _draw(device, dtype, 200, 256), _moved(matrix, device), _draw(device, dtype, 4, 192), offsets


def _float8(weight: Tensor) -> QuantizedMatrix:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return QuantizedMatrix(codes, scales, weight.shape[1], weight.shape[1])


def _looked_up(weight: Tensor) -> QuantizedMatrix:
    """Use an unordered table, so that each value must come from its own position."""
    return replace(quantize.reference(weight, 4, 32), table=tuple(torch.randn(16).tolist()))


def _moved(matrix: QuantizedMatrix, device: torch.device) -> QuantizedMatrix:
    fields = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(matrix).items()}
    return QuantizedMatrix(**fields)


def _draws(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    if dtype is torch.float32:
        for rows, vocab in ((1, 100), (9, 5001)) + ((256, VOCAB),) * big:
            seeds = torch.randint(-(2**62), 2**62, (rows,), device=device)
            yield torch.randn(rows, vocab, device=device), seeds, torch.randint(0, 5000, (rows,), device=device)


def _verified(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    for p, seeds, positions in _draws(device, torch.float32, big):
        q = (p + torch.randn_like(p)).to(dtype)
        yield p, q, OPS["sample_gumbel"].reference(q.float(), draft_seeds(seeds), positions), seeds, positions


def _counted(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    token_ids = torch.randint(0, 2, (300, 500), dtype=torch.int32, device=device)
    for requests, places in ((1, 9), (7, 2), (256, 4)):
        rows = torch.arange(requests, device=device).repeat_interleave(places)
        positions = torch.arange(requests * places, device=device) % places + 20
        sampled = torch.randint(0, 2, (len(rows),), device=device)
        yield token_ids, rows, positions, sampled, torch.arange(requests + 1, device=device) * places


def _kept(device: torch.device, dtype: torch.dtype, big: bool) -> Iterator[tuple[Any, ...]]:
    if dtype is torch.float32:
        for rows, vocab in ((5, 100), (9, 5001)) + ((64, VOCAB),) * big:
            logits = torch.randn(rows, vocab, device=device) * 3
            k = torch.randint(1, 200, (rows,), device=device)
            p = torch.rand(rows, device=device) * 0.8 + 0.1
            yield from ((logits, k, None), (logits, None, p), (logits, k, p))


CASES: dict[str, Callable[[torch.device, torch.dtype, bool], Iterator[tuple[Any, ...]]]] = {
    "linear": _products,
    "rms_norm": _norms,
    "add_rms_norm": _add_norms,
    "round_rows": _rounded,
    "add_rms_norm_rounded": _rounded_norms,
    "silu_and_mul_rounded": _rounded,
    "merge_partials": _partials,
    "silu_and_mul": _gates,
    "gelu_and_mul": _gates,
    "swiglu_oai": _gates,
    "rotary_embedding": _rotary,
    "grouped_linear": _experts,
    "quantized_linear": _quantized,
    "grouped_quantized_linear": _quantized_experts,
    "sample_gumbel": _draws,
    "keep_top_k_top_p": _kept,
    "accept_or_resample": _verified,
    "count_kept": _counted,
}


# ---- attention


def attention(device: torch.device, big: bool = True) -> Iterator[tuple[str, Check]]:
    """Return a check for every attention backend, head shape and cache type of the device."""
    shapes: list[tuple[int, int, int, int | None]] = [(4, 2, 64, None), (8, 1, 128, None), (3, 3, 80, None)]
    shapes += [(8, 2, 256, None), (4, 1, 576, 512)] * big
    cells = (None, torch.int8, torch.float8_e4m3fn)
    kinds = [(shape, torch.bfloat16, cell) for shape in shapes for cell in cells]
    kinds += [(shapes[0], dtype, None) for dtype in (torch.float32, torch.float16)]  # a kernel takes seconds to compile
    for backend in BACKENDS:
        for (heads, kv_heads, dim, value_dim), dtype, cell in kinds:
            shape = AttentionShape(heads, kv_heads, dim, 16, dtype, device, value_dim, cell)
            if backend is not ReferenceAttention and backend.unsupported(shape) is None:
                name = f"{heads}/{kv_heads} x {dim} {str(dtype)[6:]} cache {cell or 'as it is'!s}"
                yield f"attention {backend.name} {name}", partial(_check_attention, backend, shape)


def _check_attention(backend: type[AttentionBackend], shape: AttentionShape) -> None:
    options_of: list[dict[str, Any]] = [{}, {"window": 20}, {"soft_cap": 20.0}, {"sinks": True}]
    if shape.head_dim != 64 or shape.cell is not None:
        options_of = [{}]
    steps = ([1] * 5, [0, 15, 16, 300, 77]), ([40, 1, 130, 7], [0, 64, 33, 0]), ([1], [700]), ([40, 1, 130], [0] * 3)
    for counts, cached in steps:
        for options in options_of:
            result = _attended(backend, shape, counts, cached, dict(options))
            expected = _attended(ReferenceAttention, shape, counts, cached, dict(options))
            assert_close(result, expected, shape.dtype if shape.cell is None else torch.bfloat16)


def _attended(
    kind: type[AttentionBackend], shape: AttentionShape, counts: list[int], cached: list[int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the result of a step. Store tokens in the second of three layers: first those of earlier steps, then those
    of this step. All blocks are moved before the tokens attend.
    """
    torch.manual_seed(1)
    backend = kind(shape)
    device = shape.device
    block = shape.block_size
    lengths = [a + b for a, b in zip(counts, cached, strict=True)]
    width = max(-(-n // block) for n in lengths)
    table = 1 + torch.randperm(len(lengths) * width).view(len(lengths), width).int()
    block_ids = table.flatten().tolist()
    memory = KVMemory(1 + 2 * len(block_ids), 3 * backend.entry_bytes(), device)
    cache = backend.view(memory.blocks, 1)
    if options.get("sinks"):
        options["sinks"] = torch.randn(shape.num_heads, device=device)

    def layout(sizes: list[int], ends: list[int]) -> StepLayout:
        positions = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        slots = [table[r, p // block].long() * block + p % block for r, p in enumerate(positions)]
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        parts = starts, torch.tensor(ends).int(), torch.cat(slots), table
        return StepLayout(
            *(x.to(device) for x in parts),
            longest_prompt=max(sizes) if sizes == ends else 0,
            tokens_per_request=sizes[0] if len(set(sizes)) == 1 else 0,
        )

    for sizes, ends in ((cached, cached), (counts, lengths)):
        if any(sizes):
            k = torch.randn(sum(sizes), shape.num_kv_heads, shape.head_dim).to(device, shape.dtype)
            v = None if shape.value_dim else torch.randn(k.shape).to(device, shape.dtype)
            plan = backend.plan(layout(sizes, ends))
            backend.store(cache, k, v, plan)
    moved = [len(block_ids) + block_id for block_id in block_ids]
    memory.copy_blocks(block_ids, moved)
    data = memory.read(moved)
    memory.blocks.zero_()
    memory.write(moved, data)
    table += len(block_ids)
    plan = backend.plan(layout(counts, lengths))
    q = torch.randn(sum(counts), shape.num_heads, shape.head_dim).to(device, shape.dtype)
    return backend.attend(q, cache, plan, scale=shape.head_dim**-0.5, **options)


# ---- whole models


def tiny_checkpoint(directory: Path) -> Path:
    """Write a checkpoint with Qwen3's architecture, random weights whose outputs cover the whole vocabulary, and the
    bundled model's tokenizer.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from quire.checkpoints.hub import bundled_model

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=2 / parameter.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    model.save_pretrained(directory)
    for file in bundled_model().glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def greedy(device: str, **options: Any) -> None:
    """Check that the engine's greedy tokens in float32 equal those of transformers where the two best logits differ
    clearly.
    """
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 900, (n,), generator=generator).tolist() for n in (1, 15, 16, 17, 100, 333)]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(Path(folder))
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        for prompt, tokens in zip(prompts, greedy_tokens(str(path), prompts, device, **options), strict=True):
            with torch.inference_mode():
                inputs = torch.tensor([prompt + tokens], device=device)
                logits = reference(inputs).logits[0, len(prompt) - 1 : -1].float().cpu()
            best = logits.topk(2, dim=-1)
            are_apart = best.values[:, 0] - best.values[:, 1] > 1e-3
            is_best = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0] == best.values[:, 0]
            assert bool((is_best | ~are_apart).all()), f"a prompt of {len(prompt)} tokens goes on wrongly: {tokens}"


def greedy_tokens(model: str, prompts: list[Any], device: str, **options: Any) -> list[list[int]]:
    """40 tokens for each prompt, from a new engine."""
    from quire import LLM, SamplingParams

    defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "device": device}
    llm = LLM(model, **{**defaults, **options})
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    try:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.shutdown()


def two_ranks(device: str) -> None:
    """Check that two ranks generate the same greedy text as one, with the bundled model. They share a card if there is
    only one.
    """
    from quire.checkpoints.hub import bundled_model

    prompts = ["The sea is", "A sentence that goes on for a while and then", "One"]
    model = str(bundled_model())
    one = greedy_tokens(model, prompts, device)
    two = greedy_tokens(model, prompts, device, tensor_parallel_size=2)
    assert one == two, f"one rank: {one}; two ranks: {two}"
