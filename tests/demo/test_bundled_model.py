"""The bundled model does what the README says of it: asked through the engine itself, at temperature 0."""

import importlib.util
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model

pytestmark = pytest.mark.texts

ROOT = Path(__file__).parents[2]
EVALUATION = ROOT / "tests" / "data" / "demo_eval"


def _lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (EVALUATION / name).read_text(encoding="utf-8").splitlines()]


def _questions_module():
    spec = importlib.util.spec_from_file_location("demo_questions", ROOT / "tools" / "demo_questions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_it_is_small():
    size = sum(file.stat().st_size for file in bundled_model().iterdir())
    assert size <= 14e6


one_in_five_and_all = pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=pytest.mark.slow)])


@one_in_five_and_all
def test_it_answers_questions_that_are_put_in_ways_it_has_not_read(llm, one_in):
    check = _questions_module().check
    questions = _lines("questions.jsonl")
    assert len(questions) == 500
    questions = questions[::one_in]
    assert len({q["kind"] for q in questions}) >= 8
    render = llm.frontend.render_chat
    prompts = [render(q["messages"], tools=q.get("tools"), add_generation_prompt=True) for q in questions]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=120), use_tqdm=False)
    wrong = Counter(q["kind"] for q, o in zip(questions, outputs, strict=True) if not check(q, o.outputs[0].text))
    assert sum(wrong.values()) <= 25 / one_in, wrong
    unfinished = sum(o.outputs[0].finish_reason != "stop" for o in outputs)
    assert unfinished <= 5 / one_in, "answers end by themselves"


@one_in_five_and_all
def test_its_stories_keep_their_character_and_repeat_no_sentence(llm, one_in):
    stories = _lines("stories.jsonl")
    assert len(stories) == 50
    stories = stories[::one_in]
    params = SamplingParams(temperature=0, max_tokens=150)
    outputs = llm.generate([s["prompt"] for s in stories], params, use_tqdm=False)
    good = 0
    for story, output in zip(stories, outputs, strict=True):
        text = output.outputs[0].text
        sentences = [s.strip() for s in re.findall(r"[^.!?]+[.!?]", story["prompt"] + text)]
        good += story["name"] in text and len(sentences) == len(set(sentences))
    assert good >= 45 / 50 * len(stories), good


@pytest.mark.nightly
@pytest.mark.slow
def test_late_positions_are_predicted_as_well_as_early_ones(llm):
    """The same tokens are looked at in both places: the last 200 of a row of 2,000 end the row of 400 beside it."""
    ids = llm.get_tokenizer().encode((EVALUATION / "heldout.txt").read_text(encoding="utf-8"))
    ends = range(2000, 2000 + 24 * 500, 500)
    early, late = (torch.stack([_losses(llm, ids[end - n : end])[-200:] for end in ends]) for n in (400, 2000))
    assert early.shape == late.shape == (24, 200)
    early_perplexity, late_perplexity = math.exp(early.mean()), math.exp(late.mean())
    assert late_perplexity <= early_perplexity, (early_perplexity, late_perplexity)
    print(f"perplexity at positions 200-400: {early_perplexity:.3f}, at 1,800-2,000: {late_perplexity:.3f}")


def _losses(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Minus log-probability of each token after the first, by one forward of the engine's own model."""
    from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput

    runner = llm.core.executor.runner
    blocks = -(-len(ids) // 16)
    edits = BlockTableEdits([0] * blocks, [0] * blocks, list(range(blocks)), list(range(1, blocks + 1)))
    new = NewRequest("perplexity", 0, ids, len(ids), 0, SamplingParams(temperature=0), 0)
    step = SchedulerOutput(0, [new], [0], [len(ids)], edits)
    runner.batch.install(new)
    runner.batch.edit_block_tables(step)
    flat = runner.batch.flatten(step)
    with torch.inference_mode():
        hidden = runner.forward(runner.staging.stage(flat, flat.size, step, {})[0])
        logits = runner.model.logits(hidden).float()
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    llm.reset_prefix_cache()
    return losses


def test_it_calls_a_tool_and_reads_its_result(llm):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the weather of a city.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
    ]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = SamplingParams(temperature=0, max_tokens=80)
    text = llm.chat(messages, params, tools=tools, use_tqdm=False)[0].outputs[0].text
    call = json.loads(re.search(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL).group(1))
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}


def test_raw_text_is_continued(llm):
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output[0].outputs[0].text.strip().startswith("Paris")
