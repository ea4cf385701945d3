"""Drafters for tests: small random checkpoints in published formats, and ways to see and to replace their drafts.

make_llm(path, speculative_config=drafters.config("eagle3", "llama"))
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.speculative import SpeculativeOptions
from quire.engine.llm import LLM
from quire.messages.step import NewRequest, TokenEdits
from quire.worker.drafters.drafter import Drafter
from quire.worker.drafters.step import SampledStep
from quire.worker.model_runner import ModelRunner
from support import proposers
from support.checkpoints import Checkpoints
from support.layers import draw
from support.layouts import edit_tensors

MASK = 3  # the token that stands for what is not known yet
HIDDEN, VOCAB, INNER, HEADS = 64, 320, 40, 4  # of the variants
LAYER = {
    "self_attn.q_proj": (64, 1),
    "self_attn.k_proj": (32, 1),
    "self_attn.v_proj": (32, 1),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
OF_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}

# Drafters that the variants whose hidden size is 64 can have, and the variants with layers for multi-token prediction
CHAIN_HEADS = ("eagle", "eagle3", "eagle3-own", "p-eagle")
STATE_HEADS = ("medusa", "mlp_speculator")
MODELS = ("same", "similar", "other", "pard")
KINDS = (*MODELS, *CHAIN_HEADS, *STATE_HEADS)
MTP_VARIANTS = (
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe",
    "mimo",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)


class Drafters:
    """Drafters of the variants. Each is written when it is first requested."""

    def __init__(self, checkpoints: Checkpoints, factory: pytest.TempPathFactory) -> None:
        self._checkpoints, self._factory = checkpoints, factory
        self._paths: dict[tuple[str, str], Path] = {}

    def config(self, kind: str, variant: str, most: int = HEADS, **options: Any) -> dict[str, Any]:
        """The option speculative_config for a variant. kind: "mtp", or one of KINDS:

        same: the model is its own draft model. similar: with noise in its weights, so that some drafts are right.
        other: another small model. pard: the model guesses all tokens at once. eagle3: reads three layers, and guesses
        some tokens only. eagle3-own: reads the final states, with an embedding of its own. p-eagle: all at once.
        """
        method = {"eagle3-own": "eagle3", "p-eagle": "eagle3"}.get(kind, "draft_model" if kind in MODELS else kind)
        found: dict[str, Any] = {"method": method, "num_speculative_tokens": most, "adaptive": False}
        if kind != "mtp":
            found["model"] = str(self.path(kind, variant))
        if kind == "pard":
            found["parallel_drafting"] = True
        return found | options

    def path(self, kind: str, variant: str) -> Path:
        if kind == "same":
            return self._checkpoints.path(variant)
        if kind == "other":
            return self._checkpoints.path("llama-6-heads-over-2")
        if (kind, variant) not in self._paths:
            self._paths[kind, variant] = directory = self._factory.mktemp(f"{kind}-{variant}")
            if kind in ("similar", "pard"):
                self._change_model(directory, variant, kind)
            elif kind in CHAIN_HEADS:
                write_eagle(directory, kind)
            else:
                write_state_head(directory, kind)
        return self._paths[kind, variant]

    def target(self, variant: str) -> Path:
        """The checkpoint of a variant. Its layer for multi-token prediction, if there is one, has random weights."""
        if variant not in MTP_VARIANTS:
            return self._checkpoints.path(variant)
        if ("mtp", variant) not in self._paths:
            self._paths["mtp", variant] = directory = self._factory.mktemp(f"mtp-{variant}") / "model"
            shutil.copytree(self._checkpoints.path(variant), directory)
            edit_tensors(directory, _with_random_layer)
        return self._paths["mtp", variant]

    def _change_model(self, directory: Path, variant: str, kind: str) -> None:
        shutil.copytree(self._checkpoints.path(variant), directory, dirs_exist_ok=True)
        if kind == "pard":
            config = json.loads((directory / "config.json").read_text())
            (directory / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
        tensors = load_file(directory / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                tensor += 0.03 * tensor.std() * draw(name, *tensor.shape)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _with_random_layer(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The norms and the projection before the layer have random weights instead of ones."""
    for name, tensor in tensors.items():
        if re.search(r"(eh_proj|input_proj|mtp\.fc)\.weight$", name):
            tensors[name] = draw(name, *tensor.shape) / tensor.shape[1] ** 0.5
        elif re.search(r"(enorm|hnorm|shared_head\.norm|token_layernorm|hidden_layernorm|final_layernorm)\.w", name):
            tensors[name] = 1 + 0.3 * draw(name, *tensor.shape)
        elif re.search(r"^mtp\.(norm|pre_fc_norm_\w+)\.weight$", name):  # to which 1 is added
            tensors[name] = 0.3 * draw(name, *tensor.shape)
    return tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def weights(*shape: int, name: str, gain: float = 2.0) -> Tensor:
    return 1 + 0.3 * draw(name, *shape) if len(shape) == 1 else gain * draw(name, *shape) / shape[-1] ** 0.5


def write_eagle(directory: Path, kind: str) -> None:
    """kind: one of CHAIN_HEADS"""
    is_first, layer = kind == "eagle", "layers.0." if kind == "eagle" else "midlayer."
    own, config = kind == "eagle3-own", dict(OF_LAYERS)
    inputs = HIDDEN if is_first else 2 * HIDDEN
    sizes: dict[str, tuple[int, ...]] = {
        f"{layer}{name}.weight": (out, inputs if width == 1 else width) for name, (out, width) in LAYER.items()
    }
    sizes[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    if is_first:
        sizes["fc.weight"] = (HIDDEN, 2 * HIDDEN)
    else:
        sizes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
        sizes["norm.weight"] = (HIDDEN,)
        columns = VOCAB if own else 200
        sizes["lm_head.weight"], config["draft_vocab_size"] = (columns, HIDDEN), columns
        if own:
            sizes["embed_tokens.weight"] = (VOCAB, HIDDEN)
            config["eagle_config"] = {"use_aux_hidden_state": False}
        else:
            sizes["fc.weight"] = (HIDDEN, 3 * HIDDEN)
    if kind == "p-eagle":
        sizes["mask_hidden"], config["ptd_token_id"] = (1, 3 * HIDDEN), MASK
    tensors = {name: weights(*shape, name=name) for name, shape in sizes.items()}
    if not is_first and not own:
        tensors["d2t"] = torch.arange(200) // 3  # ids 0 1 2 4 5 6 8 ...
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), torch.arange(200) + tensors["d2t"])
    write(directory, config, tensors)


def write_state_head(directory: Path, kind: str) -> None:
    """kind: one of STATE_HEADS"""
    if kind == "medusa":
        sizes: dict[str, tuple[int, ...]] = {}
        for i in range(HEADS):
            sizes |= {f"{i}.0.linear.weight": (HIDDEN, HIDDEN), f"{i}.0.linear.bias": (HIDDEN,)}
            sizes[f"{i}.1.weight"] = (VOCAB, HIDDEN)
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    else:
        sizes = {}
        for i in range(HEADS):
            sizes |= {f"emb.{i}.weight": (VOCAB, INNER), f"proj.{i}.weight": (INNER, INNER if i else HIDDEN)}
            sizes |= {f"ln.{i}.weight": (INNER,), f"ln.{i}.bias": (INNER,), f"head.{i}.weight": (VOCAB, INNER)}
        sizes = {f"speculator.{name}": shape for name, shape in sizes.items()}
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "emb_dim": HIDDEN,
            "inner_dim": INNER,
            "vocab_size": VOCAB,
            "n_predict": HEADS,
        }
    write(directory, config, {name: weights(*shape, name=name) for name, shape in sizes.items()})


@dataclass
class Drafted:
    """What a drafter made behind a text that a step had just extended. num_prompt: tokens of the prompt. missed: the
    positions that a head has not seen."""

    text: list[int]
    drafts: list[int]
    num_prompt: int
    missed: list[int]


class WatchedDrafter(Drafter):
    """Keeps what the real drafter makes, and replaces it if `guesser` is given: a class of support.proposers.

    Replace only drafts of requests that are greedy or have a seed: those of others must come from the distribution
    that the drafter says.
    """

    def __init__(self, runner: ModelRunner, guesser: str | None = None) -> None:
        self.real, self.batch = runner.drafter, runner.batch
        self.taps, self.sampling = self.real.taps, self.real.sampling
        self.made: list[Drafted] = []
        self.missed: dict[int, list[int]] = {}
        self.guesser: Any = guesser and getattr(proposers, guesser)(SpeculativeOptions(num_speculative_tokens=HEADS))

    def reads_hidden(self, count: int) -> bool:
        return self.real.reads_hidden(count)

    def install(self, new: NewRequest) -> None:
        self.real.install(new)
        self.missed[new.row] = []

    def extend(self, known: TokenEdits) -> None:
        self.real.extend(known)

    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        counts = getattr(self.real, "_missed", self.batch.num_tokens * 0)
        before = counts.copy()
        drafts = self.real.draft(step, count)
        for row, position in zip(step.flat.token_rows.tolist(), step.flat.positions.tolist(), strict=True):
            if counts[row] > before[row]:
                self.missed[row].append(position)
        if drafts is None:
            return None
        wanted = (step.limits - torch.from_numpy(step.flat.seq_lens)).tolist()
        for index, row in enumerate(step.flat.rows.tolist()):
            if not step.flat.num_places[index] or not wanted[index]:
                continue
            text, num_prompt = self.batch.token_ids[row, : self.batch.num_tokens[row]].tolist(), self.batch.num_prompt
            of_row = drafts[index, : wanted[index]].tolist()
            self.made.append(Drafted(text, of_row, int(num_prompt[row]), list(self.missed[row])))
            if self.guesser is not None:
                known = SimpleNamespace(token_ids=text, num_prompt_tokens=int(num_prompt[row]))
                guess = [*self.guesser.guess(known, count), *[5] * count][:count]
                drafts[index] = torch.tensor(guess)
        return drafts


def watch(llm: LLM, guesser: str | None = None) -> WatchedDrafter:
    """Watch the drafter of an engine in this process, or replace its drafts."""
    runner: ModelRunner = llm.core.executor.runner
    runner.drafter = watched = WatchedDrafter(runner, guesser)
    return watched


Guess = Callable[..., tuple[list[int], float]]


def assert_right(made: Sequence[Drafted], guess: Guess, at_least: int) -> None:
    """Compare drafts with those of `guess`: (text, count) -> (drafts, the smallest distance of the two best logits).
    If the drafter has missed positions of the text, `guess` gets these, too."""
    compared = 0
    for drafted in made:
        right, gap = guess(drafted.text, len(drafted.drafts), *([drafted.missed] if drafted.missed else []))
        if gap > 1e-3:
            assert drafted.drafts == right, f"behind {len(drafted.text)} tokens"
            compared += 1
    assert compared >= at_least
