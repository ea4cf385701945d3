"""Divides a model into the stages of a pipeline."""

from itertools import accumulate

from quire.config.engine import ConfigError, ParallelConfig
from quire.layers.build import Builder, Outline
from quire.models.decoder import Decoder
from quire.models.spec import DecoderSpec
from quire.parallel.pipeline import Stage
from quire.parallel.sizes import balanced_parts

_NO_LAYERS = range(0)


def choose_stage(
    builder: Builder, spec: DecoderSpec, options: ParallelConfig, number: int, drafts: bool
) -> tuple[Stage, set[str]]:
    """Return the stage with the given number, and the names of the whole model's checkpoint tensors.

    Stages are chosen so that the slowest one reads as few bytes of weights as possible. The last stage also counts half
    of the head, which is only computed for tokens followed by a sampled token. builder: like the model's; it is not
    changed. drafts: whether the last stage has a drafter. Raises ConfigError if the options do not fit the model.
    """
    outline = Outline(builder)
    parts = spec.indivisible
    costs = []
    for layers in parts:
        before = outline.num_bytes
        Decoder(outline, spec, 1, Stage(layers, False, False))
        costs.append(outline.num_bytes - before)
    Decoder(outline, spec, 1, Stage(_NO_LAYERS))
    table = spec.vocab_size * (spec.embedding_size or spec.hidden_size) * builder.dtype.itemsize
    if spec.names.get("lm_head") is not None:
        costs[-1] += table // builder.tensor_group.size // 2  # a step that computes prompts hardly uses it
    stages = options.pipeline_parallel_size
    counts = options.pipeline_layers
    if counts and (sum(counts) != spec.num_layers or min(counts) < 1):
        raise ConfigError(
            f"pipeline_layers must add up to the model's {spec.num_layers} layers, with at least one for "
            f"each stage, got {counts}"
        )
    if divided := set(accumulate(counts[:-1])) - {layers.start for layers in parts}:
        raise ConfigError(
            f"pipeline_layers: layer {min(divided)} attends to the tokens that the layer before selects, "
            "so both must be in one stage"
        )
    counts = counts or balanced_parts(parts, costs, stages)
    start = sum(counts[:number])
    is_first = number == 0
    is_last = number == stages - 1
    has_embedding = is_first or (is_last and (spec.tie_embeddings or drafts))
    stage = Stage(range(start, start + counts[number]), has_embedding, is_last)
    return stage, {slot.name for slot in outline.slots} | outline.tensors_elsewhere
