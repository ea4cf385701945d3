"""The poolers of architectures with a head of their own: classifiers, reward models, late interaction. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from quire.checkpoints.sentence_transformers import ACTIVATIONS, SentenceTransformer
from quire.config.engine import ConfigError
from quire.layers.specs import DenseSpec, NormSpec, PoolerSpec, Pooling, TokenChoice
from quire.models.registry import ENCODERS
from quire.models.spec import DecoderSpec, HfConfig

Poolers = Mapping[str, PoolerSpec]  # by task, the usual one first


# vLLM's and transformers' names of models with scores
CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
    "ForSequenceScoring",
)
_OF_EACH_TOKEN = ("ForTokenClassification", "ForRewardModel", "ForProcessRewardModel")
# Models of late interaction that see: the layer that makes the vectors, and whether it has a bias.
_VECTORS: dict[str, tuple[str, bool | None]] = {
    "ColQwen2": ("custom_text_proj", None),
    "ColQwen2_5": ("custom_text_proj", None),
    "ColQwen3": ("embedding_proj_layer", None),
    "ColQwen3_5": ("custom_text_proj", None),
    "OpsColQwen3Model": ("custom_text_proj", None),
}
_LABELS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2, "InternLM2ForRewardModel": 1}
_ALIGNER = "Qwen3ASRForcedAlignerForTokenClassification"
_BARE_HEADS = {"InternLM2": "v_head", _ALIGNER: "lm_head"}  # without a bias
_STEP = 151651  # <extra_0>, which follows each step of a solution (Qwen2.5-Math-PRM)
_JINA_MARKS = (151670, 151671)  # <|embed_token|> after each document, <|rerank_token|> after the query


def embedder(
    name: str, config: HfConfig, spec: DecoderSpec, directory: Path, files: SentenceTransformer | None
) -> tuple[PoolerSpec, Poolers]:
    """Return the pooler of a model that is no classifier, and those of its further tasks. files: None if there are
    none."""
    hidden = spec.hidden_size
    if (files is not None and files.is_sparse) or name == "BertSpladeSparseEmbeddingModel":
        ends = TokenChoice((), config.get("cls_token_id"), config.get("sep_token_id"))
        tokens = ends if name.startswith("BertSplade") and ends != TokenChoice() else None
        sparse = vocabulary_head(config, spec, "log1p_relu")
        return PoolerSpec("max", of_tokens=sparse, normalize=False, tokens=tokens), {}
    if name == "JinaForRanking":
        size = int(config.get("embedding_size", 512))
        inner = DenseSpec("projector.0", hidden, hidden // 2, False, "relu")
        outer = DenseSpec("projector.2", hidden // 2, size, False)
        return PoolerSpec("all", (inner, outer), normalize=False, tokens=TokenChoice(_JINA_MARKS)), {}
    if is_late_interaction(name):
        layers = () if files is None else files.layers
        sizes = ("colbert_dim", "dim", "projection_dim", "embed_dim", "dims")
        size = next((config[key] for key in sizes if config.get(key)), 128)
        weight, bias = _VECTORS.get(name, ("linear", False))
        return PoolerSpec("all", layers=layers or (DenseSpec(weight, hidden, int(size), bias),)), {}
    if name == "Qwen3VLNemotronEmbedModel":
        return PoolerSpec("all"), {}
    if name == "VoyageQwen3BidirectionalEmbedModel":
        linear = DenseSpec("linear", hidden, int(config["num_labels"]), bias=False)
        pooling = "last" if files is None else files.pooling or "all"
        return PoolerSpec(pooling, (linear,), normalize=files is None or files.normalize), {}
    if name.endswith("ForMaskedLM") and "Roberta" not in name:  # logits, one for each token of the vocabulary
        labels = tuple(f"LABEL_{i}" for i in range(spec.vocab_size))
        logits = vocabulary_head(config, spec, "identity")
        return PoolerSpec("all", logits, labels=labels, activation="softmax", normalize=False), {}
    return _usual(config, spec, files), _bge_m3(config, hidden, directory) if "Roberta" in name or "Bge" in name else {}


def _usual(config: HfConfig, spec: DecoderSpec, files: SentenceTransformer | None) -> PoolerSpec:
    if files is not None:
        return PoolerSpec(
            files.pooling or "all",
            layers=files.layers,
            normalize=files.normalize or (files.pooling is None and files.is_late_interaction),
        )
    pooling = {"avg": "mean", "cls": "cls", "last": "last"}.get(str(config.get("pooling")))
    return PoolerSpec(pooling or ("cls" if spec.is_encoder else "last"))  # type: ignore[arg-type]


def _bge_m3(config: HfConfig, hidden: int, directory: Path) -> Poolers:
    """The heads for vectors of tokens and for weights of tokens of BGE-M3 (arXiv:2402.03216), which are files."""
    files = [f"{name}_linear.pt" for name in ("colbert", "sparse")]
    if not all((directory / file).is_file() for file in files):
        return {}
    first, last = config.get("bos_token_id", 0), config.get("eos_token_id", 2)
    vector = DenseSpec("", hidden, hidden, folder=files[0])
    weight = DenseSpec("", hidden, 1, folder=files[1])
    return {
        "token_embed": PoolerSpec("all", layers=(vector,), tokens=TokenChoice((), first)),
        "token_classify": PoolerSpec(
            "all", (), (weight,), ("LABEL_0",), "relu", normalize=False, tokens=TokenChoice((), first, last)
        ),
    }


def is_late_interaction(name: str) -> bool:
    """Whether an architecture makes a vector for each token, which are compared as in ColBERT (arXiv:2004.12832)."""
    return name == "HF_ColBERT" or name.startswith("ColBERT") or name in _VECTORS


def classifier(name: str, config: HfConfig, spec: DecoderSpec) -> PoolerSpec:
    """Return the head of a classifier, with one score per label."""
    names = {int(index): str(label) for index, label in (config.get("id2label") or {}).items()}
    count = _LABELS.get(name) or int(config.get("num_labels") or len(names) or 2)
    if name == _ALIGNER:  # a label is a time, in steps of 80 ms
        count = int((config.get("thinker_config") or config)["classify_num"])
    labels = tuple(names.get(i, f"LABEL_{i}") for i in range(count))
    pooling, layers = _classifier_layers(name, config, spec, count)
    tokens = TokenChoice((_STEP,)) if name.endswith("ForProcessRewardModel") else None
    activation = _scores_activation(config, count, name)
    return PoolerSpec(pooling, (), layers, labels, activation, normalize=False, tokens=tokens)


def _classifier_layers(
    name: str, config: HfConfig, spec: DecoderSpec, count: int
) -> tuple[Pooling, tuple[DenseSpec, ...]]:
    hidden = spec.hidden_size
    tokens = name.endswith(_OF_EACH_TOKEN)

    def head(weight: str, bias: bool = True) -> DenseSpec:
        return DenseSpec(weight, hidden, count, bias)

    if name.startswith("ModernBert"):
        pooling: Pooling = "all" if tokens else config.get("classifier_pooling", "cls")
        return pooling, (_modernbert_dense(config, spec), head("classifier"))
    if not name.startswith(tuple(ENCODERS)):
        usual = {"avg": "mean", "cls": "cls"}.get(str(config.get("pooling")), "last")
        pooling = "all" if tokens else usual  # type: ignore[assignment]
        bare = next((weight for start, weight in _BARE_HEADS.items() if name.startswith(start)), None)
        if bare is not None:
            return pooling, (head(bare, bias=False),)
        if name.endswith(("ForRewardModel", "ForProcessRewardModel")):  # Qwen2.5-Math-RM and -PRM
            return pooling, (DenseSpec("score.0", hidden, hidden, True, "relu"), head("score.2"))
        older = tokens and name.startswith(("Bloom", "Falcon", "GPT2", "GPTNeoX", "Mpt"))
        return pooling, (head("classifier" if older else "score", bias=name.endswith("ForTokenClassification")),)
    if tokens:
        return "all", (head("classifier"),)
    if name.startswith("EuroBert"):
        kind = config.get("classifier_pooling", "late")
        if kind not in ("bos", "mean"):
            raise ValueError(f"classifier_pooling={kind!r} is not supported; only 'bos' and 'mean' are")
        return "cls" if kind == "bos" else "mean", (
            DenseSpec("dense", hidden, hidden, True, "gelu"),
            head("classifier"),
        )
    if any(family in name for family in ("Roberta", "Camembert", "JinaEmbeddingsV3")):
        return "cls", (DenseSpec("classifier.dense", hidden, hidden, True, "tanh"), head("classifier.out_proj"))
    prefix = str(spec.names["embedding"]).partition(".")[0]
    return "cls", (DenseSpec(f"{prefix}.pooler.dense", hidden, hidden, True, "tanh"), head("classifier"))


def _modernbert_dense(config: HfConfig, spec: DecoderSpec) -> DenseSpec:
    hidden = spec.hidden_size
    bias = bool(config.get("classifier_bias", False))
    activation = config.get("classifier_activation", "gelu")
    return DenseSpec("head.dense", hidden, hidden, bias, activation, spec.norm, "head.norm")


def step_scores(spec: DecoderSpec, token_ids: Any) -> PoolerSpec:
    """Score each token with the logits of a few words, such as those for a right and a wrong step (Math-Shepherd)."""
    if not isinstance(token_ids, list) or not token_ids or not all(isinstance(token, int) for token in token_ids):
        raise ConfigError(f"pooler_config: returned_token_ids should be a list of token ids, got {token_ids!r}")
    table = str(spec.names["embedding" if spec.tie_embeddings else "lm_head"])
    words = DenseSpec(table, spec.hidden_size, spec.vocab_size, False, rows=tuple(token_ids))
    labels = tuple(f"LABEL_{i}" for i in range(len(token_ids)))
    return PoolerSpec("all", (), (words,), labels, "softmax" if len(labels) > 1 else "sigmoid", normalize=False)


def words_head(words: Any, config: HfConfig, spec: DecoderSpec, directory: Path) -> PoolerSpec:
    """Score with the logit of one word, or the second word's logit minus the first word's, such as "no" and "yes" of
    Qwen3-Reranker."""
    if not isinstance(words, list) or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"hf_overrides: classifier_from_token should be a list of one word or two, got {words!r}")
    from quire.text.tokenizer import Tokenizer  # slow to import, and few models need it

    tokenizer = Tokenizer.from_directory(directory)
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    if any(len(tokens) != 1 for tokens in ids):
        raise ConfigError(f"hf_overrides: each word of classifier_from_token should be a token, got {words!r}")
    table = str(spec.names["embedding" if spec.tie_embeddings else "lm_head"])
    rows = tuple(tokens[0] for tokens in ids)
    layer = DenseSpec(
        table, spec.hidden_size, spec.vocab_size, False, "difference" if len(rows) == 2 else "identity", rows=rows
    )
    return PoolerSpec("last", (), (layer,), ("LABEL_0",), _scores_activation(config, 1, ""), normalize=False)


def _scores_activation(config: HfConfig, count: int, name: str) -> Literal["identity", "sigmoid", "softmax"]:
    """Return the activation that sentence-transformers' files name, or else the one for the problem type. Rewards are
    not bounded."""
    given = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation"
    )
    if given is not None:
        found = ACTIVATIONS.get(str(given).rpartition(".")[2])
        if found not in ("identity", "sigmoid"):
            raise ValueError(f"the activation function {given} of a classifier is not supported")
        return found  # type: ignore[return-value]
    if name.endswith("ForRewardModel") or name.startswith("Jamba") or config.get("problem_type") == "regression":
        return "identity"
    return "sigmoid" if count == 1 or config.get("problem_type") == "multi_label_classification" else "softmax"


def vocabulary_head(config: HfConfig, spec: DecoderSpec, activation: str) -> tuple[DenseSpec, ...]:
    """Return the head for masked tokens. activation: of the logits; SPLADE's is log(1 + relu(logits))
    (arXiv:2109.10086)."""
    hidden = spec.hidden_size
    table = str(spec.names["embedding"])
    name = str(config["architectures"][0])
    layer_norm = NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True)
    if name.startswith("ModernBert"):
        transform = _modernbert_dense(config, spec)
        bias = "decoder.bias"
    elif "Roberta" in name:
        transform = DenseSpec("lm_head.dense", hidden, hidden, True, "gelu", layer_norm, "lm_head.layer_norm")
        bias = "lm_head.bias"
    else:
        head = "cls.predictions"
        act = config.get("hidden_act", "gelu")
        dense = f"{head}.transform.dense"
        transform = DenseSpec(dense, hidden, hidden, True, act, layer_norm, f"{head}.transform.LayerNorm")
        bias = f"{head}.bias"
    return transform, DenseSpec(table, hidden, spec.vocab_size, True, activation, bias_name=bias)
