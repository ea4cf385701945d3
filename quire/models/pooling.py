"""Determines a model's poolers from its architecture, sentence-transformers' files and the options. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.checkpoints.sentence_transformers import SentenceTransformer, read_sentence_transformer
from quire.config.engine import ConfigError, ModelConfig
from quire.layers.specs import PoolerSpec, Pooling, TokenChoice
from quire.models.pooling_heads import CLASSIFIERS, classifier, embedder, is_late_interaction, step_scores, words_head
from quire.models.registry import ARCHITECTURES
from quire.models.spec import DecoderSpec, HfConfig

# vLLM's names
_POOLING: dict[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": "all", "STEP": "all", "MAX": "max"}
_ACTIVATIONS = ("use_activation", "normalize", "softmax", "activation")
_FIELDS = {
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    *_ACTIVATIONS,
    "logit_mean",
    "logit_sigma",
    "step_tag_id",
    "returned_token_ids",
}
_GENERATING = {"Qwen2_5OmniModel"}  # through transformers, and with the name of a model that embeds


@dataclass(frozen=True)
class PoolingDescription:
    """pooler: the usual one. others: of further tasks. prompts, default_prompt, max_tokens: see SentenceTransformer.
    task: the default for requests that name none."""

    pooler: PoolerSpec
    files: SentenceTransformer = field(default_factory=SentenceTransformer)
    task: str | None = None
    others: Mapping[str, PoolerSpec] = field(default_factory=dict)

    @property
    def scores_pairs(self) -> bool:
        """Whether `score` passes both texts to the model at once (a cross-encoder)."""
        return len(self.pooler.labels) == 1 and not self.pooler.of_each_token

    @property
    def is_listwise(self) -> bool:
        """Whether `score` passes all documents to the model at once (jina-reranker-v3)."""
        return self.pooler.tokens is not None and len(self.pooler.tokens.ids) > 1

    @property
    def heads(self) -> dict[str, PoolerSpec]:
        """Return the poolers of all tasks that the model can compute, by vLLM's names of the tasks, the usual one
        first."""
        pooler = self.pooler
        if pooler.is_classifier:
            names = ["token_classify" if pooler.of_each_token else "classify"] + ["score"] * self.scores_pairs
        else:
            names = ["token_embed"] if pooler.of_each_token else ["embed", "score"]
        heads = dict.fromkeys(names, pooler)
        if not pooler.is_classifier:
            heads.setdefault("token_embed", PoolerSpec("all", normalize=pooler.normalize))
        heads |= self.others
        return dict(sorted(heads.items(), key=lambda item: item[0] != self.task))

    @property
    def tasks(self) -> list[str]:
        """The tasks that the model can compute, the usual one first."""
        return list(self.heads)


def is_pooling_model(config: HfConfig, directory: Path, options: ModelConfig) -> bool:
    """Whether the runner is "pooling": because of the options, or because the checkpoint's model does not generate."""
    if options.runner != "auto":
        return options.runner == "pooling"
    if options.convert in ("embed", "classify"):
        return True
    name = str((config.get("architectures") or [""])[0])
    if not directory.is_file() and (directory / "modules.json").is_file():
        return True
    if name in ARCHITECTURES or name in _GENERATING:  # such as ChatGLMModel
        return False
    pools = name.endswith(("Model", "ForMaskedLM", "ForRanking", *CLASSIFIERS)) and not name.endswith("LMHeadModel")
    return pools or is_late_interaction(name)


def describe_pooling(config: HfConfig, spec: DecoderSpec, directory: Path, options: ModelConfig) -> PoolingDescription:
    """Raises ConfigError for options that do not fit the model, ValueError for an unsupported model."""
    name = str((config.get("architectures") or [""])[0])
    files = read_sentence_transformer(directory)
    given = dict(options.pooler_config)
    task = given.pop("task", None)
    if unknown := sorted(given.keys() - _FIELDS):
        raise ConfigError(f"pooler_config has no field {unknown[0]!r}; it has {', '.join(sorted(_FIELDS | {'task'}))}")
    others: Mapping[str, PoolerSpec] = {}
    if options.convert != "embed" and (name.endswith(CLASSIFIERS) or options.convert == "classify"):
        words = config.get("classifier_from_token")
        pooler = words_head(words, config, spec, directory) if words else classifier(name, config, spec)
    elif given.get("returned_token_ids") is not None and spec.names["lm_head"] is not None:
        pooler = step_scores(spec, given["returned_token_ids"])
    else:
        pooler, others = embedder(name, config, spec, directory, files)
    description = PoolingDescription(_with_options(pooler, given), files or SentenceTransformer(), task, others)
    if task is not None and task not in description.tasks:
        tasks = ", ".join(description.tasks)
        raise ConfigError(f"pooler_config: task must be one of this model's, which are {tasks}, got {task!r}")
    return description


def _with_options(pooler: PoolerSpec, given: dict[str, Any]) -> PoolerSpec:
    kind = given.get("pooling_type") or given.get("tok_pooling_type") or given.get("seq_pooling_type")
    if kind is not None:
        of_steps = pooler.is_classifier and pooler.of_each_token
        known = [name for name in _POOLING if name != "STEP" or of_steps]
        if str(kind).upper() not in known:
            raise ConfigError(f"pooler_config: pooling_type must be one of {', '.join(known)}, got {kind!r}")
        pooler = replace(pooler, pooling=_POOLING[str(kind).upper()])
    use = next((given[name] for name in _ACTIVATIONS if given.get(name) is not None), None)
    if not isinstance(use, bool | None):
        raise ConfigError(f"pooler_config: use_activation and normalize are true or false, got {use!r}")
    if use is not None and pooler.is_classifier:
        pooler = pooler if use else replace(pooler, activation="identity")
    elif use is not None:
        pooler = replace(pooler, normalize=use)
    return _with_numbers(pooler, given)


def _with_numbers(pooler: PoolerSpec, given: dict[str, Any]) -> PoolerSpec:
    mean, sigma = (given.get(name) for name in ("logit_mean", "logit_sigma"))
    for name, value in (("logit_mean", mean), ("logit_sigma", sigma)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and (value or name == "logit_mean")):
            raise ConfigError(f"pooler_config: {name} must be a number, and logit_sigma not 0, got {value!r}")
    pooler = replace(pooler, mean=pooler.mean if mean is None else mean, sigma=sigma or pooler.sigma)
    tag = given.get("step_tag_id")
    if tag is not None:
        if isinstance(tag, bool) or not isinstance(tag, int) or not pooler.of_each_token:
            raise ConfigError(
                f"pooler_config: step_tag_id is the id of a token, for poolers of each token, got {tag!r}"
            )
        pooler = replace(pooler, tokens=TokenChoice(ids=(tag,)))
    return pooler
