"""The encoder of a model whose text layers are Quire's, and whose encoder is transformers' code.

The whole forward of transformers' model runs on the tokens and tensors of one item, up to its text layers, whose place
a recorder takes. What it receives shows what the model does with pictures: rows of embeddings are the item's
embeddings, and anything that Quire does not pass to its layers is an error, not a wrong answer.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from quire.checkpoints.errors import WeightError
from quire.config.engine import ConfigError
from quire.config.multimodal import MultiModalConfig
from quire.layers.build import Builder
from quire.messages.errors import error_text
from quire.models.transformers_backend.published import published_as
from quire.models.transformers_backend.text_models import class_of, settings_of
from quire.multimodal.families.base import Family, Prepared
from quire.multimodal.families.transformers import composed
from quire.multimodal.processor import load_family
from quire.multimodal.spec import MediaSpec

_SAMPLE_SIDES = ((64, 64), (400, 200))  # of pictures, in pixels
_SAMPLE_SECONDS = 2
_MASKS = "quire_text"  # among transformers' attention functions
# What text layers are given, besides embeddings, positions and a mask, without effect on a prompt's hidden states.
_HARMLESS = {"use_cache", "cache_position", "cache", "past_key_values", "return_dict", "output_attentions",
             "output_hidden_states", "output_router_logits", "logits_to_keep", "inputs_embeds", "attention_mask",
             "position_ids", "num_items_in_batch", "labels"}  # fmt: skip
# The names of features that are added to the results of layers (True: before a layer, by its number), and of the tokens
# that they are added to.
_LEVELS = {"deepstack_visual_embeds": ("visual_pos_masks", False), "deepstack_features": ("vision_mask", True)}


class _Reached(Exception):  # noqa: N818 - no error: the forward has arrived at the text layers
    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


class _NoTable(nn.Module):
    """Takes the place of the table of embeddings: vectors of text have no effect on those of items. value: of all their
    elements."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.weight.shape
        self.value = 0.0
        self.dtype = table.weight.dtype
        self.device = torch.device("cpu")

    def forward(self, ids: Tensor, *others: Any) -> Tensor:
        self.device = ids.device
        return torch.full((*ids.shape, self.embedding_dim), self.value, dtype=self.dtype, device=ids.device)

    @property
    def weight(self) -> Tensor:
        value = torch.full((1, 1), self.value, dtype=self.dtype, device=self.device)
        return value.expand(self.num_embeddings, self.embedding_dim)


class Tower:
    def __init__(self, network: Any, token_ids: Mapping[str, int], levels: Sequence[int], builder: Builder) -> None:
        """network: without its text layers. token_ids: by modality, of the tokens that embeddings replace. levels: see
        MediaSpec."""
        self._network = network
        self.levels = levels
        self._token_ids = token_ids
        self._device = builder.device
        self._dtype = builder.dtype
        self.tensors = dict([*network.named_parameters(), *network.named_buffers()])
        for name, parameter in network.named_parameters():
            builder.count(f"encoder {name}", parameter.numel())
        accepted = {**inspect.signature(network.forward).parameters}
        accepted |= inspect.signature(network.base_model.forward).parameters
        self._accepted = set(accepted)
        self.table: _NoTable = network.get_input_embeddings()

    @torch.inference_mode()
    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        ids, inputs = self.inputs_of_layers(modality, tensors)
        return self.features(ids == self._token_ids[modality], inputs)

    def features(self, own: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return an item's embeddings and features for further layers, [embeds, hidden * (1 + levels)]. own: [tokens],
        the item's. inputs: of the text layers."""
        embeds: Tensor = inputs["inputs_embeds"][0][own]
        if not self.levels:
            return embeds
        found = levels_of(inputs)
        first = found.get(-1)
        parts = [embeds if first is None else embeds + first, *(found.get(layer) for layer in self.levels)]
        return torch.cat([torch.zeros_like(embeds) if part is None else part.to(embeds.dtype) for part in parts], 1)

    def inputs_of_layers(self, modality: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return the token ids of an item, and what transformers' text layers receive for them."""
        inputs = {name: self._moved(tensor) for name, tensor in tensors.items() if name in self._accepted}
        ids = inputs.pop("input_ids")
        types = torch.where(ids == self._token_ids[modality], 1 if modality == "image" else 3, 0)[None]
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self._accepted:
                inputs[name] = types
        try:
            self._network(input_ids=ids[None], use_cache=False, **inputs)
        except _Reached as reached:
            return ids, reached.inputs
        raise ValueError("its text layers cannot be told from its encoder")

    def token_id(self, modality: str) -> int:
        return self._token_ids[modality]

    def _moved(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._device)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def load(builder: Builder, spec: MediaSpec, weights: Path | None, options: MultiModalConfig) -> Tower:
    """weights: the checkpoint's folder, None for random weights. Raises WeightError, and ConfigError for a model whose
    text layers receive more than embeddings."""
    name = class_of(dict(spec.config))
    assert name is not None, "the registry asks for it"
    try:
        settings = settings_of(dict(spec.config))
        published = published_as(dict(spec.config))
        names = {} if published is None else published.names
        network = _network(getattr(transformers, name), settings, builder, weights, names)
        items = load_family(spec, options.mm_processor_kwargs, lambda token_id: "")
        tower = Tower(
            network, {modality: kind.token_id for modality, kind in items.kinds.items()}, spec.levels, builder
        )
        for modality in items.kinds:
            for sample in _samples(items, modality):
                _check(tower, modality, sample, spec.two_way)
    except WeightError:
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError, KeyError) as error:
        raise ConfigError(f"{name} cannot run with transformers' encoder: {error_text(error)}") from error
    return tower


def _samples(items: Family, modality: str) -> list[Prepared]:
    if modality == "audio":
        import numpy as np

        draw = np.random.default_rng(0)
        return [items.audio(draw.normal(0, 0.1, _SAMPLE_SECONDS * items.sample_rate).astype(np.float32))]
    from PIL import Image

    return [items.image(Image.new("RGB", size, (200, 100, 50))) for size in _SAMPLE_SIDES]


def _check(tower: Tower, modality: str, sample: Prepared, two_way: bool) -> None:
    """Raises ValueError if the model does more with an item than to replace embeddings, and to let its tokens see each
    other if `two_way`."""
    if not sample.num_embeds:
        raise ValueError(f"its processor makes no tokens that the embeddings of {modality} inputs replace")
    tensors = {name: torch.tensor(a) for name, a in sample.tensors.items()}
    ids, inputs = tower.inputs_of_layers(modality, tensors)
    known = {*_HARMLESS, *_LEVELS, *(mask for mask, _ in _LEVELS.values())}
    more = sorted(name for name, value in inputs.items() if value is not None and name not in known)
    if more:
        raise ValueError(f"its text layers also read {', '.join(more)}")
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3:
        rotary = sample.rotary
        if rotary is None:
            raise ValueError("its items have rotary positions of several axes, which transformers' function is not for")
        first = int((ids == tower.token_id(modality)).nonzero()[0])
        expected = torch.tensor(composed(len(ids), [(first - sample.lead, rotary)]), device=positions.device)
        if not bool((positions[-len(expected) :, 0] == expected).all()):
            raise ValueError("its layers are given other rotary positions than those of its items")
    embeds = inputs.get("inputs_embeds")
    if embeds is None or embeds.shape[:2] != (1, len(ids)):
        raise ValueError("its text layers are not given the embeddings of the prompt")
    own = ids == tower.token_id(modality)
    replaced = embeds[0].ne(0).any(1)
    found = _check_levels(tower, inputs, own)
    if not bool((replaced == own).all()) and (-1 not in found or bool(replaced.any())):
        raise ValueError(f"embeddings of {modality} inputs replace other tokens, too, or not all of theirs")
    if not two_way:
        _check_mask(inputs.get("attention_mask"), len(ids))
    features = tower.features(own, inputs)
    largest = features.abs().max().item()
    tower.table.value = largest
    again = tower(modality, tensors)
    tower.table.value = 0.0
    if not torch.allclose(again, features, atol=largest / 100):
        raise ValueError("its encoder reads the table of embeddings")


def levels_of(inputs: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return what text layers are to add to the results of layers, [embeds, hidden] each: -1 for the embeddings."""
    for name, (_, before) in _LEVELS.items():
        if (given := inputs.get(name)) is not None:
            items = given.items() if isinstance(given, Mapping) else enumerate(given)
            return {layer - before: torch.as_tensor(level) for layer, level in items}
    return {}


def _check_levels(tower: Tower, inputs: Mapping[str, Any], own: Tensor) -> dict[int, Tensor]:
    """Raises ValueError for features that are added to other layers or other tokens. own: the item's tokens."""
    found = levels_of(inputs)
    if unknown := sorted(found.keys() - {-1, *tower.levels}):
        raise ValueError(f"features of a picture are added to the layers {unknown}, too")
    for name, _ in _LEVELS.values():
        tokens = inputs.get(name)
        if found and tokens is not None and not bool((tokens.view(len(own), -1).any(1) == own).all()):
            raise ValueError("features of a picture are added to other tokens, too")
    return found


def _check_mask(mask: Any, length: int) -> None:
    """Raises ValueError for a mask that is not causal. The text model's own masks were made by the recorded
    functions."""
    for one in mask.values() if isinstance(mask, dict) else [mask]:
        if one is None:
            continue
        function = getattr(one, "function", None)
        if function is None:
            raise ValueError("it changes the attention mask")
        rows = torch.arange(length)
        zero = torch.tensor(0)
        for query in range(length):
            if bool(torch.as_tensor(function(zero, zero, torch.tensor(query), rows)).expand(length)[query + 1 :].any()):
                raise ValueError("the tokens of an item also see those behind them")


def _mask(*arguments: Any, mask_function: Callable[..., Tensor], **others: Any) -> Tensor:
    made = torch.zeros(1, 1, 1, 1)
    made.function = mask_function  # type: ignore[attr-defined]
    return made


def _strip(network: Any) -> None:
    """Remove the text layers of a model, in whose place an exception reports what they are given."""
    text = network.get_decoder()
    if text is network or text is network.base_model:
        raise ValueError("its text layers cannot be told from its encoder")
    embedding = text.get_input_embeddings()
    network.set_input_embeddings(_NoTable(embedding))
    body = text.base_model
    for name, child in list(body.named_children()):
        if not isinstance(child, _NoTable):
            setattr(body, name, nn.ModuleList() if isinstance(child, nn.ModuleList) else nn.Identity())
    if hasattr(body, "get_per_layer_inputs"):  # Quire makes them, of the padding token's vectors
        body.get_per_layer_inputs = lambda *arguments: None
    for owner in {id(network): network, id(text): text}.values():
        if (head := owner.get_output_embeddings()) is not None:
            name = next(name for name, module in owner.named_modules() if module is head)
            parent = owner.get_submodule(name.rpartition(".")[0]) if "." in name else owner
            setattr(parent, name.rpartition(".")[2], nn.Identity())
    network.all_tied_weights_keys = {}
    network._tied_weights_keys = None

    def reached(*arguments: Any, **inputs: Any) -> None:
        raise _Reached(inputs)

    text.forward = reached


def _network(kind: Any, settings: Any, builder: Builder, weights: Path | None, names: Mapping[str, str]) -> Any:
    """Return the model without its text layers, and with the weights of the rest. names: see Published."""

    def start(self: Any, config: Any, *arguments: Any, **others: Any) -> None:
        kind.__init__(self, config, *arguments, **others)
        _strip(self)

    stripped: Any = type(kind.__name__, (kind,), {"__init__": start, "__module__": kind.__module__})
    ALL_MASK_ATTENTION_FUNCTIONS.register(_MASKS, _mask)
    ALL_ATTENTION_FUNCTIONS.register(_MASKS, ALL_ATTENTION_FUNCTIONS["sdpa"])
    transformers_logging.disable_progress_bar()
    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with torch.device("meta"):  # without memory for the text layers
                network = stripped._from_config(settings, dtype=builder.dtype)
            network = network.to_empty(device="cpu")
            network.init_weights()
    else:
        network = _loaded(stripped, settings, builder, weights, names)
    network.config.get_text_config(decoder=True)._attn_implementation = _MASKS
    return network.to(builder.device).eval()


def _loaded(kind: Any, settings: Any, builder: Builder, weights: Path, names: Mapping[str, str]) -> Any:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the tensors of text layers are unexpected
    try:
        network, info = kind.from_pretrained(
            weights,
            config=settings,
            dtype=builder.dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=dict(names) or None,
        )
    except (OSError, RuntimeError) as error:
        raise WeightError(f"transformers cannot load {weights}: {error_text(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    for label in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(label):
            some = ", ".join(sorted(map(str, info[label]))[:5])
            raise WeightError(f"the encoder's tensors do not fit; {label.partition('_')[0]}: {some}")
    return network
