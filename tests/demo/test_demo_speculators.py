"""The tool that trains the speculators of the bundled model, on a tiny one, and the files that it made."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM
from quire.checkpoints.hub import bundled_model

ROOT = Path(__file__).parents[2]
LAYER = "midlayer."
EAGLE3_NAMES = {  # as yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has them
    *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    *(f"{LAYER}{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
MEDUSA_NAMES = {f"blocks.{i}.layers.0.{part}" for i in range(5) for part in ("weight", "bias")}


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    yield importlib.import_module("train_demo_speculators")
    sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def target(tool):
    torch.manual_seed(0)
    target = tool.DemoTarget(tool.demo.Qwen3(shape(tool, 3)))
    target.model.embed_tokens.weight.mul_(30)  # so that some tokens are much likelier than others
    return target


def shape(tool, layers: int):
    return tool.demo.Shape(vocab=50, hidden=32, layers=layers, heads=4, kv_heads=2, head_dim=8, ffn=48, context=64)


def speculator(tool, target, kind: str):
    if kind == "eagle3":
        return tool.new_head(target, shape(tool, 1), torch.arange(0, 50, 2), rows())
    if kind == "medusa":
        return tool.Medusa(32, 5, target.logits)
    return tool.DraftModel(shape(tool, 1))


def rows() -> Tensor:
    return torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft"])
def test_a_few_steps_lower_the_loss(tool, target, kind):
    trainer = tool.Trainer(speculator(tool, target, kind), tool.Recipe(muon_rate=0.01))
    learned = torch.ones(2, 24, dtype=torch.bool)
    losses = [tool.train_step({kind: trainer}, target, rows(), learned, 0.02 + at / 50)[kind] for at in range(12)]
    assert losses[-1] < 0.95 * losses[0]


def drafted_in_turn(head, reading, newest: int, count: int) -> list[Tensor]:
    """States of drafts as they are made in use: the target's states as far as it has read, then the head's own, each
    step over all inputs so far. newest: the index of the newest token; its own state is not known yet."""
    embedded, x = reading.embedded[:, 1:], head.fc(reading.taps[:, :newest] * head.tap_scale)
    made = []
    for number in range(count):
        tokens = newest + number
        states = head.midlayer(embedded[:, :tokens], x, head.cos[:tokens], head.sin[:tokens], [])
        made.append(states[0, -1])
        x = torch.cat((x, states[:, -1:]), dim=1)
    return made


def test_drafts_in_training_are_those_of_use(tool, target):
    head = speculator(tool, target, "eagle3")
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
        reading = target.read(rows()[:1])
        states = head.states(reading, 4)
        for newest in (1, 2, 9):
            for number, state in enumerate(drafted_in_turn(head, reading, newest, 4)):
                torch.testing.assert_close(states[number][0, newest + 1 + number], state, rtol=1e-4, atol=1e-4)


def test_a_model_is_read_through_quire_as_in_plain_torch(tool, tmp_path):
    llm = LLM(dtype="float32", max_model_len=65, max_num_batched_tokens=64, enable_prefix_caching=False)
    plain, served = tool.DemoTarget.load(), tool.ServedTarget(llm, tmp_path)
    ids = torch.randint(4096, (2, 64))
    for _ in range(2):  # read, and then loaded
        wanted, read = plain.read(ids), served.read(ids)
        for part in ("embedded", "taps", "hidden"):
            right, made = getattr(wanted, part), getattr(read, part)
            assert (made - right).abs().mean() / right.std() < 0.03, "apart from bfloat16 in plain torch"
        torch.testing.assert_close(served.logits(read.hidden), plain.logits(read.hidden), rtol=1e-3, atol=1e-3)


def test_texts_are_written_by_groups_and_once(tool, tmp_path):
    asked = []

    def write(group: int, missing: int):
        asked.append((group, missing))
        return [tool.Text([group, number], 1, 0.0, [True, True]) for number in range(min(4, missing))]

    for count in (6, 6, 9):
        texts = tool.texts_of(tmp_path / "texts", count, write)
        assert len(texts) == count
    assert asked == [(0, 6), (1, 2), (2, 3)]
    assert [text.ids for text in texts[3:7]] == [[0, 3], [1, 0], [1, 1], [2, 0]]


@pytest.mark.parametrize("template", [True, False])
def test_a_model_writes_its_prompts(tool, template, monkeypatch):
    llm = LLM(max_model_len=128)
    if not template:
        monkeypatch.setattr(llm.frontend, "render_chat", lambda *_, **__: (_ for _ in ()).throw(ValueError("none")))
    monkeypatch.setattr(tool, "GROUP", 4)
    groups = [tool.own_prompts(llm, group) for group in (0, 1)]
    assert groups[0] == tool.own_prompts(llm, 0)
    assert not set(groups[0]) & set(groups[1])
    for prompt in groups[0] + groups[1]:
        assert prompt.endswith("<|im_start|>assistant\n") == template


class Oracle:
    """Guesses the target's own distribution, with a share of it on token 0."""

    token_ids = None

    def __init__(self, target, share: float) -> None:
        self.target, self.share = target, share

    def states(self, reading, count: int) -> list[Tensor]:
        return [reading.hidden.roll(1, dims=1)] * count

    def logits(self, state: Tensor) -> Tensor:
        guess = self.target.logits(state).softmax(-1) * (1 - self.share)
        guess[..., 0] += self.share
        return guess.log()


def test_the_measured_acceptance_is_that_of_the_rule(tool, target):
    texts = [tool.Text(row.tolist(), 4, 1.0, [True] * 24) for row in rows()]
    assert tool.measure(Oracle(target, 0), target, texts, 3).by_position == [1, 1, 1]
    text = texts[0]
    p = target.logits(target.read(rows()[:1]).hidden).softmax(-1)[0, 3:-1]
    expected = (1 - 0.3) + (rows()[0, 4:] == 0) * (0.3 / p[:, 0])
    chances = tool.chances(Oracle(target, 0.3), target, text, 2)
    torch.testing.assert_close(chances, expected.clamp(max=1).expand(2, -1))


def test_heads_are_saved_in_the_published_format(tool, target, tmp_path):
    head = speculator(tool, target, "eagle3")
    tool.export_eagle3(head, target, 50, tmp_path / "eagle3")
    weights = load_file(tmp_path / "eagle3/model.safetensors")
    assert set(weights) == EAGLE3_NAMES
    assert (weights["d2t"] + torch.arange(25)).tolist() == weights["t2d"].nonzero().flatten().tolist()
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert weights["fc.weight"].equal((head.fc.weight * head.tap_scale).bfloat16())
    config = json.loads((tmp_path / "eagle3/config.json").read_text())
    assert config["draft_vocab_size"] == 25
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    tool.export_medusa(speculator(tool, target, "medusa"), 50, tmp_path / "medusa")
    assert set(load_file(tmp_path / "medusa/model.safetensors")) == MEDUSA_NAMES
    assert json.loads((tmp_path / "medusa/config.json").read_text())["medusa_num_heads"] == 5


def test_the_bundled_speculators_are_small_and_complete():
    folder = bundled_model().parent / "speculators"
    assert sum(file.stat().st_size for file in folder.rglob("*")) < 5e6
    for kind, names in (("eagle3", EAGLE3_NAMES), ("medusa", MEDUSA_NAMES)):
        with safe_open(folder / kind / "model.safetensors", "pt") as file:
            assert set(file.keys()) == names
        assert (folder / kind / "README.md").exists()
    draft, model = (json.loads((path / "config.json").read_text()) for path in (folder / "draft", bundled_model()))
    assert draft["vocab_size"] == model["vocab_size"]
    assert draft["architectures"] == model["architectures"]
