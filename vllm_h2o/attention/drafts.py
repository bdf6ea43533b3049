"""The drafts of a step, until it is known which of them are refused."""

from __future__ import annotations

import torch

from vllm_h2o.attention.ops import DraftLog, LayerParams, LoggedLayer, ResidentRows
from vllm_h2o.attention.pages import Pages


class Drafted:
    """Rows of a KV cache group that decode drafts in a step."""

    def __init__(
        self, rows: ResidentRows, index: torch.Tensor, most_drafts: int
    ) -> None:
        """Begin with no layer.

        Args:
            rows: Whose tokens are decoded in turn.
            index: `[num_rows]` int64 of these rows in the batch.
            most_drafts: Of a row.
        """
        self.index = index
        self._rows, self._most_drafts = rows, most_drafts
        self._layers: list[LoggedLayer] = []

    def log(self, pages: Pages, params: LayerParams) -> DraftLog:
        """Where a layer notes what drafts change that it is about to decode."""
        log = DraftLog.of(pages, params, len(self.index), self._most_drafts)
        self._layers.append(LoggedLayer(pages, params, log))
        return log

    def take_back(self, num_sampled: torch.Tensor) -> torch.Tensor:
        """Undo what refused drafts have changed, in all layers.

        Args:
            num_sampled: `[rows of the batch]` tokens that each has given: one more than
                it has accepted.

        Returns:
            `[num_rows]` int32, how many tokens of each row.
        """
        assert self._rows.counts is not None
        refused = self._rows.counts - num_sampled[self.index].int()
        kernels = self._layers[0].params.operations
        kernels.take_back(self._layers, self._rows, refused)
        return refused
