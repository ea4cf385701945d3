"""Accepts drafts at given rates, for benchmarks: shows the speed of a good drafter with any weights."""

import torch
from torch import Tensor

from quire.config.speculative import SpeculativeOptions
from quire.models.heads.head import Choose
from quire.ops.reference.sampling import uniform_noise
from quire.worker.device import Device
from quire.worker.input_batch import InputBatch


class ReplayedCounts:
    """Replaces the op count_kept. See SpeculativeOptions for the rates.

    Acceptance depends only on a request's seed and on the position. The request's text consists of the target model's
    sampled tokens, even where they differ from the accepted drafts.
    """

    def __init__(self, options: SpeculativeOptions, device: Device, batch: InputBatch) -> None:
        self.device = device
        self.batch = batch
        most = options.num_speculative_tokens
        rates = [*options.acceptance_rates, *most * options.acceptance_rates[-1:]][:most]
        self.rates = torch.tensor([*rates, 0.0], device=device.torch_device)  # no draft follows the last place

    def __call__(
        self, token_ids: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor, place_start_loc: Tensor
    ) -> Tensor:
        seeds = self.device.upload({"seeds": self.batch.seed})["seeds"][rows]
        noise = uniform_noise(seeds, positions, 1)[:, 0]
        number = torch.arange(len(self.rates), device=rows.device)  # of a place within its request
        places = (place_start_loc[:-1, None] + number).clamp(max=len(noise) - 1)  # [requests, most places]
        is_draft = number < place_start_loc.diff()[:, None] - 1
        accepted = is_draft & (noise[places] < self.rates)
        return accepted.long().cumprod(1).sum(1) + (place_start_loc.diff() > 0)


class NewestTokenAgain:
    """A StateHead whose drafts cost nothing: it repeats the newest token of a text."""

    most = 32
    ignored: tuple[str, ...] = ()

    def draft(self, hidden: Tensor, ids: Tensor, count: int, choose: Choose) -> Tensor:
        """See StateHead."""
        return ids[:, None].expand(-1, count)
