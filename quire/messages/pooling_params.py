"""PoolingParams: the parameters of a request for an embedding or scores, with vLLM's names and defaults."""

from typing import Any, Literal, get_args

import msgspec

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
_OF_EACH_TOKEN = ("token_embed", "token_classify")


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Pooling parameters of a request. Raises ValueError or TypeError for a wrong value, naming the field.

    task: what to compute; None is the model's default task.
    dimensions: length of the embedding, for models whose embeddings may be shortened. None keeps the full length.
    use_activation: apply the model's activation to scores, and normalize embeddings. None is the model's default.
    truncate_prompt_tokens: shorten the prompt to this many tokens; -1 shortens it to fit max_model_len.
    skip_reading_prefix_cache: compute the whole prompt even if a prefix is cached. None does so for tasks that need
        every token's hidden state.
    extra_kwargs: arguments for pooler plugins.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        tasks = get_args(PoolingTask)
        if self.task is not None and self.task not in tasks:
            raise ValueError(f"task must be one of {', '.join(tasks)}, got {self.task!r}.")
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an integer, got {type(value).__name__}.")
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.extra_kwargs, dict | None):
            raise TypeError(f"extra_kwargs must be a dict, got {type(self.extra_kwargs).__name__}.")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be greater than 0, got {self.dimensions}.")
        if self.dimensions is not None and self.task not in (None, "embed", "token_embed"):
            raise ValueError(f"dimensions is for embeddings, not for task={self.task!r}.")
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            raise ValueError(f"truncate_prompt_tokens must be -1 or at least 1, got {keep}.")

    @property
    def reads_prefix_cache(self) -> bool:
        skips = self.skip_reading_prefix_cache
        return self.task not in _OF_EACH_TOKEN if skips is None else not skips
