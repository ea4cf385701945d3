"""Measures performance figures on a device, each as a share of what the device can do. Used by gpu_suite.py."""

from __future__ import annotations

import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels import Kernel, decoding_steps, profiled
from benchmarks.gpu.shapes import SHAPES, write_config
from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.selection import BACKENDS

Figures = dict[str, Any]
SHORT_GAP = 5.0  # microseconds
LIBRARIES = ("flash-attn-3", "flash-attn-4", "flashinfer", "flash-attn", "torch-varlen")  # attention backends


def write_shape(directory: Path, name: str) -> Path:
    """Write a checkpoint without weights, for --load-format dummy, with the bundled model's tokenizer."""
    return write_config(directory, SHAPES[name])


def weight_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of bfloat16 weights that a one-token step reads: all except the embedding rows of other
    tokens."""
    hidden = shape["hidden_size"]
    heads = shape["num_attention_heads"]
    kv_heads = shape["num_key_value_heads"]
    attention = hidden * shape["head_dim"] * 2 * (heads + kv_heads)
    mlp = 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * (attention + mlp) + shape["vocab_size"] * hidden)


class Clock:
    """Seconds of device work, the median of some repetitions. is_cold: empty the device's cache before each one, as the
    model's other layers would.
    """

    def __init__(self, device: torch.device, is_cold: bool = False) -> None:
        self.device = device
        self.other = torch.empty(2**28 if is_cold else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object], repeat: int = 10) -> float:
        run()  # compiles
        times = []
        for _ in range(repeat):
            self.wait()
            self.other.zero_()
            started = time.perf_counter()
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host launches all kernels
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000)
            else:
                run()
                times.append(time.perf_counter() - started)
        return median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def ceilings(device: torch.device, small: bool) -> Figures:
    """Return the bytes read per second, and bfloat16 operations per second."""
    clock = Clock(device)
    data = torch.ones(2**22 if small else 2**31, dtype=torch.float32, device=device)
    n = 256 if small else 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    half = len(data) // 2
    sum_s = clock(data.sum)
    copy_s = clock(lambda: data[:half].copy_(data[half:]))
    product_s = clock(lambda: a @ b)
    figures = {"read_bytes_s": max(data.nbytes / sum_s, data.nbytes / copy_s), "bf16_flop_s": 2 * n**3 / product_s}
    return figures | strides(device, small)


def strides(device: torch.device, small: bool) -> Figures:
    """Return the bytes per second at which one layer's entries of random blocks are copied from a cache of 100 GB, in
    both layouts (kv_cache_layout): at distances of 64 KiB and of 2 MiB, as with Llama-3.1-8B."""
    entry, block = (64 << 10, 2 << 20)
    most = 64 << 20 if small else 100_000_000_000
    if device.type == "cuda":
        torch.cuda.empty_cache()
        most = min(most, int(0.8 * torch.cuda.mem_get_info(device)[0]))
    blocks = most // block
    cache = torch.zeros(blocks * block // 8, dtype=torch.int64, device=device)
    used = min(9216, blocks)  # 256 requests of 576 tokens
    order = torch.randperm(blocks)[:used].to(device)
    clock = Clock(device)
    figures: Figures = {"strides_cache_bytes": cache.nbytes}
    for name, distance in (("64_kib", entry), ("2_mib", block)):
        entries = cache[: blocks * distance // 8].view(blocks, distance // 8)[:, : entry // 8]
        seconds = clock(partial(torch.index_select, entries, 0, order))
        figures[f"stride_{name}_bytes_s"] = 2 * used * entry / seconds
    return figures


# ---- attention


def attention(device: torch.device, ceilings: Figures, small: bool) -> Figures:
    """Compare decoding with the read rate, prompts with the product rate, and torch's own attention with Quire's."""
    kernels: dict[str, list[Kernel]] = {"decode attention, 64 x 4096": [], "prefill attention, 2 x 8192": []}
    decode_kernels, prefill_kernels = kernels.values()
    decode_rate = decoding(device, *((4, 64, 8, 2) if small else (64, 4096, 32, 8)), kernels=decode_kernels)
    prompt = prompts(device, *((1, 128, 4, 4) if small else (2, 8192, 32, 32)), kernels=prefill_kernels)
    grouped = prompts(device, *((1, 128, 4, 2) if small else (2, 8192, 32, 8)))
    return {
        "decode_bytes_s": decode_rate,
        "decode_share": decode_rate / ceilings.get("read_bytes_s", math.nan),
        "prefill_share": prompt["prefill_flop_s"] / ceilings.get("bf16_flop_s", math.nan),
        **prompt,
        **{f"gqa_{name}": figure for name, figure in grouped.items()},
        "kernels": kernels,
    }


def _cache(backend: AttentionBackend, num_blocks: int) -> Tensor:
    """Return the cache of the first of four layers."""
    device = backend.shape.device
    size = 4 * backend.entry_bytes()
    return backend.view(torch.zeros(num_blocks, size, dtype=torch.uint8, device=device), 0)


def _own_backend(shape: AttentionShape) -> AttentionBackend:
    """Return the backend with Quire's own kernels."""
    kind = next(kind for kind in BACKENDS if kind.name in ("triton", "cpu") and kind.unsupported(shape) is None)
    return kind(shape)


def decoding(
    device: torch.device,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    kernels: list[Kernel] | None = None,
) -> float:
    """Return the bytes of keys and values read per second, for a new token of each of `batch` requests. Its kernels are
    appended to `kernels`."""
    shape = AttentionShape(heads, kv_heads, dim, 16, torch.bfloat16, device)
    backend = _own_backend(shape)
    blocks = context // 16
    table = (1 + torch.randperm(batch * blocks)).view(batch, blocks).int().to(device)
    cache = _cache(backend, 1 + batch * blocks)
    starts = torch.arange(batch + 1).int().to(device)
    lengths = torch.full((batch,), context).int().to(device)
    slots = torch.full((batch,), -1).to(device)
    plan = backend.plan(StepLayout(starts, lengths, slots, table, tokens_per_request=1))
    q = torch.randn(batch, heads, dim, device=device).bfloat16()
    run = partial(backend.attend, q, cache, plan, scale=dim**-0.5)
    seconds = Clock(device)(run)
    _profile(run, kernels)
    return batch * context * kv_heads * dim * 2 * 2 / seconds


def prompts(
    device: torch.device,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    kernels: list[Kernel] | None = None,
) -> Figures:
    """Return floating-point operations per second over whole prompts: Quire's kernel on a paged cache, libraries that
    are installed (LIBRARIES), and torch's scaled_dot_product_attention on plain tensors.
    """
    shape = AttentionShape(heads, kv_heads, dim, 16, torch.bfloat16, device)
    backend = _own_backend(shape)
    blocks = length // 16
    table = (1 + torch.arange(batch * blocks)).view(batch, blocks).int().to(device)
    cache = _cache(backend, 1 + batch * blocks)
    slots = (torch.arange(batch * length) + 16).to(device)
    starts = (torch.arange(batch + 1) * length).int().to(device)
    lengths = torch.full((batch,), length).int().to(device)
    layout = StepLayout(starts, lengths, slots, table, longest_prompt=length)
    q, k, v = (torch.randn(batch * length, h, dim, device=device).bfloat16() for h in (heads, kv_heads, kv_heads))
    operations = 4 * batch * heads * length**2 * dim / 2
    clock = Clock(device)

    def rate(backend: AttentionBackend, kernels: list[Kernel] | None = None) -> float:
        plan = backend.plan(layout)
        backend.store(cache, k, v, plan)
        run = partial(backend.attend, q, cache, plan, scale=dim**-0.5)
        seconds = clock(run, 5)
        _profile(run, kernels)
        return operations / seconds

    rates = {"prefill_flop_s": rate(backend, kernels)}
    for kind in (b for b in BACKENDS if b.name in LIBRARIES and b.unsupported(shape) is None):
        try:
            rates[f"prefill_{kind.name}_flop_s"] = rate(kind(shape))
        except Exception as error:  # in a library; Quire's kernel is still measured
            warnings.warn(f"{kind.name}: {error}", stacklevel=2)
    dense = [x.view(batch, length, -1, dim).transpose(1, 2) for x in (q, k, v)]

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=heads != kv_heads)

    return rates | {"prefill_sdpa_flop_s": operations / clock(sdpa, 5)}


def _profile(run: Callable[[], object], kernels: list[Kernel] | None) -> None:
    if kernels is not None:
        with profiled(3, kernels):
            for _ in range(3):
                run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()


# ---- products


def products(device: torch.device, small: bool) -> Figures:
    """Return the seconds of products with the weights of Llama-3.1-8B's first MLP layer: Quire's own kernels and those
    of libraries, in bfloat16 and float8."""
    from quire.ops.reference.quantized import QuantizedMatrix
    from quire.ops.triton import linear

    outs, ins = (1024, 512) if small else (28_672, 4096)
    weight = torch.randn(outs, ins, device=device).bfloat16()
    codes = weight.to(torch.float8_e4m3fn)
    matrix = linear.pack(QuantizedMatrix(codes, torch.ones(outs, 1, device=device), ins, ins))
    clock = Clock(device, is_cold=not small)
    figures: Figures = {}
    for rows in (1, 16, 32, 64, 256, 2048):
        x = torch.randn(rows, ins, device=device).bfloat16()
        rounded = linear.round_rows(x, codes.dtype)
        figures[f"bf16, {rows} rows, own s"] = clock(partial(linear.linear_of_few_rows, x, weight, None))
        figures[f"bf16, {rows} rows, library s"] = clock(partial(torch.nn.functional.linear, x, weight))
        figures[f"fp8, {rows} rows, own s"] = clock(partial(linear.quantized_linear_triton, rounded, matrix, None))
        figures[f"fp8, {rows} rows, library s"] = clock(partial(linear.scaled_mm, rounded, matrix, None))
    return figures


# ---- the engine


def start(path: Path, device: str, **options: Any) -> tuple[Any, float]:
    """Start an engine with random weights. Returns it, and the seconds until it is ready."""
    from quire import LLM

    started = time.perf_counter()
    llm = LLM(str(path), load_format="dummy", device=device, enable_prefix_caching=False, **options)
    return llm, time.perf_counter() - started


def one_stream(llm: Any, tokens: int) -> float:
    """Return the seconds per output token of one request, measured over the second half of the output."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    times = []
    for output in llm.stream([7] * 64, params):
        times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
    half = len(times) // 2
    return (times[-1] - times[half]) / (len(times) - 1 - half)


def many(llm: Any, count: int, longest: int, least: int = 100) -> Figures:
    """nano-vllm's benchmark: requests of random lengths, all at once, sampled at temperature 0.6."""
    from quire import SamplingParams

    draw = random.Random(0)
    inputs = [[draw.randint(3, 10_000) for _ in range(draw.randint(least, longest))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(least, longest), seed=i)
        for i in range(count)
    ]
    llm.generate([[5] * 64], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    return {"output_tok_s": tokens / seconds, "seconds": seconds, "output_tokens": tokens}


def host(llm: Any, steps: int) -> Figures:
    """Measure the host's work in decoding steps: launches and waits, and how long the device is idle between steps."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
    streams = [llm.stream([9 + i] * 64, params) for i in range(8)]
    for _ in range(20):
        for stream in streams:
            next(stream)
    on_gpu = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        torch.profiler.profile(activities=activities[: 1 + on_gpu]) as profiler,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            for stream in streams:
                next(stream)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    for stream in streams:
        stream.close()
    calls: dict[str, int] = {}
    spans = []
    for event in profiler.events():
        calls[event.name] = calls.get(event.name, 0) + 1
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
    launches = sum(n for name, n in calls.items() if name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")))
    copies = sum(n for name, n in calls.items() if name.startswith("cudaMemcpy"))
    waits = sum(n for name, n in calls.items() if "Synchronize" in name)
    hidden_waits = sum("synchronizing" in str(w.message) for w in caught)
    return {
        "launches_a_step": launches / steps,
        "copies_a_step": copies / steps,
        "waits_a_step": waits / steps,
        "hidden_waits": hidden_waits,
        "idle_share": _idle(sorted(spans)),
    }


def _idle(spans: list[tuple[float, float]]) -> float | None:
    """Return the share of the time in which no kernel runs. Short gaps are ignored, since they are between kernels of a
    graph. spans: start and end of each kernel, in microseconds, sorted.
    """
    if not spans:
        return None
    idle = 0.0
    end = spans[0][0]
    for begin, stop in spans:
        idle += begin - end if begin - end > SHORT_GAP else 0.0
        end = max(end, stop)
    return idle / (end - spans[0][0])


def run_figure(figure: str, device: torch.device, small: bool) -> None:
    """Launch the kernels of a figure once, eagerly, so that their launches can be recorded."""
    if figure.startswith("decode attention"):
        decoding(device, *((4, 64, 8, 2) if small else (64, 4096, 32, 8)))
        return
    if figure.startswith("prefill attention"):
        prompts(device, *((1, 128, 4, 4) if small else (2, 8192, 32, 32)))
        return
    shape, case = figure.split(", ")
    requests, context = (1, 320) if case == "one stream" else (256, 576)
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(Path(folder), shape)
        llm, _ = start(path, device.type, enforce_eager=True, max_model_len=4096)
        decoding_steps(llm, min(requests, 4) if small else requests, 40 if small else context, 2)
        llm.shutdown()


def transformers_batch(name: str, count: int, longest: int, least: int = 100) -> Figures:
    """transformers' continuous batching with the same prompts; all outputs have the mean length, which favours it."""
    import transformers

    shape = dict(SHAPES[name])
    kind = getattr(transformers, shape.pop("architectures")[0])
    config = kind.config_class(**{k: v for k, v in shape.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    draw = random.Random(0)
    inputs = [[draw.randint(3, 10_000) for _ in range(draw.randint(least, longest))] for _ in range(count)]
    length = (least + longest) // 2
    options = transformers.GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        model.generate_batch(inputs[:4], generation_config=options, max_new_tokens=4)
        outputs = model.generate_batch(inputs, generation_config=options, record_timestamps=True)
    begin = min(output.created_time for output in outputs.values())  # its memory and graphs are ready at this time
    seconds = max(output.timestamps[-1] for output in outputs.values()) - begin
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if tokens < count * length:
        raise RuntimeError(f"transformers made {tokens} tokens instead of {count * length}")
    return {"output_tok_s": tokens / seconds, "seconds": seconds, "output_tokens": tokens}
