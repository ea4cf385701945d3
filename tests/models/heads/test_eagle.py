"""The heads of EAGLE, EAGLE-2, EAGLE-3 and P-EAGLE in their published formats, against the papers' formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from quire.checkpoints.errors import WeightError
from quire.models.decoder import Decoder
from quire.models.heads.eagle import EagleHead, eagle
from quire.models.heads.eagle3 import Eagle3Head, eagle3, tapped_layers
from quire.models.registry import spec_of
from quire.ops.cpu.recording import Arena, Recording
from quire.parallel.mesh import Communicator
from support.heads import HeadText
from support.layers import build_layer, draw
from support.state_heads import TARGET, make_head
from support.thread_group import on_every_rank

Tensors = dict[str, Tensor]
LAYERS, VOCAB, OF_TARGET = 9, 67, TARGET["hidden_size"]
PROMPT, DRAFTS = 19, 4
SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "model_type": "speculators"}


def target_model(group: Communicator | None = None, **differences: Any) -> tuple[Decoder, Tensors]:
    spec = spec_of({**TARGET, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, **differences})
    return build_layer(lambda builder: Decoder(builder, spec, 32), group=group)


TARGET_MODEL, TARGET_TENSORS = target_model()


@dataclass
class Case:
    """A checkpoint, and what distinguishes its head from the others.

    config: differences from a Llama's. kept_as: "plain", or "speculators", whose config has two levels. draft_vocab:
    columns of the head's own language-model head, None if it uses that of the target. options: fields about EAGLE.
    """

    version: int
    hidden: int = OF_TARGET
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kept_as: str = "plain"
    first_layer: str = "layers.0."
    before_names: str = ""
    layers: int = 1
    draft_vocab: int | None = None
    offsets: bool = False
    fc_bias: bool = False
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    own_embedding: bool = False
    taps: tuple[int, ...] = (1, 3, 5)
    mask: tuple[int, ...] | None = None

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim", self.hidden // 4)

    @property
    def width(self) -> int:
        return max(1, len(self.taps)) * OF_TARGET

    def of_layers(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 44,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 0.003,
            "rope_theta": 70.0,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            **self.config,
        }

    def json(self) -> dict[str, Any]:
        options = dict(self.options)
        if self.version == 3 and self.draft_vocab is not None:
            options["draft_vocab_size"] = self.draft_vocab
        if self.kept_as == "speculators":
            return {**SPECULATORS, **options, "transformer_layer_config": self.of_layers()}
        return {"architectures": ["LlamaForCausalLM"], **self.of_layers(), **options}

    def tensors(self) -> Tensors:
        sizes: dict[str, tuple[int, ...]] = {}
        size, dim, mlp = self.hidden, self.head_dim, 44
        for i in range(self.layers):
            layer = self.first_layer if i == 0 else f"layers.{i}."
            inputs = 2 * size if self.version == 3 and i == 0 else size
            parts = {
                "self_attn.q_proj": (4 * dim, inputs),
                "self_attn.k_proj": (2 * dim, inputs),
                "self_attn.v_proj": (2 * dim, inputs),
                "self_attn.o_proj": (size, 4 * dim),
                "mlp.gate_proj": (mlp, size),
                "mlp.up_proj": (mlp, size),
                "mlp.down_proj": (size, mlp),
            }
            norms = ["post_attention_layernorm"]
            norms += ["input_layernorm"] if i or self.version == 3 else []
            norms += ["hidden_norm"] if i == 0 and self.version == 3 else []
            sizes |= {f"{layer}{name}.weight": shape for name, shape in parts.items()}
            sizes |= {f"{layer}{name}.bias": parts[name][:1] for name in self.biases}
            sizes |= {f"{layer}{name}.weight": (size,) for name in norms}
            sizes |= {f"{layer}self_attn.{name}_norm.weight": (dim,) for name in "qk" if self.qk_norm}
        if self.version < 3:
            sizes["fc.weight"] = (size, 2 * size)
        else:
            sizes["norm.weight"] = (size,)
            if self.taps:
                sizes["fc.weight"] = (size, self.width)
        if self.fc_bias:
            sizes["fc.bias"] = (size,)
        if self.own_embedding:
            sizes["embed_tokens.weight"] = (VOCAB, size)
        if self.draft_vocab is not None:
            sizes["lm_head.weight"] = (self.draft_vocab, size)
        options = {**self.options, **self.options.get("eagle_config", {})}
        if options.get("norm_before_fc"):
            sizes["input_norm.weight"] = (self.width,)
        if options.get("fc_norm"):
            sizes |= {f"fc_norm.{i}.weight": (OF_TARGET,) for i in range(len(self.taps))}
        if self.mask is not None:
            sizes["mask_hidden"] = (*self.mask, self.width)
        tensors = {name: draw(name, *shape) / math.sqrt(shape[-1]) for name, shape in sizes.items()}
        tensors |= {name: draw(name, *shape) / 2 + 1 for name, shape in sizes.items() if len(shape) == 1}
        if self.version < 3 and self.own_embedding:
            tensors["embed_tokens.weight"] = TARGET_TENSORS["model.embed_tokens.weight"]  # a copy
        if self.offsets:
            assert self.draft_vocab is not None
            tensors["d2t"] = torch.arange(self.draft_vocab) // 3  # ids 0 1 2 4 5 6 8 ...
            tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)
        return {self.before_names + name: tensor for name, tensor in tensors.items()}


class Formulas:
    """What the papers say, for whole texts and in plain torch."""

    def __init__(self, case: Case) -> None:
        self.case, self.options = case, {**case.options, **case.options.get("eagle_config", {})}
        if case.kept_as == "speculators":
            self.options.setdefault("norm_before_residual", True)
        self.t = {name.removeprefix(case.before_names): tensor for name, tensor in case.tensors().items()}

    def project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.case.of_layers()["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.t[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, dim]"""
        config, half = self.case.of_layers(), x.shape[-1] // 2
        factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]
        angles = torch.arange(len(x))[:, None] / factor / config["rope_theta"] ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)

    def attention(self, layer: str, x: Tensor) -> Tensor:
        tokens, dim, name = len(x), self.case.head_dim, f"{layer}self_attn."
        q, k, v = (self.project(f"{name}{part}_proj", x).view(tokens, -1, dim) for part in "qkv")
        if self.case.qk_norm:
            q, k = self.norm(f"{name}q_norm", q), self.norm(f"{name}k_norm", k)
        q, k = self.rotate(q), self.rotate(k)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        apart = torch.arange(tokens)[:, None] - torch.arange(tokens)
        seen = (apart >= 0) & (apart < self.case.config.get("sliding_window", 1000))
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return self.project(f"{name}o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        x = self.norm(f"{layer}post_attention_layernorm", x)
        gate, up = (self.project(f"{layer}mlp.{part}_proj", x) for part in ("gate", "up"))
        return self.project(f"{layer}mlp.down_proj", silu(gate) * up)

    def combine(self, states: list[Tensor]) -> Tensor:
        if self.case.version < 3 or not self.case.taps:
            return states[0]
        if self.options.get("fc_norm"):
            states = [self.norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        x = torch.cat(states, -1)
        return self.project("fc", self.norm("input_norm", x) if self.options.get("norm_before_fc") else x)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The hidden states that are fed back. ids, hidden: of a text from its beginning."""
        table = self.t.get("embed_tokens.weight", TARGET_TENSORS["model.embed_tokens.weight"])
        embedding, first = table[ids], self.case.first_layer
        if self.case.version < 3:
            x = self.project("fc", torch.cat((embedding, hidden), -1))
            x = x + self.attention(first, x)
        else:
            normed = self.norm(f"{first}hidden_norm", hidden)
            both = torch.cat((self.norm(f"{first}input_layernorm", embedding), normed), -1)
            x = (normed if self.options.get("norm_before_residual") else hidden) + self.attention(first, both)
        x = x + self.mlp(first, x)
        for i in range(1, self.case.layers):
            x = x + self.attention(f"layers.{i}.", self.norm(f"layers.{i}.input_layernorm", x))
            x = x + self.mlp(f"layers.{i}.", x)
        return self.norm("norm", x) if self.options.get("norm_output") else x

    def logits(self, hidden: Tensor) -> Tensor:
        if self.case.version == 3 and not self.options.get("norm_output"):
            hidden = self.norm("norm", hidden)
        own = None if self.case.version < 3 else self.t.get("lm_head.weight")
        return linear(hidden, TARGET_TENSORS["lm_head.weight"] if own is None else own)

    def token(self, column: Tensor) -> Tensor:
        return column + self.t["d2t"][column] if self.case.offsets else column


LINEAR = {"rope_type": "linear", "factor": 4.0}
CASES = {
    "eagle-llama3": Case(1, own_embedding=True),
    "eagle-llama2-fc-bias": Case(1, fc_bias=True, config={"bias": True, "rms_norm_eps": 1e-6}),
    "eagle-qwen2-qkv-biases": Case(
        2, biases=tuple(f"self_attn.{p}_proj" for p in "qkv"), config={"model_type": "qwen2", "rope_scaling": LINEAR}
    ),
    "eagle-three-layers": Case(1, layers=3, before_names="model."),
    "eagle3": Case(3, first_layer="midlayer.", draft_vocab=41, offsets=True, config={"num_hidden_layers": 32}),
    "eagle3-wider-than-target": Case(
        3,
        hidden=36,
        first_layer="midlayer.",
        draft_vocab=VOCAB,
        own_embedding=True,
        config={"head_dim": 6},
        options={"target_hidden_size": OF_TARGET},
        fc_bias=True,
    ),
    "eagle3-of-speculators": Case(
        3,
        kept_as="speculators",
        layers=2,
        draft_vocab=41,
        offsets=True,
        own_embedding=True,
        config={"rope_scaling": LINEAR},
        options={"eagle_aux_hidden_state_layer_ids": [9, 2, 0], "target_hidden_size": None},
        taps=(-1, 1, 8),
    ),
    "eagle3-qwen3": Case(
        3,
        kept_as="speculators",
        draft_vocab=13,
        qk_norm=True,
        options={"norm_before_residual": False},
        config={"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3, "sliding_window": 5, "head_dim": 10},
    ),
    "eagle3-biases": Case(
        3,
        draft_vocab=VOCAB,
        options={"norm_before_residual": True},
        biases=tuple(f"self_attn.{p}_proj" for p in "qkvo") + tuple(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    ),
    "eagle3-gpt-oss": Case(
        3,
        draft_vocab=VOCAB,
        before_names="model.",
        taps=(1, 2, 3, 7),
        options={"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 7, 2]}},
    ),
    "eagle-3.1": Case(3, draft_vocab=29, offsets=True, options={"fc_norm": True, "norm_output": True}),
    "eagle3-of-the-final-states": Case(3, options={"eagle_config": {"use_aux_hidden_state": False}}, taps=()),
    "p-eagle": Case(
        3,
        kept_as="speculators",
        layers=2,
        draft_vocab=41,
        own_embedding=True,
        mask=(1, 1),
        options={
            "speculators_model_type": "peagle",
            "mask_token_id": 5,
            "norm_before_residual": False,
            "norm_before_fc": True,
        },
    ),
    "p-eagle-flat": Case(3, first_layer="midlayer.", mask=(1,), options={"ptd_token_id": 6}),
}


@cache
def states(case_name: str) -> tuple[Tensor, list[Tensor]]:
    """The prompt's tokens from the second one on, and the states from which a head starts."""
    ids = torch.randint(VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(2))
    return ids, [draw(f"state{i}", PROMPT, OF_TARGET) for i in range(len(CASES[case_name].taps) or 1)]


def written(name: str, directory: Path) -> Path:
    path = directory / name
    if not path.exists():
        path.mkdir()
        save_file(CASES[name].tensors(), path / "model.safetensors")
    return path


def load(name: str, directory: Path, kernels: str = "reference", group: Communicator | None = None) -> Any:
    target = TARGET_MODEL if group is None else target_model(group)[0]
    return make_head(eagle, CASES[name].json(), written(name, directory), target, kernels, group)


def draft(head: Any, name: str, backend: str = "reference") -> tuple[Tensor, list[int]]:
    """All hidden states of the prompt and of a chain of drafts after it, and these drafts."""
    ids, inputs = states(name)
    text, made, tokens = HeadText(head, backend), [], []
    with torch.inference_mode():
        hidden = head.combine(inputs)
        for chunk in (slice(0, 13), slice(13, PROMPT)):
            made.append(text.run(head.embed(ids[chunk], hidden[chunk])))
        for _ in range(DRAFTS):
            column = head.logits(made[-1][-1:]).argmax(-1)
            tokens.append(int(column if head.token_ids is None else head.token_ids[column]))
            made.append(text.run(head.embed(torch.tensor(tokens[-1:]), made[-1][-1:])))
    return torch.cat(made), tokens


def by_formulas(name: str) -> tuple[Tensor, list[int]]:
    formulas = Formulas(CASES[name])
    ids, inputs = states(name)
    hidden, tokens = formulas.combine(inputs), []
    for _ in range(DRAFTS):
        last = formulas.forward(ids, hidden)[-1:]
        tokens.append(int(formulas.token(formulas.logits(last).argmax(-1))))
        ids, hidden = torch.cat((ids, torch.tensor(tokens[-1:]))), torch.cat((hidden, last))
    return formulas.forward(ids, hidden), tokens


def assert_near(made: Tensor, wanted: Tensor) -> None:
    assert made.shape == wanted.shape
    assert (made - wanted).abs().max() / wanted.std() < 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_two_chunks_and_a_chain_of_drafts_follow_the_formulas(tmp_path, name, kernels):
    head = load(name, tmp_path, kernels)
    assert isinstance(head, EagleHead if CASES[name].version < 3 else Eagle3Head)
    assert tuple(head.taps) == (CASES[name].taps if CASES[name].version == 3 else ())
    made, tokens = draft(head, name, kernels)
    wanted, right = by_formulas(name)
    assert_near(made, wanted)
    assert tokens == right
    with torch.inference_mode():
        assert_near(head.logits(made), Formulas(CASES[name]).logits(wanted))


@pytest.mark.parametrize("name", ["eagle-three-layers", "eagle3-of-speculators", "eagle-3.1"])
def test_only_the_wanted_tokens_are_returned(tmp_path, name):
    head = load(name, tmp_path)
    ids, inputs = states(name)
    wanted = torch.tensor([2, 17])
    with torch.inference_mode():
        x = head.embed(ids, head.combine(inputs))
        whole, some = HeadText(head).run(x.clone()), HeadText(head).run(x.clone(), wanted)
    assert_near(some, whole[wanted])


@pytest.mark.parametrize("name", ["eagle-qwen2-qkv-biases", "eagle3", "eagle3-wider-than-target", "p-eagle"])
def test_two_ranks_draft_what_one_does(tmp_path, name):
    written(name, tmp_path)
    wanted, right = by_formulas(name)
    for made, tokens in on_every_rank(2, lambda group: draft(load(name, tmp_path, group=group), name)):
        assert_near(made, wanted)
        assert tokens == right


def test_columns_are_tokens_of_the_target(tmp_path):
    ids = load("eagle3", tmp_path).token_ids
    assert ids.dtype is torch.int64
    assert ids[:7].tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert load("eagle3-qwen3", tmp_path).token_ids.tolist() == list(range(13)), "without d2t, the first tokens"
    assert load("eagle3-biases", tmp_path).token_ids is None
    assert load("eagle-llama3", tmp_path).token_ids is None


@pytest.mark.parametrize(("name", "token"), [("p-eagle", 5), ("p-eagle-flat", 6)])
def test_the_mask_of_a_head_that_drafts_in_parallel(tmp_path, name, token):
    formulas = Formulas(CASES[name])
    wanted = formulas.combine([formulas.t["mask_hidden"].view(len(CASES[name].taps), OF_TARGET)[i] for i in range(3)])
    found, hidden = load(name, tmp_path).mask
    assert found == token
    assert_near(hidden, wanted)
    assert load("eagle3", tmp_path).mask is None


@pytest.mark.parametrize(
    ("num_layers", "config", "taps"),
    [
        (32, {}, (1, 15, 28)),  # EAGLE's
        (7, {}, (1, 2, 3)),
        (6, {}, (0, 2, 4)),
        (5, {}, (0, 1, 3)),
        (4, {}, (0, 1, 2)),
        (3, {}, (-1, 0, 1)),
        (48, {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}, (0, 22, 43)),
        (48, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, (1, 23, 44)),
        (36, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}}, (23, 29, 35)),
        (32, {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, (1, 15, 28)),
    ],
)
def test_which_layers_are_read(num_layers, config, taps):
    assert tapped_layers(config, num_layers) == taps


@pytest.mark.parametrize(("num_layers", "ids"), [(2, None), (9, [2, 2, 5]), (9, [2, 5, 10]), (9, [-1, 2, 5])])
def test_layers_that_do_not_exist_are_refused(num_layers, ids):
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        tapped_layers({"eagle_aux_hidden_state_layer_ids": ids}, num_layers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["eagle-llama3", "eagle3", "eagle3-wider-than-target", "eagle3-of-speculators"])
def test_dummy_weights_need_no_checkpoint(name):
    head = make_head(eagle if CASES[name].version < 3 else eagle3, CASES[name].json(), None, TARGET_MODEL)
    hidden, tokens = draft(head, name)
    assert hidden.isfinite().all()
    assert all(0 <= token < VOCAB for token in tokens)


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("eagle-llama3", {"hidden_size": 20}, ValueError, "hidden_size=20, but its target model has 24"),
        ("eagle-llama3", {"intermediate_size": None}, KeyError, "intermediate_size"),
        ("eagle-llama3", {"intermediate_size": 45}, WeightError, "mlp.*shape"),
        ("eagle-llama3", {"num_hidden_layers": 2}, WeightError, "missing: layers.1"),
        ("eagle3", {"rms_norm_eps": None}, KeyError, "rms_norm_eps"),
        ("eagle3", {"target_hidden_size": 48}, ValueError, "target_hidden_size=48, but its target has 24"),
        ("eagle3-of-the-final-states", {"hidden_size": 20}, ValueError, "target_hidden_size=20, but its target has 24"),
        ("eagle3", {"draft_vocab_size": 68}, ValueError, "draft_vocab_size=68, but its target has 67 tokens"),
        ("eagle3", {"norm_before_fc": True}, WeightError, "missing: input_norm.weight"),
        ("eagle3-wider-than-target", {"vocab_size": 66}, ValueError, "vocab_size=66, but its target has 67"),
        ("p-eagle-flat", {"ptd_token_id": None}, ValueError, "mask_token_id"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, name, change, error, text):
    config = {key: value for key, value in {**CASES[name].json(), **change}.items() if value is not None}
    with pytest.raises(error, match=text):
        make_head(eagle, config, written(name, tmp_path), TARGET_MODEL)


def test_offsets_that_lead_beyond_the_vocabulary_are_refused(tmp_path):
    case = CASES["eagle3"]
    save_file({**case.tensors(), "d2t": torch.full((41,), 30)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t"):
        make_head(eagle, case.json(), tmp_path, TARGET_MODEL)


@pytest.mark.parametrize("name", ["eagle-three-layers", "eagle3-of-speculators", "eagle-3.1"])
def test_the_forward_consists_of_kernels_and_can_be_recorded(tmp_path, name):
    head = load(name, tmp_path, "cpu")
    ids, inputs = states(name)
    text = HeadText(head, "cpu")
    with torch.inference_mode():
        x = head.embed(ids[:1], head.combine(inputs)[:1])
        forward = head.forward
        recording = Recording(Arena())

        def recorded(*arguments: Any) -> Tensor:
            with recording:
                return forward(*arguments)

        head.forward = recorded
        text.run(x)
    assert recording.obstacle is None
