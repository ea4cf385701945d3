"""The goals on paper for Llama-3.1-8B on an H200: shares of the roofline of whole steps, and the parts of a step with
Quire's own kernels and with those of libraries.

    python -m benchmarks.gpu.goals [--docs docs/gpu.md]

Launches are traced on the simulated card. A step's roofline is the sum of those of its launches. Requests have the
contexts of first_contact.sh.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import published
from benchmarks.gpu.launches import Step, library_product, plans_of, works
from benchmarks.gpu.model import Work, estimate, roofline
from benchmarks.gpu.rates import RATES

CARD = "H200"
SHAPE = "llama-3-8b"
LAYERS = 32
HEADS = 32
KV_HEADS = 8
DIM = 128
PRODUCTS = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))  # outputs, inputs of a layer
BATCHES = ((1, 320), (32, 576), (256, 576))  # requests, tokens of each
PROMPT = 8192
GOAL = 75  # % of the roofline
BEGIN = "<!-- goals -->"
END = "<!-- end of goals -->"


@dataclass(frozen=True)
class Time:
    """The launches of a step or of a part of it. seconds: of the model. ideal: of the roofline. moved: bytes between
    memory and the chip."""

    launches: float
    seconds: float
    ideal: float
    moved: float

    @property
    def share(self) -> float:
        return 100 * self.ideal / self.seconds

    def plus(self, other: Time, times: float) -> Time:
        return Time(
            self.launches + times * other.launches,
            self.seconds + times * other.seconds,
            self.ideal + times * other.ideal,
            self.moved + times * other.moved,
        )


def time_of(parts: Iterable[Work]) -> Time:
    rates = RATES[CARD]
    listed = list(parts)
    seconds = sum(estimate(work, rates).seconds for work in listed)
    moved = sum(work.programs * work.moved for work in listed)
    return Time(len(listed), seconds, sum(roofline(work, rates) for work in listed), moved)


# ---- whole steps


def steps(device: Any, quantization: str | None) -> dict[str, Time]:
    """Return the steps of all batches and of a prompt. A model is traced with one and with two layers, as in
    expect.py."""
    from benchmarks.gpu.shapes import FORMATS, SHAPES, write_config
    from quire import LLM

    traced: list[dict[str, Time]] = []
    for layers in (1, 2):
        config = {**SHAPES[SHAPE], "num_hidden_layers": layers, "max_position_embeddings": PROMPT + 16}
        if quantization is not None:
            config["quantization_config"] = FORMATS[quantization]
        with tempfile.TemporaryDirectory() as folder:
            path = write_config(Path(folder), config)
            options: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}
            llm = LLM(str(path), load_format="dummy", device="cuda", max_num_batched_tokens=PROMPT, **options)
        found = {f"{n} request{'s' * (n > 1)}": time_of(decoding(device, llm, n, context)) for n, context in BATCHES}
        prompt = prefill(device, llm)
        found[f"a prompt of {PROMPT:,}"] = time_of(prompt)
        library = [fa3_prefill() if work.name == "attend_kernel" else work for work in prompt]
        found[f"a prompt of {PROMPT:,}, FlashAttention 3"] = time_of(w for w in library if w.name != "merge_kernel")
        traced.append(found)
    one, two = traced
    return {name: time.plus(two[name].plus(time, -1), LAYERS - 1) for name, time in one.items()}


def decoding(device: Any, llm: Any, requests: int, context: int) -> list[Work]:
    """Return the work of a decoding step on the simulated card."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with device.traced() as launches:
        llm.generate([[7] * 16] * requests, params, use_tqdm=False)
    starts = [i for i, launch in enumerate(launches) if launch.name.startswith("aten.embedding")]
    described = Step((1,) * requests, (context,) * requests, plans_of(launches))
    return _works(launches[starts[-2] : starts[-1]], described)


def prefill(device: Any, llm: Any) -> list[Work]:
    """Return the work of the step of a prompt."""
    from quire import SamplingParams

    with device.traced() as launches:
        llm.generate([[7] * PROMPT], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    start = next(i for i, launch in enumerate(launches) if launch.name.startswith("aten.embedding"))
    return _works(launches[start:], Step((PROMPT,), (PROMPT,), plans_of(launches)))


def _works(launches: Sequence[Any], step: Step) -> list[Work]:
    return [work for launch in launches for work in works(launch, RATES[CARD], step)]


# ---- parts of a step: own kernels and libraries


@dataclass(frozen=True)
class Part:
    """A part of a layer. own, library: None if there is none. is_library: whether the rules choose the library's.
    checks: the names with which the published kernels begin that the model must predict."""

    name: str
    own: Time | None
    library: Time | None
    is_library: bool
    checks: tuple[str, ...]

    @property
    def chosen(self) -> Time:
        chosen = self.library if self.is_library else self.own
        assert chosen is not None
        return chosen


def fa3_prefill() -> Work:
    """Return FlashAttention 3's work for the attention of the prompt."""
    sizes = (CARD, 1, HEADS, PROMPT, DIM, True)
    return published.attention("fa3", *sizes, *published.FA3_TILES[DIM], 8, 2, 2)


def fa3_decoding(requests: int, context: int) -> Work:
    """Return FlashAttention 3's work for decoding, which only reads the cache: with 128 keys in flight in each
    multiprocessor."""
    processors = RATES[CARD].card.processors
    size = requests * context * KV_HEADS * DIM * 2 * 2.0 / processors
    return Work(
        "fa3", processors, moved=size, cached=size, in_flight=2 * 128 * DIM * 2, products=size * 4, synchronous=False
    )


def products(device: Any, rows: int, is_float8: bool) -> Part:
    """Return the products of a layer."""
    import torch

    from quire.ops.reference.quantized import QuantizedMatrix, RoundedRows
    from quire.ops.triton import linear

    gpu = torch.device("cuda", 0)
    size = 1 if is_float8 else 2
    libraries = [work for outs, ins in PRODUCTS for work in library_product(RATES[CARD], rows, outs, ins, size)]
    own: list[Work] = []
    with device.traced() as launches:
        for outs, ins in PRODUCTS:
            if is_float8:
                codes = torch.empty(outs, ins, dtype=torch.float8_e4m3fn, device=gpu)
                scales = torch.empty(outs, 1, dtype=torch.float32, device=gpu)
                matrix = linear.pack(QuantizedMatrix(codes, scales, ins, ins))
                x = torch.empty(rows, ins, dtype=codes.dtype, device=gpu)
                rounded = RoundedRows(x, torch.empty(rows, device=gpu), torch.bfloat16)
                linear.quantized_linear_triton(rounded, matrix, None)
            else:
                weight = torch.empty(outs, ins, dtype=torch.bfloat16, device=gpu)
                linear.linear_of_few_rows(weight.new_empty(rows, ins), weight, None)
    own = _works([launch for launch in launches if launch.kernel is not None], Step((1,), (1,)))
    is_library = rows > (64 if is_float8 else 16)
    checks = ("CUTLASS, fp8", "DeepGEMM, fp8") if is_float8 else ("cuBLAS", "gpt-fast")
    name = f"4 products, {'fp8' if is_float8 else 'bf16'}, {rows:,} row{'s' * (rows > 1)}"
    return Part(name, time_of(own) if own else None, time_of(libraries), is_library, checks)


def attention_parts(device: Any) -> list[Part]:
    from benchmarks.gpu import skew

    def own(counts: tuple[int, ...], lengths: tuple[int, ...]) -> Time:
        found = skew.launches(device, counts)
        kernels = [launch for launch in found if launch.name != "plan_kernel"]
        return time_of(_works(kernels, Step(counts, lengths, plans_of(found))))

    parts = []
    memory_bound = ("FlashMLA",)
    for requests, context in BATCHES:
        lengths = (context,) * requests
        library = time_of([fa3_decoding(requests, context)])
        parts.append(
            Part(f"attention, {requests} x {context}", own((1,) * requests, lengths), library, False, memory_bound)
        )
    counts, skewed, even = skew.steps()["decode"]
    for name, lengths in ((f"{skew.LONG:,} tokens and 255 x {skew.SHORT}", skewed), (f"256 x {even[0]}", even)):
        parts.append(Part(f"attention, {name}", own(counts, lengths), None, False, memory_bound))
    prompt = own((PROMPT,), (PROMPT,))
    parts.append(
        Part(
            f"attention, a prompt of {PROMPT:,}",
            prompt,
            time_of([fa3_prefill()]),
            True,
            ("FlashAttention-3, head 128",),
        )
    )
    return parts


def errors(names: tuple[str, ...]) -> str:
    """Return the range of errors of the model for published kernels."""
    found = [kernel.error() for kernel in published.KERNELS if kernel.name.startswith(names)]
    return f"{len(found)}: {min(found):+.0%} to {max(found):+.0%}" if len(found) > 1 else f"1: {found[0]:+.0%}"


# ---- reports


def document(whole: dict[str, dict[str, Time]], parts: list[Part]) -> str:
    lines = [
        "| weights | step | launches | GB moved | expected, ms | roofline, ms | share (goal: 75 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    for weights, found in whole.items():
        for name, time in found.items():
            share = f"{time.share:.0f} %" if time.share >= GOAL or "prompt" in name else f"**{time.share:.0f} %**"
            times = f"{time.moved / 1e9:.1f} | {1e3 * time.seconds:.2f} | {1e3 * time.ideal:.2f}"
            lines.append(f"| {weights} | {name} | {time.launches:.0f} | {times} | {share} |")
    lines += [
        "",
        "| part of a layer | own, µs (launches) | library, µs (launches) | chosen | share of the roofline "
        "| published kernels, errors |",
        "|---|---|---|---|---|---|",
    ]
    for part in parts:
        cells = [_cell(part.own), _cell(part.library), "library" if part.is_library else "own"]
        lines.append(f"| {part.name} | {' | '.join(cells)} | {part.chosen.share:.0f} % | {errors(part.checks)} |")
    lines += ["", "| sum over 6 ranks (H100) | published, µs | predicted, µs | error |", "|---|---|---|---|"]
    lines += [
        f"| {found.name} | {found.seconds * 1e6:.0f} | {found.predicted * 1e6:.0f} | {found.error:+.0%} |"
        for found in published.SUMS
    ]
    return "\n".join(lines)


def _cell(time: Time | None) -> str:
    return "" if time is None else f"{1e6 * time.seconds:.1f} ({time.launches:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="write the tables between the markers of this file")
    arguments = parser.parse_args()
    from benchmarks.gpu.tracing import stand_in

    warnings.simplefilter("ignore")
    with stand_in(RATES[CARD].card) as device:
        whole = {"bf16": steps(device, None), "fp8": steps(device, "fp8")}
        parts = [products(device, rows, is_float8) for is_float8 in (False, True) for rows in (1, 32, 256, PROMPT)]
        parts += attention_parts(device)
    text = document(whole, parts)
    print(text)
    if arguments.docs is not None:
        before, rest = arguments.docs.read_text().split(BEGIN, 1)
        arguments.docs.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
