"""What one decode step launches on a GPU, on one that is not there."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

pytestmark = pytest.mark.slow

# Torch's operations that launch nothing: they make views, allocate memory, or leave their argument as it is.
NO_LAUNCH = {
    "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "empty_strided", "flatten", "contiguous", "_reshape_alias",
}  # fmt: skip
OF_A_LAYER = {"linear": 4, "_add_rms_norm": 2, "prepare_kernel": 1, "attend_kernel": 1, "merge_kernel": 1, "_gate": 1}


@pytest.fixture(scope="module")
def traced() -> dict:
    """The names of all launches of a decode step, greedy and with limits; the lines of machine code with float64."""
    printed = run_on_stand_in("""
        import json
        from quire import LLM, SamplingParams
        llm = LLM(device="cuda", max_num_seqs=4, max_model_len=64, enforce_eager=True)
        def last_step(prompts, **params):
            params = SamplingParams(max_tokens=5, ignore_eos=True, **params)
            with device.traced() as launches:
                llm.generate(prompts, params, use_tqdm=False)
            starts = [i for i, launch in enumerate(launches) if launch.name == "_flat_batch"]
            return launches, launches[starts[-2] : starts[-1]]
        result = {"float64": [], "layers": len(llm.core.executor.runner.model.layers)}
        for name, params in (("greedy", {}), ("limited", {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}),
                             ("random", {"temperature": 0.5})):
            params = {"temperature": 0.0} | params
            launches, step = last_step(["one", "two words"], **params)
            result[name] = [launch.name for launch in step]
            for launch in launches:
                code = launch.kernel.asm["ptx"] if launch.kernel is not None else ""
                result["float64"] += [f"{launch.name}: {line}" for line in code.splitlines() if ".f64" in line]
        compiled = len(device.compilations)
        last_step(["three", "prompts", "are here"], temperature=0.0)
        result["compiled"] = device.compilations[compiled:]
        print(json.dumps(result))
    """)
    result = json.loads(printed.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def counts(names: list[str]) -> Counter[str]:
    short = [name.removeprefix("aten.").partition(".")[0] for name in names]
    return Counter(name for name in short if name not in NO_LAUNCH)


def test_a_layer_launches_no_more_than_it_must(traced):
    launched = counts(traced["greedy"])
    launched["linear"] += launched.pop("_product", 0)  # dense products of few rows
    layers = traced["layers"]
    for name, count in OF_A_LAYER.items():
        head = name == "linear"  # the language-model head is another product
        assert launched.pop(name, 0) <= layers * count + head, name
    assert sum(launched.values()) <= 14, launched  # of the step: inputs, plan, embedding, first norm, sampling


def test_the_sampler_launches_four_kernels_at_most(traced):
    plain = counts(traced["greedy"])
    sampler = Counter({"_gather": 1, "_merge": 1})
    assert counts(traced["random"]) == plain
    limited = Counter({"_survey": 1, "_cutoff": 1, "_gather": 1, "_search": 1})
    assert counts(traced["limited"]) - limited == plain - sampler


def test_no_kernel_contains_float64(traced):
    assert traced["float64"] == []


def test_another_number_of_requests_compiles_no_small_kernel(traced):
    small = ("_flat_batch", "_append_tokens", "_gather", "_merge", "_rms_norm", "_add_rms_norm", "_gate")
    assert [line for line in traced["compiled"] if line.startswith(small)] == []


def test_a_layer_of_llama_in_float8_launches_eleven_kernels_at_most():
    """The norm, rounding and activation before a product write its inputs in 8 bits, and no kernel adds parts."""
    printed = run_on_stand_in("""
        import json
        import tempfile
        from pathlib import Path
        from benchmarks.gpu import goals
        from benchmarks.gpu.shapes import FORMATS, SHAPES, write_config
        from quire import LLM
        counts = []
        for layers in (1, 2):
            config = {**SHAPES["llama-3-8b"], "num_hidden_layers": layers, "quantization_config": FORMATS["fp8"]}
            with tempfile.TemporaryDirectory() as folder:
                path = write_config(Path(folder), config)
                llm = LLM(str(path), load_format="dummy", device="cuda", enforce_eager=True)
            counts.append([len(goals.decoding(device, llm, requests, 64)) for requests in (1, 32)])
        print(json.dumps(counts))
    """)
    one, two = json.loads(printed.splitlines()[-1])
    assert [b - a for a, b in zip(one, two, strict=True)] == [11, 11]
