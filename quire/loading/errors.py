"""What can be wrong with a model's files."""


class ModelNotFoundError(ValueError):
    """There is no such model, or it lacks a file. The message says where it was looked for."""


class WeightError(ValueError):
    """The checkpoint's tensors are not those of the model. The message names the tensors."""
