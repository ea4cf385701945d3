"""Matrices in panels, the form in which products read weights (drawn in panels.h). Rows can be read back from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel
from quire.ops.memory import lasting

PANEL = 64  # rows per panel


@dataclass(frozen=True)
class Panels:
    """A matrix whose rows consist of whole 32-bit words, each of one element or of several smaller ones.

    data: [rows, columns], with rows rounded up to a multiple of 16 and columns to whole words.
    """

    data: Tensor
    rows: int
    columns: int
    words: int  # per row

    @staticmethod
    def of(matrix: Tensor) -> "Panels":
        """Pack a matrix [rows, columns]. Its own memory is reused if its shape allows that."""
        rows, columns = matrix.shape
        data = matrix
        padding = -columns % (4 // matrix.element_size())
        if rows % 16 or padding or not matrix.is_contiguous():
            matrix = torch.nn.functional.pad(matrix, (0, padding)).contiguous()
            data = lasting.empty(-(-rows // 16) * 16, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        panels = Panels(data, rows, columns, data.shape[1] * data.element_size() // 4)
        kernel("quire_panels", "pllpi")(matrix.data_ptr(), rows, panels.words, data.data_ptr(), torch.get_num_threads())
        return panels

    @staticmethod
    def joined(parts: Sequence["Panels"]) -> "Panels":
        """Concatenate the rows of all parts, each of which consists of whole panels."""
        data = torch.cat([part.data for part in parts])
        return replace(parts[0], data=data, rows=len(data))

    def part(self, start: int, stop: int) -> "Panels":
        """Return a view of the rows [start, stop); both are multiples of PANEL."""
        return replace(self, data=self.data[start:stop], rows=stop - start)

    def pick(self, ids: Tensor) -> Tensor:
        """Return the rows `ids`: [len(ids), columns]"""
        picked = self.data.new_empty(len(ids), self.data.shape[1])
        ids = ids.contiguous()
        kernel("quire_panel_rows", "pllplpi")(
            self.data.data_ptr(),
            self.rows,
            self.words,
            ids.data_ptr(),
            len(ids),
            picked.data_ptr(),
            torch.get_num_threads(),
        )
        return picked[:, : self.columns]
