"""Errors in a model's files."""


class ModelNotFoundError(ValueError):
    """A model does not exist, or lacks a file. The message contains the places where Quire looked for it."""


class WeightError(ValueError):
    """The checkpoint's tensors cannot be read, or do not fit the model. The message names the file or the tensors."""
