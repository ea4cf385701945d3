"""Adapters in an engine: tables, slots, the prefix cache, errors, and together with other features."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from quire.executor.multiproc import MultiprocExecutor
from quire.lora import LoRARequest
from quire.lora.checkpoint import read_adapter
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from support.adapters import OPTIONS, adapted_tokens, certain_tokens, check, merged, modules_of, write_adapter
from support.engines import GREEDY, assert_nothing_is_left, assert_preempted, core_request, finish, make_llm, runner_of
from support.late_device import run_late
from support.reference import prompts
from support.staged_ranks import StagedExecutor
from support.waiting import LONGEST

TEXTS = prompts(300, 10)
ATTENTION = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.2.self_attn.o_proj": (64, 64)}


@pytest.fixture(scope="module")
def base(checkpoints) -> Path:
    return checkpoints.path("llama")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[Path]:
    """Five adapters for all layers."""
    folder, modules = tmp_path_factory.mktemp("adapters"), modules_of(make_llm(base, **OPTIONS), embedding=False)
    return [write_adapter(folder / f"a{i}", modules, rank=4, seed=i) for i in range(5)]


@pytest.fixture(scope="module")
def wanted(base, adapters, tmp_path_factory) -> list[list[list[int]]]:
    """By adapter, the tokens of the merged models."""
    folder = tmp_path_factory.mktemp("merged")
    return [certain_tokens(make_llm(merged(base, a, folder / a.name)), TEXTS) for a in adapters]


@pytest.mark.parametrize("variant", ["llama", "qwen2", "opt-post-norm-projections"])
def test_embedding_and_head(checkpoints, tmp_path, variant):
    """With a table for both, too, where each of the two modules changes its own use of it."""
    base = checkpoints.path(variant)
    llm = make_llm(base, **OPTIONS)
    tables = {m: size for m, size in modules_of(llm).items() if "lm_head" in m or "embed_tokens" in m}
    [embedding] = [module for module in tables if "embed_tokens" in module]
    adapter = write_adapter(tmp_path / "tables", tables, rank=4, embeddings=[embedding])
    without = certain_tokens(make_llm(base), TEXTS)
    check(adapted_tokens(llm, TEXTS, [None] * len(TEXTS)), without)
    expected = certain_tokens(make_llm(merged(base, adapter, tmp_path / "merged")), TEXTS)
    assert expected != without
    check(adapted_tokens(llm, TEXTS, [adapter] * len(TEXTS)), expected)
    check(adapted_tokens(llm, TEXTS, [adapter, None] * 5), [(expected, without)[i % 2][i] for i in range(10)])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("max_loras", "max_cpu_loras", "backend"),
    [
        (2, 3, "cpu"),
        *(
            pytest.param(*sizes, backend, marks=pytest.mark.sampled(5))
            for sizes in [(1, 1), (2, 3), (5, 5)]
            for backend in ("cpu", "reference")
            if (*sizes, backend) != (2, 3, "cpu")
        ),
    ],
)
def test_more_adapters_than_slots_take_turns(base, adapters, wanted, backend, max_loras, max_cpu_loras):
    options = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "max_lora_rank": 6, "enable_lora": True}
    llm = make_llm(base, backend, **options)
    texts = TEXTS + TEXTS
    which = [i % 5 for i in range(len(texts))]
    most = 0
    slots = runner_of(llm).batch.adapters
    flatten = runner_of(llm).batch.flatten

    def counting(step):
        nonlocal most
        most = max(most, len({*slots[step.rows].tolist()} - {-1}))
        return flatten(step)

    runner_of(llm).batch.flatten = counting
    for _ in range(2):
        made = adapted_tokens(llm, texts, [adapters[i] for i in which])
        check(made, [wanted[a][i % len(TEXTS)] for i, a in enumerate(which)])
    assert most == max_loras
    assert len(runner_of(llm).adapters._loaded) <= max_cpu_loras


@pytest.mark.sampled(2)
@pytest.mark.parametrize("captured", [pytest.param(False, marks=pytest.mark.sampled(4)), True], ids=["eager", "graphs"])
def test_two_steps_in_flight(base, adapters, wanted, captured):
    """On a device that works late: an adapter's slot is not overwritten before the steps that use it have run."""
    llm = make_llm(base, max_num_batched_tokens=48, max_num_seqs=8, **{**OPTIONS, "max_loras": 2, "max_cpu_loras": 3})
    device = run_late(llm, captured=captured)
    for _ in range(2):
        made = adapted_tokens(llm, TEXTS, [adapters[i % 5] for i in range(len(TEXTS))])
        check(made, [wanted[i % 5][i] for i in range(len(TEXTS))])
    assert device.most_in_flight == 2


def test_preempted_requests_keep_their_adapter(base, adapters, wanted):
    llm = make_llm(base, num_gpu_blocks_override=24, max_num_seqs=8, **OPTIONS)
    made = adapted_tokens(llm, TEXTS, [adapters[i % 3] for i in range(len(TEXTS))])
    check(made, [wanted[i % 3][i] for i in range(len(TEXTS))])
    assert_preempted(llm)


def test_requests_go_on_while_an_adapter_is_read(base, adapters, wanted, monkeypatch):
    """Each step gives them a token, however long it takes. Then the request that waited runs."""
    llm, may_read = make_llm(base, **OPTIONS), threading.Event()

    def slow(directory: Path) -> Any:
        assert may_read.wait(LONGEST)
        return read_adapter(directory)

    monkeypatch.setattr("quire.lora.store.read_adapter", slow)
    core = llm.core
    core.add_request(core_request(llm, "plain", TEXTS[0]))
    adapter = llm.frontend.adapter(LoRARequest("a", 1, str(adapters[0])))
    params = GREEDY.clone(max_tokens=24)
    [waiting] = llm.processor.process("waiting", TEXTS[1], params, adapter=adapter).core_requests
    core.add_request(waiting)
    for _ in range(30):
        assert [(o.request_id, len(o.new_token_ids)) for o in core.step()] == [("plain", 1)]
    may_read.set()
    made = finish(core)
    assert [len(made[name][0]) for name in ("plain", "waiting")] == [34, 24]
    check([made["waiting"][0]], [wanted[0][1]])
    assert_nothing_is_left(core)


def test_an_aborted_request_gives_its_slot_back(base, adapters):
    llm = make_llm(base, enable_lora=True, max_lora_rank=8)
    core = llm.core
    for index in range(3):  # one runs, two wait for its slot
        adapter = llm.frontend.adapter(LoRARequest("a", 1, str(adapters[index])))
        [request] = llm.processor.process(str(index), TEXTS[0], GREEDY, adapter=adapter).core_requests
        core.add_request(request)
    while not core.scheduler.running:
        core.step()
    core.abort_requests(["1"])
    core.step()
    core.abort_requests(["0"])
    made = finish(core)
    assert (len(made["2"][0]), made["2"][1]) == (64, "length")
    assert_nothing_is_left(core)


def test_steps_without_adapters_are_recorded_without_them(base, adapters, wanted):
    """And those with adapters are replayed for any mixture of them."""
    llm = make_llm(base, **OPTIONS)
    recorded = runner_of(llm).forward._recorded
    plain = adapted_tokens(llm, TEXTS, [None] * len(TEXTS))
    assert {size.adapted for size in recorded} == {False}
    for first in range(2):
        made = adapted_tokens(llm, TEXTS, [adapters[(first + i) % 2] for i in range(len(TEXTS))])
        check(made, [wanted[(first + i) % 2][i] for i in range(len(TEXTS))])
    assert {size.adapted for size in recorded} == {False, True}
    assert adapted_tokens(llm, TEXTS, [None] * len(TEXTS)) == plain


def test_prefixes_are_shared_by_requests_of_an_adapter_only(base, adapters, tmp_path):
    """Whatever the adapter is called, and wherever it lies."""
    llm = make_llm(base, **OPTIONS)
    copy = write_adapter(
        tmp_path / "other name", modules_of(llm, embedding=False), rank=4, seed=0
    )  # the files of adapters[0]

    def cached(adapter: Path | None) -> int:
        request = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
        [output] = llm.generate([TEXTS[8]], GREEDY.clone(max_tokens=2), use_tqdm=False, lora_request=request)
        return output.num_cached_tokens

    assert [cached(a) for a in (None, adapters[0], adapters[1], None, adapters[0], copy)] == [0, 0, 0, 96, 96, 96]


def test_prompt_logprobs_are_those_of_the_adapter(base, adapters, tmp_path):
    llm, model = make_llm(base, **OPTIONS), make_llm(merged(base, adapters[1], tmp_path / "merged"))
    params = GREEDY.clone(max_tokens=1, prompt_logprobs=0)
    request = LoRARequest("a", 1, str(adapters[1]))
    made = llm.generate(TEXTS[5:9], params, use_tqdm=False, lora_request=[request, request, None, request])
    expected = model.generate(TEXTS[5:9], params, use_tqdm=False)
    for index in (0, 1, 3):
        for got, right in zip(made[index].prompt_logprobs[1:], expected[index].prompt_logprobs[1:], strict=True):
            assert [e.logprob for e in got.values()] == pytest.approx([e.logprob for e in right.values()], abs=1e-3)


def test_torch_files_and_module_names_of_larger_models(base, tmp_path):
    llm = make_llm(base, **OPTIONS)
    plain = write_adapter(tmp_path / "plain", ATTENTION, seed=7)
    expected = adapted_tokens(llm, TEXTS, [plain] * len(TEXTS))
    torch_file = write_adapter(tmp_path / "torch", ATTENTION, seed=7, name="adapter_model.bin")
    inside = {name.replace("model.", "model.language_model."): size for name, size in ATTENTION.items()}
    for adapter in (torch_file, write_adapter(tmp_path / "inside", inside, seed=7)):
        assert adapted_tokens(llm, TEXTS, [adapter] * len(TEXTS)) == expected


def test_ranks_and_scales_of_modules_follow_patterns(base, tmp_path):
    """An adapter with two ranks is the sum of two adapters with one."""
    first, second = ({name: size} for name, size in ATTENTION.items())
    parts = [
        write_adapter(tmp_path / "1", first, rank=2, seed=1),
        write_adapter(tmp_path / "2", second, rank=6, seed=2),
    ]
    tensors = {n: t for part in parts for n, t in load_file(part / "adapter_model.safetensors").items()}
    patterns = {"rank_pattern": {"o_proj": 6}, "alpha_pattern": {r"layers\.2\.self_attn\.o_proj": 16}}
    both = write_adapter(tmp_path / "both", {}, rank=2, tensors=tensors, **patterns)
    model = merged(base, parts[0], tmp_path / "merged")
    config = json.loads((parts[1] / "adapter_config.json").read_text())
    (parts[1] / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 16}))
    expected = certain_tokens(make_llm(merged(model, parts[1], tmp_path / "twice")), TEXTS)
    check(adapted_tokens(make_llm(base, **OPTIONS), TEXTS, [both] * len(TEXTS)), expected)


BAD = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "biases": ({"bias": "all"}, "bias='all'"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "another kind": ({"peft_type": "IA3"}, "type IA3"),
    "wrong rank": ({"r": 3}, "has rank 4, but adapter_config.json says 3"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha=None"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unsupported_adapter_is_refused_with_its_reason(base, tmp_path, name):
    changes, reason = BAD[name]
    adapter = write_adapter(tmp_path / "a", ATTENTION)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    refused(make_llm(base, **OPTIONS), adapter, reason)


def test_a_broken_adapter_is_refused_and_others_go_on(base, adapters, tmp_path):
    llm = make_llm(base, **OPTIONS)
    for modules, rank, reason in (
        ({"model.layers.9.mlp.up_proj": (96, 64)}, 4, "no linear layer for model.layers.9.mlp.up_proj"),
        ({"model.layers.1.mlp.up_proj": (96, 48)}, 4, "has 64 inputs and 96 outputs"),
        (ATTENTION, 9, "has rank 9; max_lora_rank is 8"),
    ):
        refused(llm, write_adapter(tmp_path / str(rank) / next(iter(modules)), modules, rank=rank), reason)
    cut = write_adapter(tmp_path / "cut", ATTENTION) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:2000])
    refused(llm, cut.parent, "cannot be read")
    half = write_adapter(tmp_path / "half", ATTENTION) / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(half).items() if "q_proj.lora_B" not in n}, half)
    refused(llm, half.parent, "only one of the two matrices of model.layers.0.self_attn.q_proj")
    other = write_adapter(tmp_path / "other", {}, tensors={"base_model.model.model.norm.weight": torch.ones(64)})
    refused(llm, other, "base_model.model.model.norm.weight, which is no matrix of LoRA")
    with pytest.raises(ValueError, match=r"is no PEFT adapter: it needs adapter_config.json"):
        llm.generate(TEXTS[:1], lora_request=LoRARequest("empty", 1, str(base)))
    with pytest.raises(ValueError, match="no such file or directory"):
        llm.generate(TEXTS[:1], lora_request=LoRARequest("nowhere", 1, "/does/not/exist"))
    with pytest.raises(ValueError, match=r"needs an engine with enable_lora=True"):
        make_llm(base).generate(TEXTS[:1], lora_request=LoRARequest("a", 1, str(adapters[0])))
    with pytest.raises(ValueError, match="2 prompts but 1 lora_requests"):
        llm.generate(TEXTS[:2], lora_request=[None])


def refused(llm: LLM, adapter: Path, reason: str) -> None:
    """The request fails with the reason; a request without the adapter runs."""
    good = core_request(llm, "good", TEXTS[0])
    llm.core.add_request(good)
    with pytest.raises(ValueError, match=r"adapter 'bad' cannot be used: ") as caught:
        llm.generate([TEXTS[0]], GREEDY, use_tqdm=False, lora_request=LoRARequest("bad", 1, str(adapter)))
    assert reason in str(caught.value)
    assert not llm.core.scheduler._gated.requests
    llm.core.abort_requests(["good"])
    assert_nothing_is_left(llm.core)


def test_options_that_contradict_each_other(base):
    with pytest.raises(ConfigError, match="max_cpu_loras must be at least max_loras"):
        make_llm(base, enable_lora=True, max_loras=3, max_cpu_loras=2)
    with pytest.raises(ConfigError, match="enable_lora and torch_compile"):
        make_llm(base, enable_lora=True, torch_compile=True)


def test_with_speculation(base, adapters, wanted):
    llm = make_llm(
        base, speculative_config={"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}, **OPTIONS
    )
    for _ in range(2):  # the second time, the suffix tree knows the texts
        made = adapted_tokens(llm, TEXTS, [adapters[i % 3] for i in range(len(TEXTS))])
        check(made, [wanted[i % 3][i] for i in range(len(TEXTS))])
    assert llm.core.stats.speculation.accepted_tokens > 0


@pytest.mark.parametrize("executor", [StagedExecutor, pytest.param(MultiprocExecutor, marks=pytest.mark.slow)])
def test_on_two_ranks(base, adapters, wanted, executor):
    options = {"tensor_parallel_size": 2, **OPTIONS}
    with mock.patch("quire.executor.choice.MultiprocExecutor", executor):
        llm = make_llm(base, **options)
    try:
        made = adapted_tokens(llm, TEXTS, [adapters[i % 4] for i in range(len(TEXTS))])
        check(made, [wanted[i % 4][i] for i in range(len(TEXTS))])
        with pytest.raises(ValueError, match="cannot be used"):
            llm.generate(TEXTS[:1], lora_request=LoRARequest("bad", 1, str(bad_shape(adapters[0]))))
    finally:
        llm.shutdown()


def bad_shape(adapter: Path) -> Path:
    return write_adapter(adapter.parent / "bad", {"model.layers.0.mlp.up_proj": (64, 64)})


def test_with_a_grammar_and_the_bundled_drafter(tmp_path):
    """The bundled model with its EAGLE-3 head: drafts, adapters and a grammar do not change what is said."""
    llm = LLM(max_num_seqs=8, **OPTIONS)
    sizes = {m: size for m, size in modules_of(llm, embedding=False).items() if "mlp" in m}
    adapter = LoRARequest("mlp", 1, str(write_adapter(tmp_path / "mlp", sizes, rank=8)))
    words = StructuredOutputsParams(regex=r"([a-z]{1,8} ){3}[a-z]{1,8}\.")
    params = [
        SamplingParams(temperature=0, max_tokens=24, structured_outputs=words if i % 2 else None) for i in range(6)
    ]
    texts, requests = ["Once upon a time"] * 4 + ["The dog"] * 2, [adapter, adapter, None, None, adapter, adapter]
    plain = [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False, lora_request=requests)]
    assert plain[0] != plain[2]
    drafting = {"method": "eagle3", "model": "quire-demo/eagle3", "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(max_num_seqs=8, speculative_config=drafting, **OPTIONS)
    assert [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False, lora_request=requests)] == plain
    assert llm.core.stats.speculation.drafts > 0


def test_target_modules_take_no_memory_for_others_and_leave_them_out(base, adapters, tmp_path, caplog):
    targets = {"enable_lora": True, "max_lora_rank": 6, "lora_target_modules": ["q_proj", "mlp.down_proj"]}
    llm, whole = make_llm(base, **targets), make_llm(base, enable_lora=True, max_lora_rank=6)
    memory, of_all = (sum(p.a.nbytes + p.b.nbytes for p in runner_of(e).model.adapters.products) for e in (llm, whole))
    assert 0 < memory < 0.6 * of_all
    modules = {m: size for m, size in modules_of(whole, False).items() if m.endswith(("q_proj", "down_proj"))}
    part = write_adapter(tmp_path / "part", modules, rank=4, seed=3)
    with caplog.at_level("WARNING", "quire"):
        expected = certain_tokens(make_llm(merged(base, part, tmp_path / "merged")), TEXTS)
        check(adapted_tokens(llm, TEXTS, [part] * len(TEXTS)), expected)
        assert not caplog.text
        adapted_tokens(llm, TEXTS[:1], [adapters[0]])
    assert "An adapter is used without" in caplog.text
    assert "o_proj" in caplog.text
