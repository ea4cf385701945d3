"""A text encoder, built from the engine's layers like the decoder, and divided among the ranks."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.step_inputs import StepInputs, StepSize
from quire.models.decoder import Decoder
from quire.multimodal.spec import MediaSpec
from quire.ops.memory import upload


class Encoder:
    """Encodes one text at a time."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self.model = model
        self.device = device

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """ids: [tokens] -> [tokens, hidden]"""
        count = len(tensors["ids"])
        device = self.device
        ids = upload(tensors["ids"].numpy(), device)
        bounds = upload(np.array([0, count], np.int32), device)
        slots = tensors.get("slots")
        inputs = StepInputs(
            size=StepSize(count, 1, adapted=slots is not None),
            longest_prompt=count,
            input_ids=ids,
            positions=torch.arange(count, device=device),
            slot_mapping=ids.new_empty(0, count),
            query_start_loc=bounds,
            seq_lens=bounds[1:],
            block_tables=bounds.new_empty(0, 1, 0),
            adapters=slots,
        )
        x = self.model.embed(ids, inputs.positions, slots)
        return self.model.forward(x, ForwardState(inputs, [], [], slots=slots))


def make(builder: Builder, spec: MediaSpec) -> Encoder:
    assert spec.encoder is not None
    return Encoder(Decoder(builder, spec.encoder, spec.encoder.max_positions), builder.device)
