"""--batch-invariant on a GPU that is not there: which kernels an engine launches, and that batches share them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from support.checkpoints import Checkpoints
from support.stand_in import run_on_stand_in

# Operations of torch whose sums depend on the number of rows, or on the place of a row
DEPENDENT = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum", "mean", "_log_softmax", "log_softmax")
DEPENDENT += ("logsumexp", "cumsum", "norm", "linalg_vector_norm", "var", "std", "var_mean")

ENGINE = """
    import json
    from quire import LLM, SamplingParams
    llm = LLM({path!r}, device="cuda", dtype="bfloat16", max_num_seqs=4, max_model_len=64, load_format={load_format!r},
              batch_invariant=True, **{options!r})
    prompts = [dict(prompt_token_ids=list(range(5, 5 + n))) for n in (1, 7, 30)]
    ways = [SamplingParams(max_tokens=4, ignore_eos=True, **more) for more in
            (dict(temperature=0), dict(seed=1, top_k=5, top_p=0.9, min_p=0.1), dict(seed=2, prompt_logprobs=2))]
    with device.traced() as launches:
        llm.generate(prompts, ways, use_tqdm=False)
    print(json.dumps(sorted(dict.fromkeys(launch.name for launch in launches))))
"""


def launched(path: Path | None, card: str = "sm_90", **options: object) -> set[str]:
    """The names of the kernels and of torch's operations that a generating engine launches."""
    load_format = "auto" if path is None else "dummy"
    code = ENGINE.format(path=str(path) if path else None, options=options, load_format=load_format)
    return {
        name.split(".")[1] if name.startswith("aten.") else name
        for name in json.loads(run_on_stand_in(code, card).splitlines()[-1])
    }


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in ("int8", "int4"))])
def test_an_engine_multiplies_no_matrices_by_cublas(quantization: str | None) -> None:
    names = launched(None, quantization=quantization)
    assert ("_dense" if quantization is None else "_product") in names
    assert names.intersection(DEPENDENT) == set()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt_oss", "qwen3_moe", "olmo2", "gpt2", "cohere", "mixtral"])
def test_that_holds_for_every_kind_of_layer(variant: str, checkpoints: Checkpoints) -> None:
    names = launched(checkpoints.path(variant))
    assert "_dense" in names
    assert names.intersection(DEPENDENT) == set()


@pytest.mark.nightly
def test_one_row_and_many_are_computed_by_the_same_machine_code() -> None:
    """Only the dense product has a second form, for few rows, with the same tile."""
    printed = run_on_stand_in("""
        import torch
        from quire.ops import Kernels, Target
        from quire.ops.reference.quantized import QuantizedMatrix
        gpu = torch.device("cuda", 0)
        kernels = Kernels(Target(gpu, torch.bfloat16, batch_invariant=True))

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device=gpu)

        int4 = kernels.quantized_linear.pack(QuantizedMatrix(
            empty(512, 256, dtype=torch.uint8), empty(512, 4, dtype=torch.float32), 128, 512))
        experts = empty(4, 512, 512)
        offsets = empty(5, dtype=torch.int64)
        calls = dict(
            linear=lambda x: kernels.linear(x, empty(4096, 512), None),
            quantized=lambda x: kernels.quantized_linear(x, int4, None),
            experts=lambda x: kernels.grouped_linear(x, experts, None, offsets),
            norm=lambda x: kernels.rms_norm(x, empty(512), 1e-6),
        )
        for name, call in calls.items():
            used = []
            for rows in (1, 2, 16, 17, 64, 130, 1000):
                with device.traced() as launches:
                    call(empty(rows, 512))
                used.append([launch for launch in launches if launch.kernel is not None])
            tiles = {tuple(sorted((k, v) for k, v in launch.arguments.items() if k in ("ROWS", "OUTS", "INS", "KIND")))
                     for launches in used for launch in launches if launch.name in ("_dense", "_product")}
            codes = {tuple(launch.kernel.hash for launch in launches) for launches in used}
            print(name, len(tiles), len(codes))
    """)
    counts = {name: (int(tiles), int(codes)) for name, tiles, codes in map(str.split, printed.splitlines()[-4:])}
    assert counts == {"linear": (1, 1), "quantized": (1, 1), "experts": (1, 1), "norm": (0, 1)}
