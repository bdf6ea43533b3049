"""The slots of one request in one KV head, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from vllm_h2o.attention.ops.types import (
    NOTHING,
    RING,
    DraftLog,
    LayerParams,
    ResidentRows,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import UNIFORM
from vllm_h2o.policy.layout import place_of
from vllm_h2o.policy.merging import merged
from vllm_h2o.policy.methods import Queries, State
from vllm_h2o.policy.quantization import dequantize, quantize
from vllm_h2o.policy.softmax import attention_of
from vllm_h2o.policy.sparse_read import pages_read


def tokens_of(
    pages: Pages, blocks: torch.Tensor, head: int, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Keys and values `[n, head_size]` of a KV head by position, as pages have them."""
    block, i = blocks[positions // pages.block_size], positions % pages.block_size
    tokens = {what: _part(pages, what)[block, head, i] for what in scales_of(pages)}
    keys, values = pages.keys[block, head, :, i], pages.values[block, head, i]
    return {"keys": keys, "values": values, **tokens}


def quantized(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys and values `[n, head_size]` as int8 pages have them, by part."""
    parts = zip(("key", "value"), (keys, values), strict=True)
    rounded = {name: quantize(vectors) for name, vectors in parts}
    steps = {f"{name}s": steps for name, (steps, _) in rounded.items()}
    return steps | {f"{name}_scales": scales for name, (_, scales) in rounded.items()}


def scales_of(pages: Pages) -> tuple[str, ...]:
    return ("key_scales", "value_scales") if pages.quantized else ()


def _part(pages: Pages, what: str) -> torch.Tensor:
    """Keys, values, births or scales of all pages, or one of the method's fields."""
    return pages.state[what] if what in pages.state else getattr(pages, what)


def rows_of_slots(blocks: torch.Tensor, placement: int) -> ResidentRows:
    """A request that nothing is asked of but where its slots are."""
    nowhere, index = torch.tensor([0]), torch.tensor([placement])
    return ResidentRows(blocks[None], nowhere, nowhere, placements=index)


class LogOfDraft:
    """What one draft of a row has changed in one KV head: views into a `DraftLog`."""

    def __init__(self, log: DraftLog, row: int, draft: int, head: int) -> None:
        at = row, draft - 1, head
        self.losers, self.attention = log.losers[at], log.attention[at]
        self.content = {
            "keys": log.keys[at],
            "values": log.values[at],
            "births": log.births[at],
        }
        if log.scales is not None:
            key_scale, value_scale = log.scales[at]
            self.content |= {"key_scales": key_scale, "value_scales": value_scale}


_Route = tuple[torch.Tensor | slice, Pages, torch.Tensor, torch.Tensor]
"""Which slots are in the same pages; these, the slots' blocks and places there."""


class _Place(NamedTuple):
    """Some slots' content: in which tensor, and where."""

    part: torch.Tensor
    at: tuple[Any, ...]


class Resident:
    """The slots of one request in one KV head."""

    def __init__(
        self,
        pages: Pages,
        rows: ResidentRows,
        row: int,
        head: int,
        params: LayerParams,
        ahead: int = 0,
    ) -> None:
        self.head, self.params = head, params
        self.position = int(rows.positions[row]) + ahead
        self.first_query = int(rows.first_queries[row])
        num_kv_heads = pages.keys.shape[1]
        placement = UNIFORM if rows.placements is None else int(rows.placements[row])
        self.layout = params.layouts_of(placement, num_kv_heads)[head]
        self.pages, self.blocks = pages, rows.block_table[row].long()
        self.lent = placement != UNIFORM
        blocks = self.blocks.tolist()
        self.places = [(pages, block) for block in blocks]
        if self.lent and (own := params.placements):
            # A request below its budget has no block yet for a head's last pages.
            held = takewhile(
                lambda page: page.column < len(blocks), own.pages(placement)[head]
            )
            self.places = [
                (own.layers[page.layer], blocks[page.column]) for page in held
            ]
        self.owners = list(dict.fromkeys(pages for pages, _ in self.places))
        """The pages of all layers in which this head has some."""
        device = self.blocks.device
        owned = [self.owners.index(pages) for pages, _ in self.places]
        self._owner = torch.tensor(owned, device=device)
        self._block = torch.tensor([block for _, block in self.places], device=device)
        self._routed: torch.Tensor | None = None
        self._routes: list[_Route] = []
        grown_at = 0 if rows.grown_at is None else int(rows.grown_at[row])
        before = self.layout.budget
        if grown_at:
            assert params.placements is not None
            before = params.placements.held(placement, head)
        self.place = place_of(self.position, grown_at, before)
        self.slot = self.layout.slot(self.place)

    @property
    def scores_now(self) -> bool:
        """Whether this query scores."""
        return self.position >= self.first_query

    def page(self, what: str, number: int) -> torch.Tensor:
        """View `[block_size, ...]` of a part of a page: `keys`, `values`, `births`,
        scales, or of a field."""
        pages, block = self.places[number]
        mine = _part(pages, what)[block, self.head]
        return mine.T if what == "keys" else mine

    def get(self, what: str, slots: torch.Tensor) -> torch.Tensor:
        """Copy of the slots' content, `[n, ...]`."""
        like = _part(self.pages, what)
        width = like.shape[2:-1] if what == "keys" else like.shape[3:]
        content = like.new_empty((len(slots), *width))
        for mine, place in self._by_owner(what, slots):
            content[mine] = place.part[place.at]
        return content

    def put(self, what: str, slots: torch.Tensor, content: torch.Tensor) -> None:
        """Overwrite the slots' content."""
        for mine, place in self._by_owner(what, slots):
            place.part[place.at] = content[mine]

    def _by_owner(
        self, what: str, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor | slice, _Place]]:
        """Where the content of slots is: of those in one layer's pages at a time."""
        if self._routed is not slots:  # Keys, values and all else of them in turn.
            self._routed, self._routes = slots, list(self._route(slots))
        for mine, pages, block, i in self._routes:
            at = block, self.head
            index = (*at, slice(None), i) if what == "keys" else (*at, i)
            yield mine, _Place(_part(pages, what), index)

    def _route(self, slots: torch.Tensor) -> Iterator[_Route]:
        number, i = slots // self.layout.block_size, slots % self.layout.block_size
        owners, block = self._owner[number], self._block[number]
        for which, pages in enumerate(self.owners):
            if len(self.owners) == 1:
                yield slice(None), pages, block, i
                continue
            mine = (owners == which).nonzero()[:, 0]
            if len(mine):
                yield mine, pages, block[mine], i[mine]

    def scores(self, slots: torch.Tensor) -> torch.Tensor:
        """What the tokens in these slots are compared by."""
        births = self.get("births", slots)
        queries = Queries(births, self.first_query, self.position)
        return self.params.method.score(self.state(slots), queries)

    def state(self, slots: torch.Tensor) -> State:
        """Copy of what the method keeps of these slots."""
        return {name: self.get(name, slots) for name in self.params.method.fields}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy tokens between slots, as they are."""
        scales, fields = scales_of(self.pages), self.params.method.fields
        for what in ("keys", "values", "births", *scales, *fields):
            self.put(what, target, self.get(what, source))

    def vectors(self, what: str, slots: torch.Tensor) -> torch.Tensor:
        """The slots' `keys` or `values`, `[n, head_size]` float32."""
        content = self.get(what, slots)
        if not self.pages.quantized:
            return content.float()
        return dequantize(content, self.get(f"{what[:-1]}_scales", slots))

    def graduate(
        self, log: LogOfDraft | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Let what leaves the recent window compete with the heavy set.

        Args:
            log: What is lost is noted in it; None: nothing of it can be taken back.

        Returns:
            Key and value `[1, head_size]` of the token that loses, where losses merge.
        """
        layout = self.layout
        unit = layout.block_size if layout.whole_blocks else 1
        if log is not None:
            held = torch.arange(min(self.place, layout.budget))
            log.attention[: len(held)] = self.get("attention", held)
            log.losers.fill_(NOTHING)
        if self.place < layout.budget or self.place % unit:
            return None
        within = torch.arange(unit)
        leaving = self.slot + within
        loser = self.weakest(leaving)
        if log is not None:
            log.losers.fill_(RING if loser is leaving else int(loser))
            for what, lost_content in log.content.items():
                lost_content.copy_(self.get(what, loser)[0])
        lost = None
        if self.params.merge:
            lost = self.get("keys", loser), self.get("values", loser)
        if loser is not leaving:
            self.copy(leaving, loser)
        return lost

    def take_back(self, log: LogOfDraft) -> None:
        """Undo `graduate`, but for what all slots have got since."""
        loser = int(log.losers)
        if loser == NOTHING:
            return
        here = there = torch.tensor([self.slot])
        if loser != RING:
            there = torch.tensor([loser])
            self.copy(there, here)
        for what, content in log.content.items():
            self.put(what, there, content[None])

    def weakest(self, leaving: torch.Tensor) -> torch.Tensor:
        """Slots of the unit of the lowest score: of the heavy set, or `leaving`."""
        layout, unit = self.layout, len(leaving)
        heavy = torch.arange(layout.pinned_slots, layout.heavy_slots)
        if not len(heavy):
            return leaving
        competing = self.scores(heavy).view(-1, unit).sum(dim=1)
        births = self.get("births", heavy[::unit])
        lowest = competing.min()
        births = births.masked_fill(competing > lowest, torch.iinfo(births.dtype).max)
        if self.scores(leaving).sum() > lowest:
            return heavy[::unit][births.argmin()] + torch.arange(unit)
        return leaving

    def order_ring(self) -> None:
        """Put the ring's tokens into its slots in the order of their births."""
        layout, oldest = self.layout, self.slot - self.layout.heavy_slots
        if self.place < layout.budget:
            return  # Nothing has been written over: they are.
        ring = torch.arange(layout.recent_slots)
        by_age = (oldest + ring) % layout.recent_slots
        self.copy(layout.heavy_slots + by_age, layout.heavy_slots + ring)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the new token into its slot."""
        number, i = divmod(self.slot, self.layout.block_size)
        new = {"keys": key, "values": value}
        if self.pages.quantized:
            new = quantized(key, value)
        for what, content in new.items():
            self.page(what, number)[i] = content
        if not self.scores_now:
            return  # It stays dense: others may share its pages, which have no state.
        position = torch.tensor([self.position])
        method = self.params.method
        started = method.start(key[None, None], value[None, None], position)
        for name, mine in started.items():
            self.page(name, number)[i] = mine[0, 0]
        self.page("births", number)[i] = self.position

    def merge(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `[1, head_size]` of a lost token into the value of the nearest key."""
        slots, (thresholds, at) = self.occupied(), self.threshold()
        keys, values = self.get("keys", slots).float(), self.get("values", slots)
        new, thresholds[at] = merged(
            keys, values.float(), key.float(), value.float(), float(thresholds[at])
        )
        changed = (new != values).any(dim=1)
        self.put("values", slots[changed], new[changed].to(values.dtype))

    def threshold(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """Where a merging head has its threshold: in its first page."""
        pages, block = self.places[0]
        assert pages.thresholds is not None
        return pages.thresholds, (block, self.head)

    def occupied(self) -> torch.Tensor:
        """Slots that hold a token."""
        layout = self.layout
        slots = torch.arange(min(self.place + 1, layout.budget))
        if layout.whole_blocks and self.place >= layout.budget:
            size = layout.block_size
            stale = (slots // size == self.slot // size) & (slots > self.slot)
            slots = slots[~stale]
        return slots

    def always_read(self, slots: torch.Tensor) -> torch.Tensor:
        """Which of these slots any query reads: sinks, the ring and the new token."""
        layout = self.layout
        ends = (slots < layout.pinned_slots) | (slots >= layout.heavy_slots)
        return ends | (slots == self.slot)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Return `[group, head_size]` attention; the slots add up what they get."""
        params, slots = self.params, self.occupied()
        keys, values = self.vectors("keys", slots), self.vectors("values", slots)
        logits = query.float() @ keys.T * params.scale
        unread = None
        if params.read < 1.0 and self.scores_now:
            unread = ~pages_read(
                query.float(), keys, slots // self.layout.block_size,
                self.always_read(slots), params.read,
            )  # fmt: skip
        sink = params.sink_logits
        if sink is not None:
            sink = sink.view(-1, len(query))[self.head]
        probs = attention_of(logits, unread, softcap=params.softcap, sink=sink)
        if self.scores_now:
            state = self.state(slots)
            params.method.observe(state, probs[:, None])
            for name, mine in state.items():
                self.put(name, slots, mine)
        return probs @ values
