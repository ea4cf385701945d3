"""Models with recurrent layers: memory, checkpoints, bits, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from quire.kv.specs import StateSpec
from quire.messages.sampling_params import SamplingParams
from support.engines import GREEDY, generate, make_llm, runner_of, teacher_forced_logits
from support.families.states import STATES

pytestmark = pytest.mark.texts


def state_groups(llm: LLM) -> list[int]:
    return [group for group, spec in enumerate(llm.core.scheduler.kv.specs) if isinstance(spec, StateSpec)]


@pytest.mark.plain("counts the blocks of each step")
@pytest.mark.parametrize("variant", ["mamba2", "qwen3_next"])
def test_decoding_takes_the_same_memory_however_long_the_text(checkpoints, variant):
    llm = make_llm(checkpoints.path(variant))
    scheduler, most = llm.core.scheduler, set()
    request = llm.processor.process("r", [5] * 20, GREEDY.clone(max_tokens=150)).core_requests[0]
    scheduler.add(request)
    while llm.core.has_unfinished:
        llm.core.step()
        for running in scheduler.running:
            for group in state_groups(llm):
                held = sum(block.block_id > 0 for block in running.blocks.tables[group])
                most.add(held)
    assert most <= {1, 2}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", ["bamba", "qwen3_next", "kimi_linear", "falcon_h1"])
def test_blocks_are_chosen_so_that_states_and_attention_take_the_same_memory(checkpoints, references, variant):
    llm = make_llm(checkpoints.path(variant), mamba_block_size=None)
    sizes = {backend.name: backend.entry_bytes() for backend in runner_of(llm).forward.backends}
    attention, size = sizes["cpu"], llm.core.scheduler.kv.block_size
    assert size % 16 == 0
    assert sizes["states"] <= attention
    assert size == 16 or attention * (size - 16) / size < sizes["states"]
    for continuation in references.continuations(variant)[:3]:
        continuation.check(generate(llm, [continuation.prompt])[0].outputs[0].token_ids)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", STATES)
def test_logits_are_the_same_bits_in_any_chunks(checkpoints, variant):
    text = [(i * 37 + 11) % 300 + 4 for i in range(70)]
    llm = make_llm(checkpoints.path(variant))
    whole = teacher_forced_logits(llm, text)
    for chunks in ([1] * 70, [15, 17, 1, 1, 36]):
        assert torch.equal(teacher_forced_logits(llm, text, chunks), whole)


def test_decoding_steps_are_recorded(checkpoints):
    llm = make_llm(checkpoints.path("mamba2"))
    generate(llm, [[5, 6, 7]], GREEDY.clone(max_tokens=8))
    forward = runner_of(llm).forward
    assert forward.usable
    assert forward._recorded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["mamba2", "qwen3_next"])
def test_samples_of_one_prompt_go_on_from_its_state(checkpoints, variant):
    prompt, params = list(range(4, 44)), SamplingParams(temperature=1.0, seed=3, max_tokens=20, n=3, ignore_eos=True)
    together = generate(make_llm(checkpoints.path(variant)), [prompt], params)[0]
    alone = [generate(make_llm(checkpoints.path(variant), max_num_seqs=1), [prompt], params.clone())[0]]
    assert [c.token_ids for c in together.outputs] == [c.token_ids for c in alone[0].outputs]
    assert len({tuple(c.token_ids) for c in together.outputs}) > 1


@pytest.mark.plain("has drafts of its own")
def test_a_draft_model_with_states_is_refused_and_one_without_drafts_for_states(checkpoints, references):
    def drafted_by(variant: str) -> LLM:
        config = {"method": "draft_model", "model": str(checkpoints.path(variant)), "num_speculative_tokens": 3}
        return make_llm(checkpoints.path("bamba"), speculative_config=config)

    with pytest.raises(ConfigError, match="recurrent layers"):
        drafted_by("mamba2")
    expected = references.continuations("bamba")[:6]
    outputs = generate(drafted_by("llama"), [c.prompt for c in expected])
    for continuation, output in zip(expected, outputs, strict=True):
        continuation.check(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_compression": {"ratio": 2}}, "kv_compression"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"mamba_block_size": 0}, "mamba_block_size"),
    ],
)
def test_options_that_do_not_work_with_states_are_refused(checkpoints, options, named):
    with pytest.raises(ConfigError, match=named):
        make_llm(checkpoints.path("bamba"), **options)
