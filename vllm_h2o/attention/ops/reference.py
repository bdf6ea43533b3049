"""In plain torch: the oracle that every kernel is held to.

A whole engine runs on it with `VLLM_H2O_KERNELS=reference`, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch.nn.utils.rnn import pad_sequence

from vllm_h2o.attention.ops.contract import Capability
from vllm_h2o.attention.ops.types import (
    DecodeParams,
    Kept,
    ResidentRows,
    ScoredLayer,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import UNIFORM
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout, place_of
from vllm_h2o.policy.merging import NO_THRESHOLD, merged
from vllm_h2o.policy.methods import Queries, State
from vllm_h2o.policy.prompt_attention import tiles
from vllm_h2o.policy.quantization import dequantize, quantize
from vllm_h2o.policy.selection import select_residents
from vllm_h2o.policy.softmax import attention_of
from vllm_h2o.policy.sparse_read import pages_read

FORMS = frozenset({"sum", "mean"})
CAPABILITIES = frozenset(Capability)
_START_TILE = 1024
"""Tokens whose keys and values are copied at a time."""


def decode_resident(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    rows: ResidentRows,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """See `Kernels.decode_resident`."""
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    for row in range(query.shape[0]):
        if rows.positions[row] < 0:
            output[row] = 0
            continue
        for head in range(num_kv_heads):
            resident = _Resident(pages, rows, row, head, params)
            lost = resident.graduate()
            resident.write(key[row, head], value[row, head])
            heads = slice(head * group, (head + 1) * group)
            output[row, heads] = resident.attend(query[row, heads]).to(output.dtype)
            if lost is not None:
                resident.merge(*lost)


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    placement: int,
    first_query: int,
    config: H2OConfig,
) -> None:
    """See `Kernels.transition`: its two halves, layer by layer."""
    for layer in layers:
        kept = select(layer.state, placement, first_query, config, layer.params)
        copy_kept(layer, source_blocks, target_blocks, placement, kept)


def select(
    state: State,
    placement: int,
    first_query: int,
    config: H2OConfig,
    params: DecodeParams,
) -> Kept:
    """Select the tokens that each KV head keeps, as `select_residents` says.

    A head with less than the request has on average has no room for spans: it picks
    tokens without pooling. NaN counts as infinite.

    Args:
        state: See `ScoredLayer`.
        placement: See `Kernels.transition`.
        first_query: Position of the first query that scored.
        config: The policy.
        params: The layer's constants.
    """
    num_kv_heads, num_tokens = state["attention"].shape
    heads_of: dict[SlotLayout, list[int]] = {}
    for head, layout in enumerate(params.layouts_of(placement, num_kv_heads)):
        heads_of.setdefault(layout, []).append(head)
    budget = params.budget_of(placement)
    queries = Queries(torch.arange(num_tokens), first_query, num_tokens, params.group)
    method = params.method
    # A request that fills its budget only while it generates has lost the prompt's
    # fields: the score of generated tokens decides.
    of_prompt = {*method.prompt_fields} <= {*state}
    scores = (method.score_prompt if of_prompt else method.score)(state, queries)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layout, heads in heads_of.items():
        poor = layout.budget < budget
        mine = scores if len(heads) == num_kv_heads else scores[heads]
        pooling = config.prompt_pooling if of_prompt and not poor else 1
        positions, slots = select_residents(mine, pooling, layout, method.pool)
        kept |= {h: (positions[i], slots) for i, h in enumerate(heads)}
    by_head = zip(*(kept[head] for head in range(num_kv_heads)), strict=True)
    return Kept(*(pad_sequence([*rows], True, padding_value=-1) for rows in by_head))


def copy_kept(
    layer: ScoredLayer,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    placement: int,
    kept: Kept,
) -> None:
    """Copy each KV head's kept tokens into the slots of a request.

    Args:
        layer: The layer; targets may lie in pages of others.
        source_blocks: See `Kernels.transition`, and so are the next two.
        target_blocks: Of the slots.
        placement: Of the request.
        kept: What to copy, and where to.
    """
    pages, state, params = layer.pages, layer.state, layer.params
    blocks = source_blocks.long()
    rows = _rows_of_slots(target_blocks, placement)
    merges = None
    if params.merge:
        merges = merge_dropped(layer.source, blocks, kept, state)
    for head, held in enumerate(kept.positions >= 0):
        positions, slots = kept.positions[head, held], kept.slots[head, held]
        tokens = _tokens(layer.source, blocks, head, positions)
        if pages.quantized and not layer.source.quantized:
            tokens = quantized(tokens["keys"], tokens["values"])
        tokens["births"] = positions.int()
        tokens |= {name: state[name][head, positions] for name in pages.state}
        target = _Resident(pages, rows, 0, head, params)
        for what, content in tokens.items():
            target.put(what, slots, content)
    if merges is not None:
        put_merged(pages, target_blocks, placement, kept, merges, params)


def order_rings(
    layers: Sequence[ScoredLayer],
    blocks: torch.Tensor,
    placement: int,
    num_tokens: int,
    grown_at: int,
) -> None:
    """See `Kernels.order_rings`."""
    counts = [torch.tensor([n]) for n in (num_tokens, 0, placement, grown_at)]
    position, first_query, index, grown = counts
    rows = ResidentRows(
        blocks[None], position, first_query, placements=index, grown_at=grown
    )
    for layer in layers:
        for head in range(layer.pages.keys.shape[1]):
            _Resident(layer.pages, rows, 0, head, layer.params).order_ring()


def _rows_of_slots(blocks: torch.Tensor, placement: int) -> ResidentRows:
    """A request that nothing is asked of but where its slots are."""
    nowhere, index = torch.tensor([0]), torch.tensor([placement])
    return ResidentRows(blocks[None], nowhere, nowhere, placements=index)


def merge_dropped(
    pages: Pages, source_blocks: torch.Tensor, kept: Kept, state: State
) -> list[tuple[torch.Tensor | None, float]]:
    """What each KV head makes of the values it keeps and of those it drops.

    Args:
        pages: The layer's pages that the tokens are in.
        source_blocks: See `Kernels.transition`.
        kept: What is kept.
        state: See `ScoredLayer`; says how many tokens there are.

    Returns:
        By head the new values `[n, head_size]` of its n kept tokens, None where it
        drops none, and its threshold, see `vllm_h2o.policy.merging`.
    """
    blocks, everyone = source_blocks.long(), torch.arange(state["attention"].shape[1])
    merges: list[tuple[torch.Tensor | None, float]] = []
    for head, positions in enumerate(kept.positions):
        held = positions[positions >= 0]
        if len(held) == len(everyone):
            merges.append((None, NO_THRESHOLD))
            continue
        dropped = everyone[~torch.isin(everyone, held)]
        tokens = [
            part.float()
            for which in (held, dropped)
            for part in _tokens(pages, blocks, head, which).values()
        ]
        keys, values, lost_keys, lost_values = tokens
        merges.append(merged(keys, values, lost_keys, lost_values, threshold=None))
    return merges


def put_merged(
    pages: Pages,
    target_blocks: torch.Tensor,
    placement: int,
    kept: Kept,
    merges: list[tuple[torch.Tensor | None, float]],
    params: DecodeParams,
) -> None:
    """Overwrite the values of what was kept; arguments as of `copy_kept`."""
    rows = _rows_of_slots(target_blocks, placement)
    for head, (values, threshold) in enumerate(merges):
        target = _Resident(pages, rows, 0, head, params)
        if values is not None:
            slots = kept.slots[head]
            target.put("values", slots[slots >= 0], values.to(pages.values.dtype))
        thresholds, at = target.threshold()
        thresholds[at] = threshold


def _tokens(
    pages: Pages, blocks: torch.Tensor, head: int, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Keys and values `[n, head_size]` of a KV head by position, as pages have them."""
    block, i = blocks[positions // pages.block_size], positions % pages.block_size
    tokens = {what: _part(pages, what)[block, head, i] for what in _scales_of(pages)}
    keys, values = pages.keys[block, head, :, i], pages.values[block, head, i]
    return {"keys": keys, "values": values, **tokens}


def quantized(keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys and values `[n, head_size]` as int8 pages have them, by part."""
    parts = zip(("key", "value"), (keys, values), strict=True)
    rounded = {name: quantize(vectors) for name, vectors in parts}
    steps = {f"{name}s": steps for name, (steps, _) in rounded.items()}
    return steps | {f"{name}_scales": scales for name, (_, scales) in rounded.items()}


def _scales_of(pages: Pages) -> tuple[str, ...]:
    return ("key_scales", "value_scales") if pages.quantized else ()


def start(
    pages: Pages,
    dense_blocks: torch.Tensor,
    first: int,
    end: int,
    state: State,
    params: DecodeParams,
) -> None:
    """See `Kernels.start`."""
    size = pages.block_size
    for begin in range(first, end, _START_TILE):
        positions = torch.arange(begin, min(begin + _START_TILE, end))
        blocks, i = dense_blocks.long()[positions // size], positions % size
        keys = pages.keys[blocks, :, :, i].transpose(0, 1)
        values = pages.values[blocks, :, i].transpose(0, 1)
        started = params.method.start(keys, values, positions)
        for name, mine in started.items():
            state[name][:, positions] = mine


def score_by_gate(
    layers: Sequence[ScoredLayer], dense_blocks: torch.Tensor, first_query: int
) -> None:
    """See `Kernels.score_by_gate`."""
    for layer in layers:
        gate = layer.params.gate
        assert gate is not None
        gate.fill(layer.state["attention"], layer.source, dense_blocks, first_query)


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: DecodeParams,
) -> None:
    """See `Kernels.observe`."""
    end = first_position + len(query)
    keys = pages.keys[dense_blocks.long()].permute(1, 2, 0, 3).flatten(2)
    for probs in tiles(
        query, keys[:, :, :end], first_position,
        scale=params.scale, softcap=params.softcap, sink_logits=params.sink_logits,
    ):  # fmt: skip
        visible = probs.shape[-1]
        seen = {name: mine[:, :visible] for name, mine in state.items()}
        params.method.observe_prompt(seen, probs)


def attend_observed(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    first_scoring: int,
    state: State,
    params: DecodeParams,
    output: torch.Tensor,
) -> None:
    """See `Kernels.attend_observed`."""
    scoring = query[first_scoring:]
    first_scored = first_position + first_scoring
    observe(scoring, pages, dense_blocks, first_scored, state, params)
    end = first_position + len(query)
    blocks, group = dense_blocks.long(), query.shape[1] // pages.keys.shape[1]
    keys = pages.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :end].float()
    values = pages.values[blocks].transpose(0, 1).flatten(1, 2)[:, :end].float()
    queries = query.float().unflatten(1, (-1, group))
    logits = torch.einsum("qghd,gtd->ghqt", queries, keys) * params.scale
    unseen = torch.ones(len(query), end, dtype=torch.bool).triu(first_position + 1)
    sink = params.sink_logits
    if sink is not None:
        sink = sink.view(-1, group, 1)
    probs = attention_of(logits, unseen, softcap=params.softcap, sink=sink)
    attended = torch.einsum("ghqt,gtd->qghd", probs, values)
    output.copy_(attended.flatten(1, 2))


def _part(pages: Pages, what: str) -> torch.Tensor:
    """Keys, values, births or scales of all pages, or one of the method's fields."""
    return pages.state[what] if what in pages.state else getattr(pages, what)


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
        self.head, self.params = head, params
        self.position = int(rows.positions[row])
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
        if self.lent:
            pages = [self.page(what, number) for number in range(len(self.places))]
            return torch.cat(pages)[slots]
        mine = _part(self.pages, what)[self.blocks, self.head]
        tokens = mine.transpose(1, 2) if what == "keys" else mine
        return tokens.flatten(0, 1)[slots]

    def put(self, what: str, slots: torch.Tensor, content: torch.Tensor) -> None:
        """Overwrite the slots' content."""
        numbers, size = slots // self.layout.block_size, self.layout.block_size
        for number in numbers.unique().tolist():
            mine = numbers == number
            self.page(what, number)[slots[mine] % size] = content[mine]

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
        scales, fields = _scales_of(self.pages), self.params.method.fields
        for what in ("keys", "values", "births", *scales, *fields):
            self.put(what, target, self.get(what, source))

    def vectors(self, what: str, slots: torch.Tensor) -> torch.Tensor:
        """The slots' `keys` or `values`, `[n, head_size]` float32."""
        content = self.get(what, slots)
        if not self.pages.quantized:
            return content.float()
        return dequantize(content, self.get(f"{what[:-1]}_scales", slots))

    def graduate(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Let what leaves the recent window compete with the heavy set.

        Returns:
            Key and value `[1, head_size]` of the token that loses, where losses merge.
        """
        layout = self.layout
        unit = layout.block_size if layout.whole_blocks else 1
        if self.place < layout.budget or self.place % unit:
            return None
        within = torch.arange(unit)
        leaving = self.slot + within
        loser = self.weakest(leaving)
        lost = None
        if self.params.merge:
            lost = self.get("keys", loser), self.get("values", loser)
        if loser is not leaving:
            self.copy(leaving, loser)
        return lost

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
