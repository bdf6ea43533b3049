"""Bounds of pages, of what has just been copied into them; see `sparse_read.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.attention.ops import Held
from vllm_h2o.attention.ops.triton.graduate import NOBODY
from vllm_h2o.attention.ops.triton.launch import (
    bound_rows,
    page_arguments,
    table_arguments,
)
from vllm_h2o.attention.ops.triton.layers import (
    KV,
    SIZES,
    STATE,
    LayerBatch,
    lists_of_layer,
    of_layer,
    pages_of_layer,
)
from vllm_h2o.attention.ops.triton.slots import place_after, places_of, sizes_of
from vllm_h2o.attention.ops.triton.sparse_read import bound_of, bound_offsets


@triton.jit(
    do_not_specialize=["placement", "num_tokens", "grown_at"],
    do_not_specialize_on_alignment=["blocks"],
)
def bound_kernel(
    keys, keys_strides, key_scales, bounds, state_strides, blocks, sizes, lists,
    distances, placement, num_tokens, grown_at,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Make the bound of one page of a KV head, of as many of its slots as are held.

    Grid `(pages, num_kv_heads, num_layers)`.
    """
    page, head = tl.program_id(0), tl.program_id(1)
    entry, place = placement * tl.num_programs(1) + head, num_tokens
    if sizes is not None:
        sizes = of_layer(sizes, distances, SIZES)
        place = place_after(num_tokens, sizes, entry, grown_at)
    _, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    count = tl.minimum(place, budget)
    if page * BLOCK_SIZE >= count:
        return
    keys = pages_of_layer(keys, distances, KV)
    bounds = of_layer(bounds, distances, STATE)
    if key_scales is not None:
        key_scales = of_layer(key_scales, distances, STATE)
    places, state = (blocks, None, None), (blocks, None, None)
    if lists is not None:
        lists = lists_of_layer(lists, distances)
        places, state = places_of(blocks, sizes, lists, entry)
    d = tl.arange(0, BLOCK_D)
    bound = bound_of(
        keys, keys_strides, key_scales, state_strides, places, state, head, page,
        count, 0, NOBODY, 1, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, ROWS,
    )  # fmt: skip
    at = bound_offsets(state, page, True, head, state_strides, HEAD_SIZE)
    tl.store(bounds + at + d, bound, mask=d < HEAD_SIZE)


def set_bounds(batch: LayerBatch, held: Held) -> None:
    """Make the bounds of all pages of what a request holds, where queries need them.

    Args:
        batch: The layers.
        held: What the request holds.
    """
    pages, params = batch.first.pages, batch.first.params
    if params.read >= 1.0:
        return
    assert pages.bounds is not None
    num_kv_heads, head_size = pages.keys.shape[1:3]
    layout, most = params.layout, batch.largest_of(held.placement)
    vectors = page_arguments(pages)
    named = "keys", "keys_strides", "key_scales", "state_strides"
    grid = most // layout.block_size, num_kv_heads, len(batch.layers)
    bound_kernel[grid](
        **{name: vectors[name] for name in named}, bounds=pages.bounds,
        blocks=held.pages, **table_arguments(params.device_tables),
        distances=batch.distances, placement=held.placement,
        num_tokens=held.num_tokens, grown_at=held.grown_at,
        HEAD_SIZE=head_size, BLOCK_SIZE=layout.block_size,
        HEAVY=layout.heavy_slots, BUDGET=layout.budget,
        ROWS=bound_rows(head_size, layout.block_size),
        BLOCK_D=triton.next_power_of_2(head_size), num_warps=4,
    )  # fmt: skip
