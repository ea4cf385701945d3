"""The check of the machine code: what it reads, that kernels pass it, and that changes for the worse do not."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("triton")
from benchmarks.gpu import check, machine_code
from benchmarks.gpu.cases import OPTIONS, Case, all_cases
from benchmarks.gpu.machine_code import Load, MachineCode, Product
from benchmarks.gpu.rules import broken
from benchmarks.gpu.shapes import SERVED
from quire.platform.gpu.cards import CARDS
from support.stand_in import run_on_stand_in

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0050*/               @P0 BRA 0x30 ;
        /*0060*/              @!P1 BRA 0x20 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
"""


def code(**changes) -> MachineCode:
    """A kernel that breaks no rule."""
    fields = {
        "kernel": "attend_kernel",
        "target": "sm_90",
        "warps": 4,
        "shared": 40_000,
        "registers": 120,
        "spilled": 0,
        "instructions": Counter({"HMMA.16816.F32.BF16": 8, "LDGSTS.E.BYPASS.128": 4}),
        "loops": (),
        "tensor_columns": 0,
        "dots": (Product("mma.sync", 16, 64, 128, "bf16"),),
        "loads": Counter({Load("cache", "bf16", 4096, 16): 4}),
        "float64": (),
    }
    return MachineCode(**(fields | changes))


def rules_broken(card: str = "sm_90", **changes) -> list[str]:
    return [line.split(":")[0].split(" of ")[0] for line in broken("attend_kernel", code(**changes), CARDS[card])]


def test_loops_are_found_with_their_nesting_and_without_their_inner_loops():
    loops = sorted(machine_code._loops(list(machine_code._sass(SASS))), key=lambda loop: loop.depth)
    assert [loop.depth for loop in loops] == [1, 2]
    outer, inner = loops
    assert inner.instructions == {"HMMA.16816.F32.BF16": 1, "LDG.E": 1, "BRA": 1}
    assert outer.instructions == {"LDGSTS.E.BYPASS.128": 1, "BRA": 1}
    assert (outer.is_innermost, inner.is_innermost) == (False, True)
    assert (outer.bytes_loaded, inner.bytes_loaded) == (16 * 32, 4 * 32)


def test_the_programs_of_a_processor_follow_from_registers_shared_memory_warps_and_tensor_memory():
    card = CARDS["sm_90"]
    assert code(registers=128, warps=8, shared=0).programs(card) == 2
    assert code(registers=168, warps=8, shared=0).programs(card) == 1
    assert code(registers=32, warps=4, shared=100_000).programs(card) == 2
    assert code(registers=32, warps=16, shared=0).programs(card) == 4
    assert code(registers=32, shared=0, tensor_columns=256).programs(CARDS["sm_100"]) == 2
    assert code(shared=card.shared_memory + 1).programs(card) == 0


def test_a_kernel_that_is_as_it_should_be_breaks_no_rule():
    assert rules_broken() == []


@pytest.mark.parametrize(
    ("rule", "card", "changes"),
    [
        ("shared memory", "sm_120", {"shared": 110_000}),
        ("programs", "sm_120", {"shared": 60_000}),
        ("programs", "sm_90", {"registers": 255, "warps": 8}),
        ("spills", "sm_90", {"spilled": 4}),
        ("float64", "sm_90", {"float64": ("DADD",)}),
        ("product", "sm_90", {"dots": (Product("fma", 16, 64, 128, "bf16"),)}),
        ("product", "sm_90", {"dots": (Product("mma.sync", 64, 64, 128, "bf16"),)}),
        ("product", "sm_100", {"dots": (Product("mma.sync", 128, 64, 128, "bf16"),)}),
        ("product", "sm_90", {"instructions": Counter({"FFMA": 8})}),
        (
            "narrow loads",
            "sm_90",
            {"loads": Counter({Load("cache", "bf16", 4096, 2): 4, Load("cache", "bf16", 4096, 16): 4})},
        ),
        ("narrow loads", "sm_90", {"loads": Counter({Load("elsewhere", "bf16", 4096, 16): 4})}),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_named(rule, card, changes):
    assert rules_broken(card, **changes) == [rule]


def test_a_small_tile_may_be_loaded_with_fewer_bytes_a_thread():
    loads = {Load("cache", "i8", 2048, 16): 4, Load("cache", "i8", 1024, 8): 4}  # the parts of a head of 96
    assert rules_broken(loads=Counter(loads)) == []
    assert rules_broken(loads=Counter({Load("cache", "i8", 1024, 4): 4})) == ["narrow loads"]


def test_scales_beside_one_byte_cells_may_be_loaded_four_bytes_at_a_time():
    assert rules_broken(loads=Counter({Load("cache", "i8", 4096, 16): 4, Load("cache", "f32", 4096, 4): 4})) == []


def test_products_in_float32_need_no_tensor_cores():
    assert (
        rules_broken(dots=(Product("fma", 64, 64, 128, "f32"),), loads=Counter({Load("cache", "f32", 4096, 16): 4}))
        == []
    )


def test_every_pair_of_options_occurs_on_every_card_and_every_option_with_every_model():
    cases = all_cases(["sm_80", "sm_90"])
    values = [(name, value) for name, listed in OPTIONS.items() for value in listed]
    for card in ("sm_80", "sm_90"):
        for a in values:
            for b in values:
                is_possible = a[0] != b[0]
                assert not is_possible or any(
                    c.card == card and c.option(a[0]) == a[1] and c.option(b[0]) == b[1] for c in cases
                )
    for model in SERVED:
        for name, value in values:
            assert any(c.model == model and c.option(name) == value for c in cases)


def test_a_case_is_found_again_by_its_name():
    for case in all_cases(["sm_80"]):
        assert Case.parse(case.name) == case


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm_80", "sm_90"])
def test_the_kernels_of_a_small_model_pass(card):
    printed = run_on_stand_in(
        f"""
        import json
        from benchmarks.gpu.check import run_case
        from benchmarks.gpu.cases import Case
        print(json.dumps(run_case(Case.parse("{card} qwen3-0.6b/1 enforce_eager=True"), device)))
    """,
        card,
    )
    result = json.loads(printed.splitlines()[-1])
    assert (result["state"], result.get("reason")) == ("done", None)
    assert {"attend_kernel", "_gather", "_flat_batch", "_count_kept", "_accept_or_resample"} <= {
        kernel["name"] for kernel in result["kernels"]
    }
    assert [(kernel["name"], kernel["broken"]) for kernel in result["kernels"] if kernel["broken"]] == []


MUTATIONS = """
    import importlib.util, json, pathlib, re, sys, tempfile
    import torch
    import quire.attention.triton.attention_backend as backends
    import quire.ops.triton.attention as kernels
    from benchmarks.gpu.rules import judged
    from quire.attention.base import AttentionShape, StepLayout
    from quire.platform.gpu.cards import CARDS

    gpu = torch.device("cuda", 0)

    def attend(decodes, change=None, **options):
        # The rules that attention of llama-3-8b breaks, after a change of the kernel's source or of its launch
        source = pathlib.Path(kernels.__file__).read_text()
        if change is not None:
            changed = re.sub(*change, source, count=1)
            assert changed != source, change
            path = pathlib.Path(tempfile.mkdtemp()) / "mutant.py"
            path.write_text(changed)
            spec = importlib.util.spec_from_file_location("mutant", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = kernels
        kernel = module.attend_kernel

        class Launcher:
            def __getitem__(self, grid):
                def launch(*arguments, **given):
                    named = dict(zip(kernel.arg_names, arguments, strict=False)) | given
                    for name, factor in options.items():
                        named[name] = int(named[name] * factor)
                    return kernel[grid](**named)
                return launch

        backends.attend_kernel = Launcher()
        backend = backends.TritonAttention(AttentionShape(32, 8, 128, 16, torch.bfloat16, gpu))
        tokens, requests, context = (64, 64, 4096) if decodes else (8192, 1, 8192)
        each = tokens // requests
        i32 = dict(dtype=torch.int32, device=gpu)
        layout = StepLayout(
            torch.empty(requests + 1, **i32), torch.empty(requests, **i32),
            torch.empty(tokens, dtype=torch.int64, device=gpu), torch.empty(requests, context // 16, **i32),
            tokens_per_request=each if decodes else 0,
        )
        cache = backend.view(torch.empty(9, 4 * backend.entry_bytes(), dtype=torch.uint8, device=gpu), 0)
        q = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device=gpu)
        with device.traced() as launches:
            backend.attend(q, cache, backend.plan(layout), scale=0.1)
        launch = next(x for x in launches if x.kernel is not None and x.name == "attend_kernel")
        return judged(launch, device.card)["broken"]

    print(json.dumps({
        "prompts": attend(False),
        "decoding": attend(True),
        "a tile doubled": attend(False, KEYS=2, ROWS=2, TOKENS=2),
        "a load made scalar": attend(True, (r"slot \\* DIM", "slot * (DIM + 1)")),
        "a float64 constant": attend(
            True, (r"tl\\.zeros\\(\\[ROWS\\], tl\\.float32\\)", "tl.full([ROWS], 0.0, tl.float64)")
        ),
        "a spilled loop": attend(False, num_warps=0.25),
    }))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("card", ["sm_90", "sm_120"])
def test_changes_for_the_worse_fail_the_check(card):
    broken = json.loads(run_on_stand_in(MUTATIONS, card).splitlines()[-1])
    assert broken.pop("prompts") == []
    assert broken.pop("decoding") == []
    print(json.dumps(broken, indent=1))
    assert {line.split(":")[0] for line in broken["a tile doubled"]} & {"shared memory", "programs", "spills"}
    assert any(line.startswith("narrow loads of cache (bf16)") for line in broken["a load made scalar"])
    assert any(line.startswith("float64") for line in broken["a float64 constant"])
    assert any(line.startswith("spills") for line in broken["a spilled loop"])


def test_a_result_is_valid_as_long_as_the_sources_of_its_kernels_are_the_same(tmp_path, monkeypatch):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        check._files.cache_clear()

    monkeypatch.setattr(check, "ROOT", tmp_path)
    for name in check.JUDGES:
        write(name, "")
    write("quire/ops/triton/float8.py", "def to_float8(x):\n")
    write("quire/ops/triton/linear.py", "from quire.ops.triton.float8 import to_float8\ndef _product(x):\n")
    result = {"case": "sm_90 a/1", "triton": "3.9.0", "state": "done", "kernels": [{"name": "_product"}]}
    result["key"] = check.key(result)
    write("quire/ops/triton/drafts.py", "def _count_kept(x):\n")  # a new kernel
    assert check.is_valid(result)
    for name in ("quire/ops/triton/float8.py", "quire/ops/triton/linear.py", *check.JUDGES):
        before = (tmp_path / name).read_text()
        write(name, before + "# changed\n")
        assert not check.is_valid(result)
        write(name, before)
    assert check.is_valid(result)
    assert not check.is_valid(result | {"state": "crashed"})
    assert not check.is_valid(None)
    check._files.cache_clear()
