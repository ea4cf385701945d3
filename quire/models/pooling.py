"""Determines a model's pooler from its architecture, sentence-transformers' files and the options. No torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from quire.checkpoints.sentence_transformers import ACTIVATIONS, SentenceTransformer, read_sentence_transformer
from quire.config.engine import ConfigError, ModelConfig
from quire.layers.specs import DenseSpec, NormSpec, PoolerSpec, Pooling
from quire.models.registry import ARCHITECTURES
from quire.models.spec import DecoderSpec, HfConfig

# vLLM's names
_POOLING: dict[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": "all", "MAX": "max"}
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForSequenceScoring")


@dataclass(frozen=True)
class PoolingDescription:
    """pooler: see PoolerSpec. prompts, default_prompt, max_tokens: see SentenceTransformer. scores_pairs: whether
    `score` passes both texts to the model at once (a cross-encoder). task: the default for requests that name none."""

    pooler: PoolerSpec
    files: SentenceTransformer = field(default_factory=SentenceTransformer)
    task: str | None = None

    @property
    def scores_pairs(self) -> bool:
        return len(self.pooler.labels) == 1 and not self.pooler.of_each_token

    @property
    def tasks(self) -> list[str]:
        """vLLM's names of the tasks that the model can compute, the usual one first."""
        spec = self.pooler
        if spec.is_classifier:
            tasks = ["token_classify" if spec.of_each_token else "classify"] + ["score"] * self.scores_pairs
        else:
            tasks = ["token_embed"] if spec.of_each_token else ["embed", "score", "token_embed"]
        return sorted(tasks, key=lambda task: task != self.task)


def is_pooling_model(config: HfConfig, directory: Path, options: ModelConfig) -> bool:
    """Whether the runner is "pooling": because of the options, or because the checkpoint's model does not generate."""
    if options.runner != "auto":
        return options.runner == "pooling"
    if options.convert in ("embed", "classify"):
        return True
    name = str((config.get("architectures") or [""])[0])
    if not directory.is_file() and (directory / "modules.json").is_file():
        return True
    if name in ARCHITECTURES:  # such as ChatGLMModel, which generates
        return False
    return (name.endswith(("Model", *_CLASSIFIERS)) and not name.endswith("LMHeadModel")) or name == "HF_ColBERT"


def describe_pooling(config: HfConfig, spec: DecoderSpec, directory: Path, options: ModelConfig) -> PoolingDescription:
    """Raises ConfigError for options that do not fit the model, ValueError for an unsupported model."""
    name = str((config.get("architectures") or [""])[0])
    files = read_sentence_transformer(directory) or SentenceTransformer()
    hidden = spec.hidden_size
    if options.convert != "embed" and (name.endswith(_CLASSIFIERS) or options.convert == "classify"):
        words = config.get("classifier_from_token")
        pooler = _words_head(words, config, spec, directory) if words else _classifier(name, config, spec)
    elif files.is_sparse:
        pooler = PoolerSpec("max", of_tokens=_vocabulary_head(config, spec), normalize=False)
    elif name == "HF_ColBERT":
        pooler = PoolerSpec("all", layers=(DenseSpec("linear", hidden, int(config.get("dim", 128)), bias=False),))
    elif (directory / "modules.json").is_file():
        pooler = PoolerSpec(files.pooling or "all", (), files.layers, normalize=files.normalize)
    else:
        pooler = PoolerSpec("cls" if spec.is_encoder else "last")
    given = dict(options.pooler_config)
    task = given.pop("task", None)
    description = PoolingDescription(_with_options(pooler, given), files, task)
    if task is not None and task not in description.tasks:
        tasks = ", ".join(description.tasks)
        raise ConfigError(f"pooler_config: task must be one of this model's, which are {tasks}, got {task!r}")
    return description


def _with_options(pooler: PoolerSpec, given: dict[str, Any]) -> PoolerSpec:
    known = {
        "pooling_type",
        "seq_pooling_type",
        "tok_pooling_type",
        "normalize",
        "use_activation",
        "softmax",
        "activation",
    }
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"pooler_config has no field {unknown[0]!r}; it has {', '.join(sorted(known | {'task'}))}")
    kind = given.get("pooling_type") or given.get("tok_pooling_type") or given.get("seq_pooling_type")
    if kind is not None:
        if str(kind).upper() not in _POOLING:
            raise ConfigError(f"pooler_config: pooling_type must be one of {', '.join(_POOLING)}, got {kind!r}")
        pooler = replace(pooler, pooling=_POOLING[str(kind).upper()])
    use = given.get("use_activation", given.get("normalize", given.get("softmax", given.get("activation"))))
    if not isinstance(use, bool | None):
        raise ConfigError(f"pooler_config: use_activation and normalize are true or false, got {use!r}")
    if use is not None and pooler.is_classifier:
        pooler = pooler if use else replace(pooler, activation="identity")
    elif use is not None:
        pooler = replace(pooler, normalize=use)
    return pooler


def _classifier(name: str, config: HfConfig, spec: DecoderSpec) -> PoolerSpec:
    """Return the head of a classifier, with one score per label."""
    hidden = spec.hidden_size
    norm = spec.norm
    names = {int(index): str(label) for index, label in (config.get("id2label") or {}).items()}
    count = int(config.get("num_labels") or len(names) or 2)
    labels = tuple(names.get(i, f"LABEL_{i}") for i in range(count))
    tokens = name.endswith(("ForTokenClassification", "ForRewardModel"))

    def head(weight: str, bias: bool = True) -> DenseSpec:
        return DenseSpec(weight, hidden, count, bias)

    pooling: Pooling = "all" if tokens else "cls"
    if name.startswith("ModernBert"):
        dense = DenseSpec(
            "head.dense",
            hidden,
            hidden,
            bool(config.get("classifier_bias", False)),
            config.get("classifier_activation", "gelu"),
            norm,
            "head.norm",
        )
        pooling = "all" if tokens else config.get("classifier_pooling", "cls")
        layers: tuple[DenseSpec, ...] = (dense, head("classifier"))
    elif not spec.is_encoder:
        biased = name.endswith("ForTokenClassification")
        layers = (head("score", bias=biased),)
        pooling = "all" if tokens else "last"
        if name.endswith("ForRewardModel"):  # Qwen2.5-Math-RM
            layers = (DenseSpec("score.0", hidden, hidden, True, "relu"), head("score.2"))
    elif tokens:
        layers = (head("classifier"),)
    elif "Roberta" in name or "Camembert" in name:
        layers = (DenseSpec("classifier.dense", hidden, hidden, True, "tanh"), head("classifier.out_proj"))
    else:  # BERT's own
        prefix = str(spec.names["embedding"]).partition(".")[0]
        layers = (DenseSpec(f"{prefix}.pooler.dense", hidden, hidden, True, "tanh"), head("classifier"))
    return PoolerSpec(pooling, (), layers, labels, _scores_activation(config, count, name), normalize=False)


def _words_head(words: Any, config: HfConfig, spec: DecoderSpec, directory: Path) -> PoolerSpec:
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
    if name.endswith("ForRewardModel") or config.get("problem_type") == "regression":
        return "identity"
    return "sigmoid" if count == 1 or config.get("problem_type") == "multi_label_classification" else "softmax"


def _vocabulary_head(config: HfConfig, spec: DecoderSpec) -> tuple[DenseSpec, ...]:
    """Return the head for masked tokens, with the activation of SPLADE: log(1 + relu(logits)) (arXiv:2109.10086)."""
    hidden = spec.hidden_size
    table = str(spec.names["embedding"])
    names = str(config["architectures"][0])
    layer_norm = NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True)
    if names.startswith("ModernBert"):
        transform = DenseSpec(
            "head.dense",
            hidden,
            hidden,
            bool(config.get("classifier_bias", False)),
            config.get("classifier_activation", "gelu"),
            spec.norm,
            "head.norm",
        )
        bias = "decoder.bias"
    elif "Roberta" in names:
        transform = DenseSpec("lm_head.dense", hidden, hidden, True, "gelu", layer_norm, "lm_head.layer_norm")
        bias = "lm_head.bias"
    else:
        transform = DenseSpec(
            "cls.predictions.transform.dense",
            hidden,
            hidden,
            True,
            config.get("hidden_act", "gelu"),
            layer_norm,
            "cls.predictions.transform.LayerNorm",
        )
        bias = "cls.predictions.bias"
    logits = DenseSpec(table, hidden, spec.vocab_size, True, "log1p_relu", bias_name=bias)
    return transform, logits
