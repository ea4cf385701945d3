"""Heads of multi-token prediction against the paper's formulas, around decoder layers of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.checkpoints.weights import WeightError, load_weights, open_checkpoint
from quire.config.engine import EngineConfig
from quire.layers.build import Builder
from quire.layers.linear import DenseWeight
from quire.models.heads.mtp import deepseek_mtp, mimo_mtp, qwen_mtp
from quire.models.load import load_model
from quire.ops import OPS
from quire.ops.cpu.build import library
from quire.parallel.mesh import Communicator, Mesh
from support.checkpoints import build, write_checkpoint
from support.heads import HeadText
from support.layers import draw
from support.layouts import edit_tensors
from support.thread_group import on_every_rank

LAYERS, HIDDEN, EPS = 2, 64, 1e-5
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
HYBRID = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}
SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**EXPERTS, **LATENT, "num_key_value_heads": 4},
    "deepseek_v32": {
        **EXPERTS,
        **LATENT,
        "num_key_value_heads": 4,
        "index_topk": 6,
        "index_n_heads": 8,
        "index_head_dim": 32,
    },
    "glm4_moe": {**EXPERTS, "head_dim": 24, "attention_bias": True, "use_qk_norm": True},
    "mimo": {"head_dim": 24},
    "qwen3_next": {**HYBRID, **SHARED},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **SHARED},
}
QWEN = [f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")]
DEEPSEEK = ["enorm", "hnorm", "eh_proj", "shared_head.norm"]
NAMES = {
    "deepseek_v3": [f"model.layers.{LAYERS}.{name}" for name in DEEPSEEK],
    "deepseek_v32": [f"model.layers.{LAYERS}.{name}" for name in DEEPSEEK],
    "glm4_moe": [f"model.layers.{LAYERS}.{name}" for name in DEEPSEEK],
    "mimo": [
        f"model.mtp_layers.0.{name}"
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ],
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
}
MAKERS = {"mimo": mimo_mtp, "qwen3_next": qwen_mtp, "qwen3_5_text": qwen_mtp, "qwen3_5_moe_text": qwen_mtp}


class Published:
    """A checkpoint with such a layer, and transformers' model of which the layer is the last."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind, self.directory = kind, directory
        config = {**CONFIGS[kind], "num_hidden_layers": LAYERS + 1, "rms_norm_eps": EPS}
        self.network = build(kind, config, seed=1)
        self.network.set_attn_implementation("eager")
        if hasattr(self.network, "set_experts_implementation"):
            self.network.set_experts_implementation("eager")
        adds: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 2}
        without = ["layer_types"] if kind == "mimo" else []
        if "layer_types" in config:
            adds["layer_types"] = config["layer_types"][:LAYERS]
        write_checkpoint(directory, kind, config, network=self.network, adds=adds, without=without)
        sizes = [(HIDDEN,), (HIDDEN,), (HIDDEN, 2 * HIDDEN), (HIDDEN,)]
        scales = [1, 1, HIDDEN**-0.5, 1]
        self.own = {
            f"{name}.weight": draw(name, *size) * scale
            for name, size, scale in zip(NAMES[kind], sizes, scales, strict=True)
        }
        edit_tensors(directory, self._edit)

    def _edit(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Names as published, copies of what is shared, which must not be read, and the layer of a second draft."""
        prefix = f"model.layers.{LAYERS}."
        if self.kind == "mimo":
            tensors = {name.replace(prefix, "model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
            return tensors | self.own | {"model.mtp_layers.1.input_proj.weight": torch.zeros(1)}
        if self.kind.startswith("qwen"):
            return {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()} | self.own
        copies = {f"{prefix}{name}.weight": torch.zeros(1) for name in ("embed_tokens", "shared_head.head")}
        return tensors | self.own | copies | {f"model.layers.{LAYERS + 1}.eh_proj.weight": torch.zeros(1)}

    def load(self, kernels: str = "reference", has: Any = None, group: Communicator | None = None) -> Any:
        if kernels == "cpu" and library() is None:
            pytest.skip("the CPU kernels cannot be compiled here")
        pins = dict.fromkeys(OPS, "reference") if kernels == "reference" else {}
        config = EngineConfig.create(dtype="float32", kernels=pins)
        group, cpu = group or Communicator(), torch.device("cpu")
        target: Any = load_model(self.directory, config, 64, cpu, Mesh(tp=group), show_progress=False).model
        checkpoint = open_checkpoint(self.directory)
        builder = Builder(target.kernels, group, lambda name: DenseWeight, shape_of=checkpoint.shape_of)
        head = MAKERS.get(self.kind, deepseek_mtp)(builder, {}, target, has or checkpoint.has, 64)
        load_weights(checkpoint, builder, head.ignored, show_progress=False)
        return head

    @torch.inference_mode()
    def states(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The formulas, for a whole text at once. ids: [tokens], hidden: [tokens, hidden] -> [tokens, hidden]"""
        embedding_norm, hidden_norm, projection, final_norm = self.own.values()
        if self.kind.startswith("qwen"):
            embedding_norm, hidden_norm, final_norm = 1 + embedding_norm, 1 + hidden_norm, 1 + final_norm
        model, positions = self.network.model, torch.arange(len(ids))[None]
        parts = [rms_norm(model.embed_tokens(ids), embedding_norm), rms_norm(hidden, hidden_norm)]
        x = torch.cat(parts[::-1] if self.kind == "mimo" else parts, dim=-1)[None] @ projection.T
        future = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        rotary = model.rotary_emb(x, positions)
        out = model.layers[LAYERS](x, attention_mask=future, position_ids=positions, position_embeddings=rotary)
        return rms_norm(out[0], final_norm)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        return states @ self.network.lm_head.weight.T


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def difference(ours: Tensor, right: Tensor) -> float:
    assert ours.shape == right.shape
    return float((ours - right).abs().max() / right.std())


@pytest.fixture(scope="module", params=list(CONFIGS))
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_chain_of_drafts_is_that_of_the_formulas(published, kernels):
    head = published.load(kernels)
    run = HeadText(head, kernels).run
    text = torch.randint(4, 320, (21,), generator=torch.Generator().manual_seed(0))
    states = head.combine([draw("hidden", 21, HIDDEN)])

    with torch.inference_mode():
        made = torch.cat([run(head.embed(text[part], states[part])) for part in (slice(13), slice(13, 21))])
        for _ in range(4):
            right = published.states(text, states)
            assert difference(made, right) < 3e-5
            assert difference(head.logits(made[-1:]), published.logits(right[-1:])) < 3e-5
            text = torch.cat((text, published.logits(right[-1:]).argmax(-1)))
            states = torch.cat((states, made[-1:]))
            made = torch.cat((made, run(head.embed(text[-1:], states[-1:]))))


def test_only_the_wanted_states_are_computed(published):
    head = published.load()
    text, states = torch.arange(10, 27), draw("wanted", 17, HIDDEN)
    wanted = torch.tensor([3, 16])
    with torch.inference_mode():
        every = HeadText(head).run(head.embed(text, states))
        assert difference(HeadText(head).run(head.embed(text, states), wanted), every[wanted]) < 1e-5


@pytest.mark.sampled(2)
def test_two_ranks_together_compute_what_one_does(published):
    text, states = torch.arange(10, 27), draw("split", 17, HIDDEN)

    @torch.inference_mode()
    def logits(group: Communicator) -> Tensor:
        head = published.load(group=group)
        return head.logits(HeadText(head).run(head.embed(text, states)))

    for made in on_every_rank(2, logits):
        assert difference(made, published.logits(published.states(text, states))) < 3e-5


def test_a_checkpoint_without_the_layer_is_an_error_that_says_so(published):
    prefix = re.escape(NAMES[published.kind][0].rpartition(".")[0])
    with pytest.raises(ValueError, match=rf"has no layer for multi-token prediction, {prefix}"):
        published.load(has=lambda name: False)


def test_a_tensor_of_the_layer_that_is_not_read_is_an_error(tmp_path):
    published = Published(tmp_path, "mimo")
    edit_tensors(tmp_path, lambda tensors, config: tensors | {"model.mtp_layers.0.other.weight": torch.zeros(1)})
    with pytest.raises(WeightError, match=r"unexpected: model.mtp_layers.0.other.weight"):
        published.load()
