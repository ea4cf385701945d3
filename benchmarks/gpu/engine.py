"""An engine of a case on a simulated GPU, and requests that launch every kind of kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.gpu.cases import Case
from benchmarks.gpu.shapes import FORMATS, few_layers, write_config

if TYPE_CHECKING:
    from quire import LLM

MAX_MODEL_LEN = 8192
_SWITCHES = ("enforce_eager", "batch_invariant", "enable_lora")


def start(case: Case, folder: Path) -> LLM:
    """Start an engine with one rank of the model and dummy weights. Raises ValueError if Quire rejects the options."""
    from quire import LLM
    from quire.parallel.mesh import Communicator, Mesh

    config = few_layers(case.model.shape)
    quantization: str | None = case.option("quantization")
    if quantization in FORMATS:
        config["quantization_config"] = FORMATS[quantization]
        quantization = None
    options: dict[str, Any] = {"quantization": None if quantization == "none" else quantization}
    options |= {name: case.option(name) for name in ("dtype", "kv_cache_dtype")}
    options |= {name: value == "True" for name, value in case.options if name in _SWITCHES}
    if case.option("kv_compression"):
        options["kv_compression"] = {"method": case.option("kv_compression")}
    mesh = Mesh(tp=Communicator(0, case.model.ranks)) if case.model.ranks > 1 else Mesh()
    if (dcp := int(case.option("decode_context_parallel_size") or 1)) > 1:
        mesh = replace(mesh, dcp=Communicator(0, dcp))
    if (cp := int(case.option("prefill_context_parallel_size") or 1)) > 1:
        mesh = replace(mesh, cp=Communicator(0, cp))
    longest = min(MAX_MODEL_LEN, config["max_position_embeddings"])
    path = write_config(folder / "model", config)
    with mock.patch("quire.executor.uniproc.Mesh", return_value=mesh):
        return LLM(
            str(path), device="cuda", load_format="dummy", max_model_len=longest, enable_prefix_caching=False, **options
        )


def serve(llm: LLM, folder: Path) -> None:
    """Run requests with short and long prompts, steps that mix prompts and decoding, few and many rows, and every
    sampling method. folder: for an adapter.
    """
    from benchmarks.lora import write_adapter
    from quire import SamplingParams

    def prompts(lengths: list[int]) -> list[Any]:
        return [[1 + i % 97 for i in range(length)] for length in lengths]

    longest = llm.max_model_len - 8
    adapter = None
    if llm.frontend.pooling is not None:
        for lengths in ([10], [1], [longest], [5, 1000, 20], [12] * 70):
            llm.embed(prompts(lengths), use_tqdm=False)
        return
    if llm.config.lora.enable_lora:
        adapter = write_adapter(folder / "adapter", layers=1, rank=16, seed=0)

    def run(lengths: list[int], tokens: int = 4, **params: Any) -> None:
        options = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
        llm.generate(prompts(lengths), options, use_tqdm=False, lora_request=adapter)

    run([10], temperature=0)
    run([1], temperature=0)
    run([longest], temperature=0)
    run([longest // 2, longest, 3, longest - 5, 17], temperature=0)  # more than a step: prompts together with decoding
    run([5, min(1000, longest), 20], temperature=0.7, seed=1)
    run([7] * 3, top_k=5, seed=1)
    run([7] * 5, top_p=0.9)
    run([7] * 2, top_k=40, top_p=0.8, min_p=0.05)
    run([33] * 2, temperature=0, logprobs=5, prompt_logprobs=2)
    run([7] * 2, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)
    run([7] * 2, structured_outputs={"regex": "[ab]+c"})
    run([7], n=3, logit_bias={5: 1.0}, min_tokens=2, bad_words=[])
    for rows in (9, 70, 256):
        run([12] * rows, tokens=3, temperature=0)
