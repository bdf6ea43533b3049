"""Where a chunk ends: KV heads choose among what they hold and the chunk's tokens.

What heads hold is copied out of their slots, and what stays of it back, each in one
launch for all heads of all layers. The choice is torch over all of them, whose
budgets differ: by counts that are on the device already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Chunk, Held, Kept, ScoredLayer
from vllm_h2o.attention.ops.chunks import most_held
from vllm_h2o.attention.ops.triton.gate import expect
from vllm_h2o.attention.ops.triton.growth import (
    VARYING,
    check_pages,
    copy_slots,
    staged_slots,
)
from vllm_h2o.attention.ops.triton.launch import (
    copied_tokens,
    page_arguments,
    table_arguments,
)
from vllm_h2o.attention.ops.triton.layers import (
    SIZES,
    Budgets,
    LayerBatch,
    batches,
    of_layer,
)
from vllm_h2o.attention.ops.triton.slots import place_after, sizes_of
from vllm_h2o.attention.ops.triton.transition import copy_kept
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import Queries
from vllm_h2o.policy.quantization import NUM_SCALES

_CHOICE_BYTES = 128
"""Of a token that competes: its indices, counts and scores, all at once."""
_MOVE_BYTES = 40
"""Of an element of a key that moves: angles, sines and what rounds it."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["blocks"])
def held_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, staged, staged_attention, staged_births, staged_scales,
    slots, blocks, sizes, lists, distances,
    placement, num_tokens, grown_at, most,
    BACK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one tile of what a KV head holds out of its slots, or back into others.

        staged[head, i] = what is in slot i, of as many as are held
        what is in slots[head, i] = staged[head, i]                   for BACK, if >= 0

    Grid `(tiles of slots, num_kv_heads, num_layers)`.

    Reference: held_heads of ops/chunks.py.
    """
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = placement * tl.num_programs(1) + head
    if sizes is not None:
        sizes = of_layer(sizes, distances, SIZES)
    i = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    at = (layer.to(tl.int64) * tl.num_programs(1) + head) * most + i
    if BACK:
        slot = tl.load(slots + at, mask=i < most, other=-1).to(tl.int32)
        exists = slot >= 0
    else:
        _, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
        place = num_tokens
        if sizes is not None:
            place = place_after(num_tokens, sizes, entry, grown_at)
        slot, exists = i, i < tl.minimum(place, budget)
    copy_slots(
        keys, keys_strides, values, values_strides, attention, births, state_strides,
        key_scales, value_scales, staged, staged_attention, staged_births,
        staged_scales, at, slot, exists, blocks, sizes, lists, distances, entry, head,
        BACK, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip


class _Staged:
    """What KV heads hold, copied out of their slots.

    Attributes:
        most: Slots that were copied of each head.
        parts: `[num_layers, num_kv_heads, most, ..]` by the kernel's names.
    """

    def __init__(self, batch: LayerBatch, held: Held) -> None:
        """Copy it."""
        self._batch, self._held = batch, held
        keys = batch.first.pages.keys
        self.most = batch.largest_of(held.placement)
        shape = len(batch.layers), keys.shape[1], self.most
        self.parts = staged_slots(batch.first.pages, shape)
        self._run(None)

    def move_keys(self, births: torch.Tensor, before: int, after: int) -> None:
        """Move keys of layers whose keys move, head by head."""
        keys, _ = self.parts["staged"].chunk(2, dim=-1)
        for layer, mine, positions in zip(
            self._batch.layers, keys, births, strict=True
        ):
            if (moving := layer.params.moving) is not None:
                for head, of_head in zip(mine, positions, strict=True):
                    head.copy_(moving.moved(head, of_head, before, after))

    def write(self, slots: torch.Tensor) -> None:
        """Copy it back.

        Args:
            slots: `[num_layers, num_kv_heads, most]` int32 where each goes; -1:
                nowhere.
        """
        assert slots.is_contiguous() and slots.shape[2] == self.most
        self._run(slots)

    def _run(self, slots: torch.Tensor | None) -> None:
        batch, held = self._batch, self._held
        pages, params = batch.first.pages, batch.first.params
        num_kv_heads, head_size = pages.keys.shape[1:3]
        layout, tile = params.layout, copied_tokens(head_size)
        check_pages(held, params)
        grid = triton.cdiv(self.most, tile), num_kv_heads, len(batch.layers)
        held_kernel[grid](
            **page_arguments(pages), **table_arguments(params.device_tables),
            **self.parts, slots=slots, blocks=held.pages, distances=batch.distances,
            placement=held.placement, num_tokens=held.num_tokens,
            grown_at=held.grown_at, most=self.most,
            BACK=slots is not None, HEAD_SIZE=head_size, BLOCK_SIZE=layout.block_size,
            HEAVY=layout.heavy_slots, BUDGET=layout.budget,
            BLOCK_S=tile, BLOCK_D=triton.next_power_of_2(head_size), num_warps=4,
        )  # fmt: skip


def chunk_end_bytes(
    num_held: int, num_seen: int, num_kv_heads: int, head_size: int, element_size: int
) -> int:
    """Bytes of scratch that the end of a layer's chunk takes, beside its state.

    Args:
        num_held: Slots of the KV head with the most.
        num_seen: These and the tokens of a chunk, at most.
        num_kv_heads: Of the layer.
        head_size: Of all of them.
        element_size: Bytes of an element of keys that are not compressed.
    """
    slot = 2 * head_size * element_size + 4 * (2 + NUM_SCALES)
    return num_kv_heads * (num_held * slot + num_seen * _CHOICE_BYTES)


def move_bytes(num_held: int, head_size: int) -> int:
    """Bytes of moving the keys of one KV head, beside `chunk_end_bytes`.

    Args:
        num_held: Slots of the head.
        head_size: Of keys.
    """
    return num_held * head_size * _MOVE_BYTES


def move_keys(layers: Sequence[ScoredLayer], held: Held) -> None:
    """See `Kernels.move_keys`; through a copy of what is held."""
    moving = [layer for layer in layers if layer.params.moving is not None]
    for batch in batches(moving) if moving else ():
        for part in batch.parts(_bytes_of(batch, held, 0)):
            staged, end = _Staged(part, held), held.num_tokens
            staged.move_keys(staged.parts["staged_births"].long(), end, end + 1)
            room = Budgets.of(part, held.placement)
            slots = torch.arange(staged.most, device=room.slots.device)
            count = room.places(end, held.grown_at).minimum(room.slots)
            staged.write(torch.where(slots < count, slots, -1).int())


def _bytes_of(batch: LayerBatch, held: Held, num_fresh: int) -> int:
    keys, most = batch.first.pages.keys, batch.largest_of(held.placement)
    _, num_kv_heads, head_size, _ = keys.shape
    size = num_kv_heads, head_size, keys.element_size()
    return chunk_end_bytes(most, most + num_fresh, *size)


def compress_chunk(
    layers: Sequence[ScoredLayer], chunk: Chunk, config: H2OConfig
) -> None:
    """See `Kernels.compress_chunk`; through a copy of what is held."""
    for batch in batches(layers):
        for part in batch.parts(_bytes_of(batch, chunk.held, chunk.end - chunk.start)):
            _compress(part, chunk, config)


def _compress(batch: LayerBatch, chunk: Chunk, config: H2OConfig) -> None:
    """Let heads choose, and put what stays into their slots."""
    held, num_fresh = chunk.held, chunk.end - chunk.start
    room, staged = Budgets.of(batch, held.placement), _Staged(batch, held)
    counts = room.places(chunk.start, held.grown_at).minimum(room.slots)
    births = staged.parts["staged_births"].long()
    rivals = _Rivals.of(counts, births, chunk)
    of_chunk = counts + torch.arange(num_fresh, device=counts.device)
    attention, scores = _scores(batch, chunk, config, rivals, room, of_chunk)
    places, sinks = (
        room.places(chunk.end, held.grown_at),
        batch.first.params.layout.sinks,
    )
    kept = _select(scores, counts + num_fresh, room, places, sinks, staged.most)

    staged.move_keys(births, chunk.start, chunk.end)  # the chunk's are within reach
    most = nowhere = staged.most  # one behind the slots
    chosen = kept.positions.clamp(min=0)
    stays = (kept.positions >= 0) & rivals.is_held.gather(-1, chosen)
    whole = attention.new_empty(*counts.shape[:2], most + 1)
    slots = torch.where(rivals.is_held, rivals.source, nowhere)
    scored = whole.scatter(-1, slots, attention)[..., :most]
    staged.parts["staged_attention"] = scored.contiguous()
    slots = torch.where(stays, rivals.source.gather(-1, chosen), nowhere)
    into = torch.full_like(whole, -1, dtype=torch.int64)
    into.scatter_(-1, slots, kept.slots)
    staged.write(into[..., :most].int().contiguous())
    is_new = (kept.positions >= 0) & ~stays
    tokens = torch.where(is_new, rivals.positions.gather(-1, chosen), -1)
    copy_kept(
        batch, attention.gather(-1, of_chunk), chunk.blocks, held.pages,
        held.placement, Kept(tokens, kept.slots), chunk.start,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Rivals:
    """What competes: what a KV head holds, by birth, then the chunk's tokens.

    Attributes:
        source: `[num_layers, num_kv_heads, most + tokens of the chunk]` int64 slots, or
            behind all slots the chunk's tokens.
        positions: The same shape, int64 in the text.
        is_held: The same shape, whether it is held.
    """

    source: torch.Tensor
    positions: torch.Tensor
    is_held: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, births: torch.Tensor, chunk: Chunk) -> _Rivals:
        """Those of heads that hold `counts` tokens, of these births by slot."""
        most, num_fresh = births.shape[-1], chunk.end - chunk.start
        slots, fresh = (
            torch.arange(n, device=births.device) for n in (most, num_fresh)
        )
        births = torch.where(slots < counts, births, chunk.end)  # the last in order
        everything = torch.arange(most + num_fresh, device=births.device)
        is_held = everything < counts
        source = (most + everything - counts).clamp(max=most + num_fresh - 1)
        by_birth = births.argsort(dim=-1, stable=True)
        by_birth = torch.where(is_held[..., :most], by_birth, source[..., :most])
        source[..., :most] = by_birth
        fresh = torch.arange(chunk.start, chunk.end, device=births.device)
        fresh = fresh.expand(*births.shape[:2], num_fresh)
        positions = torch.cat([births, fresh], dim=-1).gather(-1, source)
        return cls(source, positions, is_held)


def _scores(
    batch: LayerBatch,
    chunk: Chunk,
    config: H2OConfig,
    rivals: _Rivals,
    room: Budgets,
    of_chunk: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of what competes, which stands for the window's queries, and scores.

    Args:
        batch: The layers.
        chunk: The chunk.
        config: The policy.
        rivals: What competes.
        room: Of the heads.
        of_chunk: `[num_layers, num_kv_heads, tokens of the chunk]` int64, which of
            what competes these are.
    """
    params, first = batch.first.params, chunk.first_query
    is_held, positions = rivals.is_held, rivals.positions
    most = rivals.source.shape[-1] - of_chunk.shape[-1]
    attention = _attention(batch, most, chunk).gather(-1, rivals.source)
    looked = chunk.end - positions.clamp(min=chunk.first_scoring)
    earlier = Queries(positions, chunk.scored_from, chunk.start).count()
    looked += torch.where(is_held, earlier, 0)
    if params.gate is not None:
        expected = attention.new_empty(of_chunk.shape)
        expect(batch, expected, chunk.blocks, first, chunk.start)
        attention.scatter_add_(-1, of_chunk, expected)
        window = chunk.end - positions.clamp(min=first)
        looked += torch.where(is_held, 0, window)
    queries = Queries(positions, first, chunk.end, params.group)
    method, state = params.method, {"attention": attention}
    state = method.recounted(state, looked, queries.count())
    scores = method.score(state, queries)
    if (width := config.prompt_pooling) > 1:
        pooled = method.pool(scores.gather(-1, of_chunk).flatten(0, 1), width)
        pooled = scores.scatter(-1, of_chunk, pooled.view_as(of_chunk))
        has_room = room.slots >= params.budget_of(chunk.held.placement)
        scores = torch.where(has_room, pooled, scores)
    return state["attention"], scores


def _attention(batch: LayerBatch, most: int, chunk: Chunk) -> torch.Tensor:
    """`[num_layers, num_kv_heads, most + tokens of the chunk]` that layers have."""
    states = [layer.state["attention"] for layer in batch.layers]
    (num_kv_heads, _), num_fresh = states[0].shape, chunk.end - chunk.start
    whole = states[0].new_zeros(len(states), num_kv_heads, most + num_fresh)
    for mine, state, layer in zip(whole, states, batch.layers, strict=True):
        held = most_held(chunk.held, num_kv_heads, layer.params)
        mine[:, :held], mine[:, most:] = state[:, :held], state[:, held:]
    return whole


def _select(
    scores: torch.Tensor,
    count: torch.Tensor,
    room: Budgets,
    places: torch.Tensor,
    sinks: int,
    most: int,
) -> Kept:
    """As `policy.selection.select_residents`, of heads that have other numbers.

    Args:
        scores: `[num_layers, num_kv_heads, n]` float32 of what competes, the oldest
            first.
        count: `[num_layers, num_kv_heads, 1]` how many of these there are.
        room: Of the heads.
        places: `[num_layers, num_kv_heads, 1]` tokens that have had a place.
        sinks: The first so many stay.
        most: Slots of the head with the most.

    Returns:
        `[num_layers, num_kv_heads, most]` indices of what competes, and slots.
    """
    everything = torch.arange(scores.shape[-1], device=scores.device)
    exists = everything < count
    ring, heavy = room.slots - room.heavy, room.heavy
    older = everything < count - ring
    score = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    score[..., :sinks] = torch.inf
    score = torch.where(older, score, -torch.inf)
    highest = score.topk(min(most, scores.shape[-1]), dim=-1).values
    nth = (heavy - 1).clamp(min=0, max=highest.shape[-1] - 1)
    lowest = highest.gather(-1, nth)
    above, ties = older & (score > lowest), older & (score == lowest)
    left = heavy - above.sum(dim=-1, keepdim=True)
    heaviest = above | (ties & (ties.cumsum(dim=-1) <= left))
    evicts = count > room.slots
    keeps = exists & (~evicts | heaviest | ~older)
    # By scatter instead of nonzero, which would wait for the result.
    place = torch.where(keeps, keeps.cumsum(dim=-1) - 1, most)
    kept = torch.full((*scores.shape[:2], most + 1), -1, device=scores.device)
    kept = kept.scatter_(-1, place, everything.expand_as(place))[..., :most]
    slots = torch.arange(most, device=scores.device)
    in_ring = heavy + (kept + places - count - heavy) % ring.clamp(min=1)
    slots = torch.where(evicts & (slots >= heavy), in_ring, slots)
    return Kept(kept.contiguous(), torch.where(kept >= 0, slots, -1).contiguous())
