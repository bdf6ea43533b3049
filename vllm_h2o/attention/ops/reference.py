"""The decode step in plain torch: the oracle that every kernel is held to."""

from __future__ import annotations

import torch

from vllm_h2o.attention.ops import DecodeParams, ResidentRows
from vllm_h2o.attention.pages import Pages


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """See `vllm_h2o.attention.ops.decode_resident`."""
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    for row in range(query.shape[0]):
        for head in range(num_kv_heads):
            resident = _Resident(pages, rows, row, head, params)
            resident.graduate()
            resident.write(key[row, head], value[row, head])
            heads = slice(head * group, (head + 1) * group)
            output[row, heads] = resident.attend(query[row, heads]).to(output.dtype)


class _Resident:
    """The slots of one request in one KV head."""

    def __init__(
        self,
        pages: Pages,
        rows: ResidentRows,
        row: int,
        head: int,
        params: DecodeParams,
    ) -> None:
        self.pages, self.head, self.params = pages, head, params
        self.layout = params.layout
        self.blocks = rows.block_table[row].long()
        self.position = int(rows.positions[row])
        self.first_query = int(rows.first_queries[row])
        self.slot = self.layout.slot(self.position)

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids and offsets of slots."""
        size = self.layout.block_size
        return self.blocks[slots // size], slots % size

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        """What the tokens in these slots are compared by."""
        block, offset = self.at(slots)
        scores = self.pages.scores[block, self.head, offset]
        if not self.params.mean:
            return scores
        births = self.pages.births[block, self.head, offset]
        seen = self.position - births.clamp(min=self.first_query)
        return scores / seen

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens between slots."""
        (from_block, i), (to_block, j) = self.at(source), self.at(target)
        pages, head = self.pages, self.head
        pages.keys[to_block, head, :, j] = pages.keys[from_block, head, :, i]
        pages.values[to_block, head, j] = pages.values[from_block, head, i]
        pages.scores[to_block, head, j] = pages.scores[from_block, head, i]
        pages.births[to_block, head, j] = pages.births[from_block, head, i]

    def graduate(self) -> None:
        """Let what leaves the recent window compete with the heavy set."""
        layout = self.layout
        if self.position < layout.budget:
            return
        unit = layout.block_size if layout.whole_blocks else 1
        heavy = torch.arange(layout.pinned_slots, layout.heavy_slots)
        if self.position % unit or not len(heavy):
            return
        within = torch.arange(unit)
        leaving = self.slot + within
        competing = self.values(heavy).view(-1, unit).sum(dim=1)
        block, offset = self.at(heavy[::unit])
        births = self.pages.births[block, self.head, offset]
        lowest = competing.min()
        births = births.masked_fill(competing > lowest, torch.iinfo(births.dtype).max)
        if self.values(leaving).sum() > lowest:
            self.copy(leaving, heavy[::unit][births.argmin()] + within)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the new token into its slot."""
        block, offset = self.at(torch.tensor(self.slot))
        self.pages.keys[block, self.head, :, offset] = key
        self.pages.values[block, self.head, offset] = value
        self.pages.scores[block, self.head, offset] = 0.0
        self.pages.births[block, self.head, offset] = self.position

    def occupied(self) -> torch.Tensor:
        """Slots that hold a token."""
        layout = self.layout
        slots = torch.arange(min(self.position + 1, layout.budget))
        if layout.whole_blocks and self.position >= layout.budget:
            size = layout.block_size
            stale = (slots // size == self.slot // size) & (slots > self.slot)
            slots = slots[~stale]
        return slots

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Return `[group, head_size]` attention and add it to the scores."""
        params = self.params
        block, offset = self.at(self.occupied())
        keys = self.pages.keys[block, self.head, :, offset].float()
        values = self.pages.values[block, self.head, offset].float()
        logits = query.float() @ keys.T * params.scale
        if params.softcap > 0.0:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        probs = logits.softmax(dim=1)
        scores = self.pages.scores[block, self.head, offset]
        scores = scores * params.score_decay + probs.sum(dim=0)
        self.pages.scores[block, self.head, offset] = scores
        return probs @ values
