"""Growth: the ring's tokens in order, before a request's budget grows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Held, LayerParams, ScoredLayer
from vllm_h2o.attention.ops.triton.bounds import set_bounds
from vllm_h2o.attention.ops.triton.launch import (
    copied_tokens,
    page_arguments,
    table_arguments,
)
from vllm_h2o.attention.ops.triton.layers import (
    SIZES,
    STATE,
    LayerBatch,
    batches,
    lists_of_layer,
    of_layer,
    pages_and_state_of_layer,
)
from vllm_h2o.attention.ops.triton.slots import (
    page_offsets,
    place_after,
    places_of,
    sizes_of,
    slot_of,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.quantization import NUM_SCALES

# Differ from request to request or by layer: one compilation must serve them all.
VARYING = ["placement", "num_tokens", "grown_at", "most"]


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["blocks"])
def ring_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, staged, staged_attention, staged_births, staged_scales,
    blocks, sizes, lists, distances,
    placement, num_tokens, grown_at, most,
    BACK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Move one tile of a KV head's ring out of its slots by age, or back in order.

        staged[head, i] = the token in slot heavy + (slot(num_tokens) - heavy + i) % R
        token in slot heavy + i = staged[head, i]                    for BACK

    of a ring of R slots that is full; others are in order. Grid `(tiles of slots,
    num_kv_heads, num_layers)`.

    Reference: order_rings of ops/reference.py.
    """
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry, place = placement * tl.num_programs(1) + head, num_tokens
    if sizes is not None:
        sizes = of_layer(sizes, distances, SIZES)
    heavy, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    if sizes is not None:
        place = place_after(num_tokens, sizes, entry, grown_at)
    i = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    exists = i < tl.where(place < budget, 0, budget - heavy)
    slot = heavy + i
    if not BACK:
        oldest = slot_of(place, heavy, budget) - heavy
        slot = heavy + (oldest + i) % (budget - heavy)
    at = (layer.to(tl.int64) * tl.num_programs(1) + head) * most + i
    copy_slots(
        keys, keys_strides, values, values_strides, attention, births, state_strides,
        key_scales, value_scales, staged, staged_attention, staged_births,
        staged_scales, at, slot, exists, blocks, sizes, lists, distances, entry, head,
        BACK, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip


@triton.jit
def copy_slots(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, staged, staged_attention, staged_births, staged_scales,
    at, slot, exists, blocks, sizes, lists, distances, entry, head,
    BACK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy what is in slots of a KV head to `staged[at]`, or for BACK from there.

    Of slots that exist; `entry` of `sizes`, which are of the program's layer, says
    where the pages of the head are.
    """
    keys, values, attention, births = pages_and_state_of_layer(
        keys, values, attention, births, distances
    )
    places, state = (blocks, None, None), (blocks, None, None)
    if lists is not None:
        lists = lists_of_layer(lists, distances)
        places, state = places_of(blocks, sizes, lists, entry)
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_SIZE)[None, :]
    in_staged = staged + at[:, None] * (2 * HEAD_SIZE) + d[None, :]
    in_keys = page_offsets(places, slot, exists, head, keys_strides, BLOCK_SIZE)
    in_keys = keys + in_keys[:, None] + d[None, :] * keys_strides[3]
    in_values = page_offsets(places, slot, exists, head, values_strides, BLOCK_SIZE)
    in_values = values + in_values[:, None] + d[None, :] * values_strides[3]
    in_state = page_offsets(state, slot, exists, head, state_strides, BLOCK_SIZE)
    if key_scales is not None:
        staged_scales += 2 * at
        key_scales = of_layer(key_scales, distances, STATE)
        value_scales = of_layer(value_scales, distances, STATE)
        copy_scales(staged_scales, key_scales + in_state, exists, BACK)
        copy_scales(staged_scales + 1, value_scales + in_state, exists, BACK)
    if BACK:
        tl.store(in_keys, tl.load(in_staged, mask=mask), mask=mask)
        tl.store(in_values, tl.load(in_staged + HEAD_SIZE, mask=mask), mask=mask)
        score = tl.load(staged_attention + at, mask=exists)
        tl.store(attention + in_state, score, mask=exists)
        birth = tl.load(staged_births + at, mask=exists)
        tl.store(births + in_state, birth, mask=exists)
    else:
        tl.store(in_staged, tl.load(in_keys, mask=mask), mask=mask)
        tl.store(in_staged + HEAD_SIZE, tl.load(in_values, mask=mask), mask=mask)
        score = tl.load(attention + in_state, mask=exists)
        tl.store(staged_attention + at, score, mask=exists)
        birth = tl.load(births + in_state, mask=exists)
        tl.store(staged_births + at, birth, mask=exists)


@triton.jit
def copy_scales(staged, in_pages, exists, BACK: tl.constexpr):
    """Of keys or of values, into `staged` or back."""
    if BACK:
        tl.store(in_pages, tl.load(staged, mask=exists), mask=exists)
    else:
        tl.store(staged, tl.load(in_pages, mask=exists), mask=exists)


def staged_slots(pages: Pages, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Room for what `copy_slots` copies, of so many slots of each KV head."""
    return {
        "staged": pages.keys.new_empty(*shape, 2 * pages.keys.shape[2]),
        "staged_attention": pages.attention.new_empty(shape),
        "staged_births": pages.births.new_empty(shape),
        "staged_scales": pages.attention.new_empty(*shape, NUM_SCALES),
    }


def check_pages(held: Held, params: LayerParams) -> None:
    """Fail where slots would be looked for behind the request's pages."""
    assert held.pages.is_contiguous()
    slots = min(held.num_tokens, params.budget_of(held.placement))
    assert len(held.pages) * params.layout.block_size >= slots, "too few pages"


def order_rings(layers: Sequence[ScoredLayer], held: Held) -> None:
    """See `Kernels.order_rings`; through a copy of the rings."""
    for batch in batches(layers):
        keys, most = batch.first.pages.keys, batch.largest_of(held.placement)
        of_slot = 2 * keys.shape[2] * keys.element_size() + 4 * (2 + NUM_SCALES)
        for part in batch.parts(keys.shape[1] * most * of_slot):
            _order(part, held, most)
            set_bounds(part, held)  # The ring's pages join the heavy set.


def _order(batch: LayerBatch, held: Held, most: int) -> None:
    pages, params = batch.first.pages, batch.first.params
    num_kv_heads, head_size = pages.keys.shape[1:3]
    tile, layout = copied_tokens(head_size), params.layout
    check_pages(held, params)
    heads = num_kv_heads, len(batch.layers)
    shared = {
        **page_arguments(pages),
        **staged_slots(pages, (*reversed(heads), most)),
        **table_arguments(params.device_tables),
        "blocks": held.pages, "distances": batch.distances,
        "placement": held.placement, "num_tokens": held.num_tokens,
        "grown_at": held.grown_at, "most": most,
        "HEAD_SIZE": head_size, "BLOCK_SIZE": layout.block_size,
        "HEAVY": layout.heavy_slots, "BUDGET": layout.budget,
        "BLOCK_S": tile, "BLOCK_D": triton.next_power_of_2(head_size),
        "num_warps": 4,
    }  # fmt: skip
    for back in (False, True):
        ring_kernel[(triton.cdiv(most, tile), *heads)](BACK=back, **shared)
