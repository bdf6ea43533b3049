"""The drafts of a step, until it is known which of them are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_h2o.attention.ops import DraftLog, LayerParams, LoggedLayer, ResidentRows
from vllm_h2o.attention.pages import Pages


class Logs(Protocol):
    """Where the layers of a KV cache group note what drafts change."""

    @property
    def layers(self) -> Sequence[LoggedLayer]:
        """Those that have noted something, or may have."""
        ...

    def of(self, pages: Pages, params: LayerParams) -> DraftLog:
        """That of a layer."""
        ...


class StepLogs:
    """Logs of a step, as large as its rows need; the next step has them again."""

    def __init__(
        self, known: dict[int, DraftLog], num_rows: int, most_drafts: int
    ) -> None:
        """Begin the step.

        Args:
            known: Logs of the steps before, by the address of their layers' pages.
            num_rows: Of this one.
            most_drafts: Of a row.
        """
        self._known, self._size = known, (num_rows, most_drafts)
        self.layers: list[LoggedLayer] = []

    def of(self, pages: Pages, params: LayerParams) -> DraftLog:
        """See `Logs`."""
        address = pages.keys.data_ptr()
        log = self._known.get(address)
        if log is None or not log.has_room(*self._size):
            log = self._known[address] = DraftLog.by_row(pages, params, *self._size)
        self.layers.append(LoggedLayer(pages, params, log))
        return log


class KeptLogs:
    """Logs that keep their place, as CUDA graphs want them."""

    def __init__(self, layers: Sequence[LoggedLayer]) -> None:
        self.layers = layers
        self._of = {layer.pages.keys.data_ptr(): layer.log for layer in layers}

    def of(self, pages: Pages, params: LayerParams) -> DraftLog:
        """See `Logs`."""
        return self._of[pages.keys.data_ptr()]


class Drafted:
    """Rows of a KV cache group that decode drafts in a step."""

    def __init__(self, rows: ResidentRows, index: torch.Tensor, logs: Logs) -> None:
        """Begin the step.

        Args:
            rows: Whose tokens are decoded in turn; padding comes last.
            index: `[n]` int64 of those that are none in the batch, on their device.
            logs: Of their layers.
        """
        self.rows, self.index, self.logs = rows, index, logs

    def take_back(self, num_sampled: torch.Tensor) -> torch.Tensor:
        """Undo what refused drafts have changed, in all layers.

        Args:
            num_sampled: `[rows of the batch]` tokens that each has given: one more than
                it has accepted.

        Returns:
            `[n]` int32, how many tokens of each row.
        """
        counts, num_rows = self.rows.counts, len(self.index)
        assert counts is not None
        refused = torch.zeros_like(counts)
        refused[:num_rows] = counts[:num_rows] - num_sampled[self.index]
        layers = self.logs.layers
        if refused.is_cpu and not refused.any():
            return refused[:num_rows]  # a device would have to be waited for
        layers[0].params.operations.take_back(layers, self.rows, refused)
        return refused[:num_rows]
