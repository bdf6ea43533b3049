"""The transition: kept tokens move into a request's slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Held, Kept, ScoredLayer
from vllm_h2o.attention.ops.triton.bounds import set_bounds
from vllm_h2o.attention.ops.triton.launch import (
    copied_tokens,
    page_arguments,
    table_arguments,
    vector_arguments,
)
from vllm_h2o.attention.ops.triton.layers import (
    SIZES,
    SOURCE,
    STATE,
    Budgets,
    LayerBatch,
    batches,
    lists_of_layer,
    of_layer,
    pages_and_state_of_layer,
    pages_of_layer,
    stacked,
)
from vllm_h2o.attention.ops.triton.quantization import quantized
from vllm_h2o.attention.ops.triton.selection import select
from vllm_h2o.attention.ops.triton.slots import page_offsets, places_of
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import Queries
from vllm_h2o.policy.quantization import NUM_SCALES

# Differ from prompt to prompt or by layer: one compilation must serve them all.
_VARYING = ["most", "placement", "layer_stride", "head_stride", "first_token"]


@triton.jit
def kept_tile(kept, most, head, BLOCK_S: tl.constexpr):
    """`(where in kept, token, whether there is one)` of a program's tokens."""
    i = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head
    at = row * most + i
    token = tl.load(kept + at, mask=i < most, other=-1).to(tl.int32)
    return at, token, token >= 0


@triton.jit
def read_vectors(
    rows, strides, blocks, token, exists, head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[len(token), BLOCK_D]` keys or values of tokens of a KV head; 0 beyond."""
    d = tl.arange(0, BLOCK_D)[None, :]
    places = (blocks, None, None)
    at = page_offsets(places, token, exists, head, strides, BLOCK_SIZE)
    mask = exists[:, None] & (d < HEAD_SIZE)
    return tl.load(rows + at[:, None] + d * strides[3], mask=mask, other=0.0)


@triton.jit
def write_slots(
    k, v, k_scale, v_scale, at, token, exists, head, slots,
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales,
    prompt_attention, layer_stride, head_stride, first_token,
    target_blocks, sizes, lists, placement, distances,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tokens of a KV head into their slots, in its places by the placement.

    K | V [slots[head, i]] = k | v, rounded where pages are int8 and no scales given
    attention[slots[head, i]]  = prompt_attention[head, token - first_token]
    birth[slots[head, i]]  = token
    """
    slot = tl.load(slots + at, mask=exists, other=0).to(tl.int32)
    keys, values, attention, births = pages_and_state_of_layer(
        keys, values, attention, births, distances
    )
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_SIZE)[None, :]
    places, state = (target_blocks, None, None), (target_blocks, None, None)
    if lists is not None:
        sizes = of_layer(sizes, distances, SIZES)
        lists = lists_of_layer(lists, distances)
        entry = placement * tl.num_programs(1) + head
        places, state = places_of(target_blocks, sizes, lists, entry)
    in_state = page_offsets(state, slot, exists, head, state_strides, BLOCK_SIZE)
    if key_scales is not None:
        if k_scale is None:
            k, k_scale = quantized(k.to(tl.float32))
            v, v_scale = quantized(v.to(tl.float32))
        in_scales = of_layer(in_state, distances, STATE)
        tl.store(key_scales + in_scales, k_scale, mask=exists)
        tl.store(value_scales + in_scales, v_scale, mask=exists)
    target = page_offsets(places, slot, exists, head, keys_strides, BLOCK_SIZE)
    along = d[None, :] * keys_strides[3]
    element = keys.dtype.element_ty
    tl.store(keys + target[:, None] + along, k.to(element), mask=mask)
    target = page_offsets(places, slot, exists, head, values_strides, BLOCK_SIZE)
    along = d[None, :] * values_strides[3]
    tl.store(values + target[:, None] + along, v.to(element), mask=mask)
    origin = prompt_attention + tl.program_id(2).to(tl.int64) * layer_stride
    origin += head.to(tl.int64) * head_stride + token - first_token
    tl.store(attention + in_state, tl.load(origin, mask=exists), mask=exists)
    tl.store(births + in_state, token, mask=exists)


@triton.jit(
    do_not_specialize=_VARYING, do_not_specialize_on_alignment=["source_blocks"]
)
def gather_kernel(
    keys, keys_strides, values, values_strides, key_scales, value_scales,
    state_strides, kept, source_blocks, staged, staged_scales, most, distances,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one tile of a KV head's kept tokens out of their pages.

        staged[head, i] = K | V of the token at kept[head, i], if >= 0; their scales

    Grid `(tiles of tokens, num_kv_heads, num_layers)`.
    """
    head = tl.program_id(1)
    at, token, exists = kept_tile(kept, most, head, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_SIZE)[None, :]
    staged += at[:, None] * (2 * HEAD_SIZE) + d[None, :]
    k = read_vectors(
        pages_of_layer(keys, distances, SOURCE), keys_strides, source_blocks,
        token, exists, head, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    tl.store(staged, k, mask=mask)
    v = read_vectors(
        pages_of_layer(values, distances, SOURCE), values_strides, source_blocks,
        token, exists, head, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    tl.store(staged + HEAD_SIZE, v, mask=mask)
    if key_scales is not None:
        places = (source_blocks, None, None)
        source = page_offsets(places, token, exists, head, state_strides, BLOCK_SIZE)
        source = of_layer(source, distances, STATE)
        staged_scales += 2 * at
        tl.store(staged_scales, tl.load(key_scales + source, mask=exists), mask=exists)
        scale = tl.load(value_scales + source, mask=exists)
        tl.store(staged_scales + 1, scale, mask=exists)


@triton.jit(
    do_not_specialize=_VARYING,
    do_not_specialize_on_alignment=["target_blocks", "prompt_attention"],
)
def scatter_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, staged, staged_scales, kept, slots, most,
    prompt_attention, layer_stride, head_stride, first_token,
    target_blocks, sizes, lists, placement, distances,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one tile of a KV head's kept tokens, staged, into their slots.

    Grid `(tiles of tokens, num_kv_heads, num_layers)`.
    """
    head = tl.program_id(1)
    at, token, exists = kept_tile(kept, most, head, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (d < HEAD_SIZE)[None, :]
    staged += at[:, None] * (2 * HEAD_SIZE) + d[None, :]
    k = tl.load(staged, mask=mask, other=0.0)
    v = tl.load(staged + HEAD_SIZE, mask=mask, other=0.0)
    k_scale, v_scale = None, None
    if staged_scales is not None:
        staged_scales += 2 * at
        k_scale = tl.load(staged_scales, mask=exists)
        v_scale = tl.load(staged_scales + 1, mask=exists)
    write_slots(
        k, v, k_scale, v_scale, at, token, exists, head, slots,
        keys, keys_strides, values, values_strides, attention, births, state_strides,
        key_scales, value_scales,
        prompt_attention, layer_stride, head_stride, first_token,
        target_blocks, sizes, lists, placement, distances,
        HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=_VARYING,
    do_not_specialize_on_alignment=[
        "source_blocks",
        "target_blocks",
        "prompt_attention",
    ],
)
def move_kernel(
    source_keys, source_keys_strides, source_values, source_values_strides,
    source_blocks,
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, kept, slots, most,
    prompt_attention, layer_stride, head_stride, first_token,
    target_blocks, sizes, lists, placement, distances,
    HEAD_SIZE: tl.constexpr, SOURCE_BLOCK_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one tile of a KV head's kept tokens into their slots, out of other pages.

    Grid `(tiles of tokens, num_kv_heads, num_layers)`.
    """
    head = tl.program_id(1)
    at, token, exists = kept_tile(kept, most, head, BLOCK_S)
    k = read_vectors(
        pages_of_layer(source_keys, distances, SOURCE), source_keys_strides,
        source_blocks, token, exists, head, HEAD_SIZE, SOURCE_BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    v = read_vectors(
        pages_of_layer(source_values, distances, SOURCE), source_values_strides,
        source_blocks, token, exists, head, HEAD_SIZE, SOURCE_BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip
    write_slots(
        k, v, None, None, at, token, exists, head, slots,
        keys, keys_strides, values, values_strides, attention, births, state_strides,
        key_scales, value_scales,
        prompt_attention, layer_stride, head_stride, first_token,
        target_blocks, sizes, lists, placement, distances,
        HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip


def transition(
    layers: Sequence[ScoredLayer],
    source_blocks: torch.Tensor,
    held: Held,
    first_query: int,
    config: H2OConfig,
) -> None:
    """See `Kernels.transition`."""
    for batch in batches(layers):
        in_place = source_blocks is held.pages
        for part in batch.parts(_scratch_bytes(batch, held.placement, in_place)):
            attention, _ = stacked([layer.state["attention"] for layer in part.layers])
            scores, by_torch = attention, part.first.params.fused_prompt_form is None
            if by_torch:
                scores = _scores(part, held.placement, first_query, config)
            kept = select(
                part, scores, held.placement, first_query, config, are_scores=by_torch
            )
            copy_kept(part, attention, source_blocks, held.pages, held.placement, kept)
            set_bounds(part, replace(held, num_tokens=attention.shape[2], grown_at=0))


def _scores(
    batch: LayerBatch, placement: int, first_query: int, config: H2OConfig
) -> torch.Tensor:
    """`[num_layers, num_kv_heads, num_tokens]` by a method that has rules of its own
    for prompts, as `reference.select` scores and pools."""
    params, (state, *_) = batch.first.params, [layer.state for layer in batch.layers]
    num_tokens, device = state["attention"].shape[1], state["attention"].device
    tokens, method = torch.arange(num_tokens, device=device), params.method
    queries = Queries(tokens, first_query, num_tokens, params.group)
    of_prompt = {*method.prompt_fields} <= {*state}
    score = method.score_prompt if of_prompt else method.score
    width = config.prompt_pooling if of_prompt else 1
    scores = [score(layer.state, queries) for layer in batch.layers]
    if width > 1:
        slots = Budgets.of(batch, placement).slots
        average = params.budget_of(placement)
        scores = [
            torch.where(of_heads < average, mine, method.pool(mine, width))
            for mine, of_heads in zip(scores, slots, strict=True)
        ]
    return torch.stack(scores)


def _scratch_bytes(batch: LayerBatch, placement: int, in_place: bool) -> int:
    """Bytes that a layer needs beside its pages."""
    num_kv_heads, num_tokens = batch.first.state["attention"].shape
    most = min(num_tokens, batch.largest_of(placement))
    keys = batch.first.pages.keys
    vectors = 2 * keys.shape[2] * keys.element_size() if in_place else 0
    scores = 0
    if batch.first.params.fused_prompt_form is None:
        scores = own_score_bytes(num_kv_heads, num_tokens)
    return scores + layer_bytes(num_kv_heads, num_tokens, most, vectors)


def own_score_bytes(num_kv_heads: int, num_tokens: int) -> int:
    """Bytes of a layer's scores by a method with rules of its own for prompts.

    Args:
        num_kv_heads: Of the layer.
        num_tokens: That compete.
    """
    # What tokens have got and scores, each in a row, pooled ones, and what made these.
    return 4 * 7 * num_kv_heads * num_tokens


def layer_bytes(num_kv_heads: int, num_tokens: int, most: int, vectors: int) -> int:
    """Bytes of scratch that a layer's transition takes, beside its state.

    Args:
        num_kv_heads: Of the layer.
        num_tokens: That compete.
        most: That a head keeps at most.
        vectors: Bytes of a token's key and value, where they go through a copy, as the
            attention then does; else 0.
    """
    image, position_and_slot, attention = 4, 16, 4
    copied = vectors + attention if vectors else 0
    return num_kv_heads * (num_tokens * image + most * (copied + position_and_slot))


def copy_kept(
    batch: LayerBatch,
    attention: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    placement: int,
    kept: Kept,
    first_token: int = 0,
) -> None:
    """See `vllm_h2o.attention.ops.reference.copy_kept`, of all layers of a batch.

    Where a request is rearranged in place the slots of one program are the sources of
    another: then through a copy of the kept tokens, 2 * head_size elements each. No
    layer's slots are another's sources: heads part out of pages of their own, and those
    that borrow pages keep all where it is.

    Args:
        batch: The layers.
        attention: `[num_layers, num_kv_heads, num_tokens]` that tokens have got.
        source_blocks: As there, as are the next two.
        target_blocks: See there.
        placement: See there.
        kept: `[num_layers, num_kv_heads, most]`, see `select`.
        first_token: That the first of `attention` is of.
    """
    layer = batch.first
    pages, params, source = layer.pages, layer.params, layer.source
    num_layers, num_kv_heads, most = kept.positions.shape
    head_size = pages.keys.shape[2]
    tile = copied_tokens(head_size)
    assert attention.stride(2) == 1 and attention.dtype == torch.float32
    assert kept.positions.is_contiguous() and kept.slots.is_contiguous()
    assert source_blocks.is_contiguous() and target_blocks.is_contiguous()
    shared = {
        "kept": kept.positions, "most": most, "distances": batch.distances,
        "HEAD_SIZE": head_size,
        "BLOCK_S": tile, "BLOCK_D": triton.next_power_of_2(head_size),
        "num_warps": 4,
    }  # fmt: skip
    into = {
        **page_arguments(pages), "slots": kept.slots, "BLOCK_SIZE": pages.block_size,
        "prompt_attention": attention, "layer_stride": attention.stride(0),
        "head_stride": attention.stride(1), "first_token": first_token,
        "target_blocks": target_blocks, "placement": placement,
        **table_arguments(params.device_tables),
    }  # fmt: skip
    grid = (triton.cdiv(most, tile), num_kv_heads, num_layers)
    if source_blocks is not target_blocks:
        vectors = vector_arguments(source)
        del vectors["key_scales"], vectors["value_scales"]
        assert not source.quantized, "dense pages have vLLM's type"
        move_kernel[grid](
            **{f"source_{name}": part for name, part in vectors.items()},
            source_blocks=source_blocks, SOURCE_BLOCK_SIZE=source.block_size,
            **into, **shared,
        )  # fmt: skip
        return
    staged = source.keys.new_empty(*kept.positions.shape, 2 * head_size)
    scales = None
    if source.quantized:
        scales = pages.attention.new_empty(*kept.positions.shape, NUM_SCALES)
    shared |= {"staged": staged, "staged_scales": scales}
    gather_kernel[grid](
        **vector_arguments(source), state_strides=pages.attention.stride(),
        source_blocks=source_blocks, BLOCK_SIZE=source.block_size, **shared,
    )  # fmt: skip
    scatter_kernel[grid](**into, **shared)
