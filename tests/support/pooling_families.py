"""A tiny checkpoint of every architecture that embeds or scores, in the form in which it is published.

FAMILIES has those of vLLM's tables that Quire runs: tests/models/test_pooling_families.py compares all of them, and
docs/models.md lists them. A checkpoint is made with transformers, whose model is the reference. If transformers does
not have the architecture, its tensors are renamed, and the head is computed here with the published formula.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.checkpoints import byte_level_tokenizer

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LOCAL = {"local_attention": 20, "global_attn_every_n_layers": 3}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
HIDDEN = SIZES["hidden_size"]

Reference = Callable[[list[int]], Tensor]  # from token ids to a vector, or to a row for each token
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class PoolingFamily:
    """make: writes a checkpoint to a folder and returns the function that it computes. compared: with which
    implementation. task: None for the usual one. options: of the engine."""

    make: Callable[[Path], Reference]
    compared: str = "transformers"
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def saved(folder: Path, family: str, config: dict[str, Any], head: str = "Model", **settings: Any) -> Any:
    """A random model of transformers, saved with a tokenizer."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**config, **settings)
    settings._attn_implementation = "eager"
    model = getattr(transformers, family + head)(settings).float().eval()
    for name, parameter in model.named_parameters():
        scale = 1.0 if parameter.dim() == 1 and "weight" in name else 0.3
        parameter.data = torch.randn(parameter.shape) * (scale if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(4, VOCAB) for _ in range(n)] for n in (1, 2, 15, 16, 17, 40, 64, 130, 3, 198)]


def edit(folder: Path, tensors: Callable[[Tensors], Tensors] | None = None, **config: Any) -> None:
    """Change the tensors of a checkpoint and fields of its config."""
    from safetensors.torch import load_file, save_file

    if tensors is not None:
        file = folder / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors(load_file(file)).items()}, file)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def states_of(model: Any) -> Reference:
    """The final hidden states of a model without a head."""

    @torch.no_grad()
    def states(ids: list[int]) -> Tensor:
        hidden: Tensor = model(torch.tensor([ids])).last_hidden_state[0]
        return hidden

    return states


def embeds(family: str, config: dict[str, Any], place: int = 0, **changes: Any) -> Callable[[Path], Reference]:
    """The hidden state of one token."""

    def make(folder: Path) -> Reference:
        states = states_of(saved(folder, family, config))
        edit(folder, **changes)
        return lambda ids: states(ids)[place]

    return make


def scores(family: str, config: dict[str, Any], head: str, **settings: Any) -> Callable[[Path], Reference]:
    """The logits of a classifier."""

    def make(folder: Path) -> Reference:
        model = saved(folder, family, config, head, **settings)

        @torch.no_grad()
        def logits(ids: list[int]) -> Tensor:
            found: Tensor = model(torch.tensor([ids])).logits[0]
            return found

        return logits

    return make


def generates(family: str, config: dict[str, Any], body: str = "model") -> Callable[[Path], Reference]:
    """The last hidden state of a model that generates."""

    def make(folder: Path) -> Reference:
        states = states_of(getattr(saved(folder, family, config, "ForCausalLM"), body))
        return lambda ids: states(ids)[-1]

    return make


def late_interaction(
    family: str, config: dict[str, Any], architecture: str, prefix: str, size: int = 16
) -> Callable[[Path], Reference]:
    """A linear layer on each token."""

    def make(folder: Path) -> Reference:
        states = states_of(saved(folder, family, config))
        linear = drawn(size, HIDDEN)
        edit(
            folder,
            lambda tensors: {**{prefix + name: tensor for name, tensor in tensors.items()}, "linear.weight": linear},
            architectures=[architecture],
            dim=size,
        )
        return lambda ids: states(ids) @ linear.T

    return make


def renamed_gte(head: str, architecture: str, **settings: Any) -> Callable[[Path], Reference]:
    """Alibaba-NLP's names: vLLM needs the second one as an override."""
    of_transformers = embeds("Gte", GTE) if head == "Model" else scores("Gte", GTE, head, **settings)

    def make(folder: Path) -> Reference:
        reference = of_transformers(folder)

        def renamed(tensors: Tensors) -> Tensors:
            bare = {name.removeprefix("gte."): tensor for name, tensor in tensors.items()}
            return {name if name.startswith("classifier") else f"new.{name}": tensor for name, tensor in bare.items()}

        edit(folder, renamed, architectures=[architecture], model_type="new")
        return reference

    return make


def splade(folder: Path) -> Reference:
    """The largest log(1 + relu(logit)) of each token of the vocabulary, without the first and the last token."""
    model = saved(folder, "Bert", BERT, "ForMaskedLM")
    edit(folder, architectures=["BertSpladeSparseEmbeddingModel"], cls_token_id=5, sep_token_id=6)

    @torch.no_grad()
    def sparse(ids: list[int]) -> Tensor:
        logits = model(torch.tensor([ids])).logits[0]
        chosen = logits[int(ids[0] == 5) : len(ids) - int(ids[-1] == 6 and len(ids) > int(ids[0] == 5))]
        if not len(chosen):
            return torch.zeros(logits.shape[-1])
        return torch.log1p(torch.relu(chosen)).max(0).values

    return sparse


def bge_m3(folder: Path) -> Reference:
    states = states_of(saved(folder, "XLMRoberta", ROBERTA))
    edit(folder, architectures=["BgeM3EmbeddingModel"], bos_token_id=7, eos_token_id=9)
    for name, size in (("colbert", HIDDEN), ("sparse", 1)):
        torch.save({"weight": drawn(size, HIDDEN), "bias": drawn(size, seed=2)}, folder / f"{name}_linear.pt")
    return lambda ids: states(ids)[0]


def voyage(folder: Path) -> Reference:
    """Qwen3 with bidirectional attention and a linear layer."""
    states = states_of(saved(folder, "Qwen3", DECODER, is_causal=False))
    linear = drawn(24, HIDDEN)
    edit(
        folder,
        lambda tensors: {**{f"model.{name}": tensor for name, tensor in tensors.items()}, "linear.weight": linear},
        architectures=["VoyageQwen3BidirectionalEmbedModel"],
        num_labels=24,
    )
    return lambda ids: states(ids)[-1] @ linear.T


def bidirectional(family: str, architecture: str, **changes: Any) -> Callable[[Path], Reference]:
    """A decoder whose tokens attend to all others; the mean of its hidden states."""

    def make(folder: Path) -> Reference:
        states = states_of(saved(folder, family, DECODER, is_causal=False))
        edit(folder, architectures=[architecture], **changes)
        return lambda ids: states(ids).mean(0)

    return make


def bidirectional_scores(folder: Path) -> Reference:
    states = states_of(saved(folder, "Llama", DECODER, is_causal=False))
    score = drawn(1, HIDDEN)
    edit(
        folder,
        lambda tensors: {**{f"model.{name}": tensor for name, tensor in tensors.items()}, "score.weight": score},
        architectures=["LlamaBidirectionalForSequenceClassification"],
        pooling="avg",
        id2label={"0": "LABEL_0"},
    )
    return lambda ids: states(ids).mean(0) @ score.T


def reward(
    family: str, architecture: str, labels: int, step: int | None = None, **changes: Any
) -> Callable[[Path], Reference]:
    """Two layers on each token, or on those that end a step."""

    def make(folder: Path) -> Reference:
        states = states_of(saved(folder, family, {**DECODER, **changes}))
        inner, outer = drawn(HIDDEN, HIDDEN), drawn(labels, HIDDEN)
        biases = drawn(HIDDEN, seed=3), drawn(labels, seed=4)
        heads = {"score.0.weight": inner, "score.0.bias": biases[0], "score.2.weight": outer, "score.2.bias": biases[1]}
        edit(
            folder,
            lambda tensors: {**{f"model.{name}": tensor for name, tensor in tensors.items()}, **heads},
            architectures=[architecture],
        )

        def values(ids: list[int]) -> Tensor:
            hidden = torch.relu(states(ids) @ inner.T + biases[0]) @ outer.T + biases[1]
            return hidden if step is None else hidden[torch.tensor(ids) == step]

        return values

    return make


def internlm2_reward(folder: Path) -> Reference:
    """Llama's layers under other names, with q, k and v of each KV head in one tensor."""
    from support.layouts import HUB_LAYOUTS

    states = states_of(saved(folder, "Llama", DECODER))
    v_head = drawn(1, HIDDEN)

    def renamed(tensors: Tensors) -> Tensors:
        full = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return {**HUB_LAYOUTS["internlm2"](full, DECODER), "v_head.weight": v_head}

    edit(folder, renamed, architectures=["InternLM2ForRewardModel"], model_type="internlm2")
    return lambda ids: states(ids) @ v_head.T


def jina_ranking(folder: Path) -> Reference:
    """A projector on the marks of documents, then on that of the query."""
    states = states_of(saved(folder, "Qwen3", {**DECODER, "vocab_size": 151_672}))
    inner, outer = drawn(HIDDEN // 2, HIDDEN), drawn(512, HIDDEN // 2)
    edit(
        folder,
        lambda tensors: {
            **{f"model.{name}": tensor for name, tensor in tensors.items()},
            "projector.0.weight": inner,
            "projector.2.weight": outer,
        },
        architectures=["JinaForRanking"],
    )

    def marks(ids: list[int]) -> Tensor:
        hidden = torch.relu(states(ids) @ inner.T) @ outer.T
        at = torch.tensor(ids)
        return torch.cat([hidden[at == 151_670], hidden[at == 151_671]])

    return marks


def jina_v3(folder: Path) -> Reference:
    """The published form, with the factors of an adapter for each task; the last one is the default."""
    import transformers

    tasks = ["retrieval.query", "text-matching"]
    model = saved(folder, "JinaEmbeddingsV3", ROBERTA)

    def split(tensors: Tensors) -> Tensors:
        made = {}
        for i, (name, tensor) in enumerate(tensors.items()):
            name = f"roberta.{name}"
            if not name.endswith("weight") or "norm" in name or "emb_ln" in name or "pooler" in name:
                made[name] = tensor
                continue
            out, width = tensor.shape
            a, b = drawn(2, 4, width, seed=i), drawn(2, out, 4, seed=1000 + i)
            if "embeddings" in name:
                a, b = b, a
            root = f"{name.removesuffix('.weight')}.parametrizations.weight"
            made |= {f"{root}.0.lora_A": a, f"{root}.0.lora_B": b}
            made[f"{root}.original"] = tensor - 0.5 * (a[1] @ b[1] if "embeddings" in name else b[1] @ a[1])
        return made

    edit(
        folder,
        split,
        architectures=["XLMRobertaModel"],
        model_type="xlm-roberta",
        position_embedding_type="rotary",
        lora_adaptations=tasks,
        lora_rank=4,
        lora_alpha=2,
    )
    assert isinstance(model, transformers.JinaEmbeddingsV3Model)
    states = states_of(model)
    return lambda ids: states(ids)[0]


def jina_v5(family: str, **changes: Any) -> Callable[[Path], Reference]:
    """An adapter in peft's format for each task, the default of which is that for retrieval."""

    def make(folder: Path) -> Reference:
        from safetensors.torch import save_file

        model = saved(folder, family, DECODER)
        adapter = folder / "adapters" / "retrieval"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
        factors = {}
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                a, b = drawn(4, parameter.shape[1], seed=len(name)), drawn(parameter.shape[0], 4, seed=len(factors))
                root = f"base_model.model.{name.removesuffix('.weight')}"
                factors |= {f"{root}.lora_A.weight": a, f"{root}.lora_B.weight": b}
                parameter.data = parameter.data + 2.0 * (b @ a)
        save_file(factors, adapter / "adapter_model.safetensors")
        edit(folder, architectures=["JinaEmbeddingsV5Model"], **changes)
        states = states_of(model)
        return lambda ids: states(ids)[-1 if family == "Qwen3" else 0]

    return make


BERT = {**SIZES, "type_vocab_size": 2}
ROBERTA = {**SIZES, "type_vocab_size": 1}
MODERNBERT = {**SIZES, **LOCAL}
GTE = {**SIZES, "type_vocab_size": 2}
LFM2 = {
    **DECODER,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}
GEMMA3 = {
    **DECODER,
    "use_bidirectional_attention": True,
    "sliding_window": 16,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 16,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": 200, "pad_token_id": 0}
JAMBA = {
    **DECODER,
    "num_experts": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "use_mamba_kernels": False,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
RENAMED = "transformers, renamed"
HEAD = "transformers, and the head's formula"

FAMILIES: dict[str, PoolingFamily] = {
    "BertModel": PoolingFamily(embeds("Bert", BERT)),
    "BertForMaskedLM": PoolingFamily(scores("Bert", BERT, "ForMaskedLM")),
    "BertSpladeSparseEmbeddingModel": PoolingFamily(splade, HEAD),
    "BgeM3EmbeddingModel": PoolingFamily(bge_m3, HEAD),
    "Gemma2Model": PoolingFamily(embeds("Gemma2", {**DECODER, "sliding_window": 16}, -1)),
    "Gemma3TextModel": PoolingFamily(embeds("Gemma3Text", GEMMA3)),
    "GteModel": PoolingFamily(embeds("Gte", GTE)),
    "GteNewModel": PoolingFamily(renamed_gte("Model", "GteNewModel"), RENAMED),
    "JinaEmbeddingsV5Model": PoolingFamily(jina_v5("Qwen3"), "transformers, with merged adapters"),
    "LlamaBidirectionalModel": PoolingFamily(bidirectional("Llama", "LlamaBidirectionalModel", pooling="avg")),
    "LlamaModel": PoolingFamily(embeds("Llama", DECODER, -1)),
    "LlamaForCausalLM": PoolingFamily(generates("Llama", DECODER), options={"runner": "pooling"}),
    "MistralModel": PoolingFamily(embeds("Mistral", {**DECODER, "sliding_window": 32}, -1)),
    "ModernBertModel": PoolingFamily(embeds("ModernBert", MODERNBERT)),
    "NomicBertModel": PoolingFamily(embeds("NomicBert", SIZES)),
    "Phi3ForCausalLM": PoolingFamily(
        generates("Phi3", {**DECODER, "original_max_position_embeddings": 200}), options={"runner": "pooling"}
    ),
    "Qwen2Model": PoolingFamily(embeds("Qwen2", DECODER, -1)),
    "Qwen2ForCausalLM": PoolingFamily(generates("Qwen2", DECODER), options={"runner": "pooling"}),
    "RobertaForMaskedLM": PoolingFamily(embeds("Roberta", ROBERTA, architectures=["RobertaForMaskedLM"])),
    "RobertaModel": PoolingFamily(embeds("Roberta", ROBERTA)),
    "VoyageQwen3BidirectionalEmbedModel": PoolingFamily(voyage, HEAD),
    "XLMRobertaModel": PoolingFamily(embeds("XLMRoberta", ROBERTA)),
    "HF_ColBERT": PoolingFamily(late_interaction("Bert", BERT, "HF_ColBERT", "bert."), HEAD),
    "ColBERTModernBertModel": PoolingFamily(
        late_interaction("ModernBert", MODERNBERT, "ColBERTModernBertModel", ""), HEAD
    ),
    "ColBERTLfm2Model": PoolingFamily(late_interaction("Lfm2", LFM2, "ColBERTLfm2Model", "model."), HEAD),
    "ColBERTJinaRobertaModel": PoolingFamily(
        late_interaction("JinaEmbeddingsV3", ROBERTA, "ColBERTJinaRobertaModel", "roberta."), HEAD
    ),
    "JinaForRanking": PoolingFamily(jina_ranking, HEAD),
    "InternLM2ForRewardModel": PoolingFamily(internlm2_reward, "transformers' Llama, renamed, and the head's formula"),
    "Qwen2ForRewardModel": PoolingFamily(reward("Qwen2", "Qwen2ForRewardModel", 1), HEAD),
    "Qwen2ForProcessRewardModel": PoolingFamily(
        reward("Qwen2", "Qwen2ForProcessRewardModel", 2, 151_651, vocab_size=151_652), HEAD
    ),
    "BertForTokenClassification": PoolingFamily(scores("Bert", BERT, "ForTokenClassification", num_labels=5)),
    "ModernBertForTokenClassification": PoolingFamily(
        scores("ModernBert", MODERNBERT, "ForTokenClassification", num_labels=3)
    ),
    "RobertaForTokenClassification": PoolingFamily(scores("Roberta", ROBERTA, "ForTokenClassification", num_labels=2)),
    "XLMRobertaForTokenClassification": PoolingFamily(
        scores("XLMRoberta", ROBERTA, "ForTokenClassification", num_labels=2)
    ),
    "BertForSequenceClassification": PoolingFamily(scores("Bert", BERT, "ForSequenceClassification", num_labels=3)),
    "GPT2ForSequenceClassification": PoolingFamily(scores("GPT2", GPT2, "ForSequenceClassification", num_labels=2)),
    "GteNewForSequenceClassification": PoolingFamily(
        renamed_gte("ForSequenceClassification", "GteNewForSequenceClassification", num_labels=1), RENAMED
    ),
    "JambaForSequenceClassification": PoolingFamily(scores("Jamba", JAMBA, "ForSequenceClassification", num_labels=1)),
    "LlamaBidirectionalForSequenceClassification": PoolingFamily(bidirectional_scores, HEAD),
    "ModernBertForSequenceClassification": PoolingFamily(
        scores("ModernBert", MODERNBERT, "ForSequenceClassification", num_labels=3, classifier_pooling="mean")
    ),
    "RobertaForSequenceClassification": PoolingFamily(
        scores("Roberta", ROBERTA, "ForSequenceClassification", num_labels=1)
    ),
    "XLMRobertaForSequenceClassification": PoolingFamily(
        scores("XLMRoberta", ROBERTA, "ForSequenceClassification", num_labels=1)
    ),
}

# Of vLLM's table of embedding models, those that sees, with the name of support.seeing.
WITH_PICTURES = {"LlavaNextForConditionalGeneration": "llava_next", "Qwen2VLForConditionalGeneration": "qwen2_vl"}


@dataclass(frozen=True)
class LateInteraction:
    """A model with a vector for each token of pictures and texts. model: of support.seeing. linear: the layer that
    makes the vectors; None without one. prefix: of the checkpoint's names, instead of "model."."""

    model: str
    linear: str | None
    size_field: str = "dim"
    prefix: str = "model."
    bias: bool = True


LATE_INTERACTION = {
    "ColQwen2": LateInteraction("qwen2_vl", "custom_text_proj"),
    "ColQwen3": LateInteraction("qwen3_vl", "embedding_proj_layer", "embed_dim", "vlm.model."),
    "ColQwen3_5": LateInteraction("qwen3_5", "custom_text_proj", "dim", ""),
    "OpsColQwen3Model": LateInteraction("qwen3_vl", "custom_text_proj", "dims", "", bias=False),
    "Qwen3VLNemotronEmbedModel": LateInteraction("qwen3_vl", None),
}
