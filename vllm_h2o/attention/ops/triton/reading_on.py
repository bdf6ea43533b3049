"""Reading on: queries of a prompt's later chunk attend to what is held, and to it.

Three launches a layer and step: what KV heads hold and the chunk's tokens are laid
behind each other, the queries attend, and what scores is added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Chunk, LayerParams
from vllm_h2o.attention.ops.chunks import most_held
from vllm_h2o.attention.ops.triton.growth import VARYING
from vllm_h2o.attention.ops.triton.launch import (
    check_supported,
    copied_tokens,
    page_arguments,
    table_arguments,
    vector_arguments,
)
from vllm_h2o.attention.ops.triton.scoring import (
    add_up,
    load_queries,
    tile_logits,
    tiles_of,
)
from vllm_h2o.attention.ops.triton.slots import (
    page_offsets,
    place_after,
    places_of,
    sizes_of,
)
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.methods import State, has_prompt_rules, starts_at_zero

_VECTORS = "keys", "keys_strides", "values", "values_strides"
_PAGE = 64
"""Tokens of a page of the copy."""


@triton.jit(
    do_not_specialize=[*VARYING, "num_fresh", "scores_stride"],
    do_not_specialize_on_alignment=["blocks", "dense_blocks"],
)
def stage_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, blocks, sizes, lists,
    dense_keys, dense_keys_strides, dense_values, dense_values_strides, dense_blocks,
    staged, held, scores, scores_stride,
    placement, num_tokens, grown_at, num_fresh,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DENSE_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Lay one tile of a KV head's tokens where queries read them.

        held[head]      = how many slots have a token
        staged[head, i] = K | V of slot i, for i < held[head]; behind them those of
                          the chunk's tokens, from position num_tokens on
        scores[head, i] = the attention of slot i                     if there are any

    Grid `(tiles of tokens, num_kv_heads)`; staged: `[pages, num_kv_heads, PAGE,
    2 * HEAD_SIZE]`, i counts along pages.

    Reference: keys and values of ops/chunks.py::read_on.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    entry = placement * num_kv_heads + head
    _, budget = sizes_of(sizes, entry, HEAVY, BUDGET)
    place = num_tokens
    if sizes is not None:
        place = place_after(num_tokens, sizes, entry, grown_at)
    count = tl.minimum(place, budget)
    if tile == 0:
        tl.store(held + head, count)
    i = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    in_slot, is_fresh = i < count, (i >= count) & (i < count + num_fresh)
    places, state = (blocks, None, None), (blocks, None, None)
    if lists is not None:
        places, state = places_of(blocks, sizes, lists, entry)
    token, fresh = num_tokens + i - count, (dense_blocks, None, None)
    d = tl.arange(0, BLOCK_D)
    along = (d < HEAD_SIZE)[None, :]
    page = (i // PAGE).to(tl.int64) * num_kv_heads + head
    to = staged + (page * PAGE + i % PAGE)[:, None] * (2 * HEAD_SIZE) + d[None, :]
    in_state = page_offsets(state, i, in_slot, head, state_strides, BLOCK_SIZE)
    if scores is not None:
        score = tl.load(attention + in_state, mask=in_slot)
        tl.store(scores + head * scores_stride + i, score, mask=in_slot)

    at = page_offsets(places, i, in_slot, head, keys_strides, BLOCK_SIZE)
    at = keys + at[:, None] + d[None, :] * keys_strides[3]
    k = tl.load(at, mask=in_slot[:, None] & along, other=0)
    at = page_offsets(places, i, in_slot, head, values_strides, BLOCK_SIZE)
    at = values + at[:, None] + d[None, :] * values_strides[3]
    v = tl.load(at, mask=in_slot[:, None] & along, other=0)
    if key_scales is not None:
        scales = tl.load(key_scales + in_state, mask=in_slot, other=0.0)
        k = k.to(tl.float32) * scales[:, None]
        scales = tl.load(value_scales + in_state, mask=in_slot, other=0.0)
        v = v.to(tl.float32) * scales[:, None]

    mask = is_fresh[:, None] & along
    at = page_offsets(fresh, token, is_fresh, head, dense_keys_strides, DENSE_SIZE)
    at = dense_keys + at[:, None] + d[None, :] * dense_keys_strides[3]
    new = tl.load(at, mask=mask, other=0)
    k = tl.where(is_fresh[:, None], new, k.to(new.dtype))
    at = page_offsets(fresh, token, is_fresh, head, dense_values_strides, DENSE_SIZE)
    at = dense_values + at[:, None] + d[None, :] * dense_values_strides[3]
    new = tl.load(at, mask=mask, other=0)
    v = tl.where(is_fresh[:, None], new, v.to(new.dtype))
    mask = (in_slot | is_fresh)[:, None] & along
    tl.store(to, k, mask=mask)
    tl.store(to + HEAD_SIZE, v, mask=mask)


@triton.jit(do_not_specialize=["num_queries", "first_position"])
def read_kernel(
    query, query_strides, keys, keys_strides, values, blocks, held, sink_logits,
    output, output_strides, lse, num_queries, first_position, scale, softcap,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of a head's queries, and its log-sum-exps.

        z[t]      = scale * query[q,h] . keys[g,t], soft-capped,
                    for t <= held[g] + first_position + q
        lse[h,q]  = log(sum over t of exp(z[t]) + exp(sink of h))
        output[q] = sum over t of exp(z[t] - lse[h,q]) * values[g,t]

    Grid `(query tiles, num_heads)`; lse: `[num_heads, num_queries]` float32.

    Reference: ops/chunks.py::_attend.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    first_position += tl.load(held + kv_head)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    q = load_queries(query, query_strides, head, rows, num_queries, HEAD_SIZE, BLOCK_D)
    end = first_position + tl.minimum((tile + 1) * BLOCK_Q, num_queries)
    maximum = tl.full([BLOCK_Q], -1.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if sink_logits is not None:
        maximum = tl.zeros([BLOCK_Q], tl.float32)
        maximum += tl.load(sink_logits + head).to(tl.float32)
        total += 1.0
    attended = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for first in range(0, end, BLOCK_K):
        tokens = first + tl.arange(0, BLOCK_K)
        z = tile_logits(
            q, keys, keys_strides, blocks, kv_head, tokens, tokens < end,
            scale, softcap, SOFTCAP, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
        visible = tokens[None, :] <= first_position + rows[:, None]
        z = tl.where(visible & (tokens < end)[None, :], z, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, axis=1))
        probs = tl.exp(z - new_maximum[:, None])
        shrinks = tl.exp(maximum - new_maximum)
        total = total * shrinks + tl.sum(probs, axis=1)
        maximum = new_maximum
        places = (blocks, None, None)
        at = page_offsets(
            places, tokens, tokens < end, kv_head, keys_strides, BLOCK_SIZE
        )
        v = tl.load(
            values + at[:, None] + d[None, :],
            mask=(tokens < end)[:, None] & (d < HEAD_SIZE)[None, :],
            other=0.0,
        )
        part = tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        attended = attended * shrinks[:, None] + part
    in_batch = rows < num_queries
    at = rows.to(tl.int64)[:, None] * output_strides[0] + d[None, :]
    tl.store(
        output + head * output_strides[1] + at,
        attended / total[:, None],
        mask=in_batch[:, None] & (d < HEAD_SIZE)[None, :],
    )
    at = head.to(tl.int64) * num_queries + rows
    tl.store(lse + at, maximum + tl.log(total), mask=in_batch)


def read_bytes(
    num_seen: int, num_queries: int, num_heads: int, num_kv_heads: int,
    head_size: int, element_size: int,
) -> int:  # fmt: skip
    """Bytes that `read_on` takes beside its arguments.

    Args:
        num_seen: Tokens that a KV head holds, and those of a chunk, at most.
        num_queries: Of the chunk, that one step reads.
        num_heads: Of the queries.
        num_kv_heads: Of the layer.
        head_size: Of all of them.
        element_size: Bytes of an element of keys that are not compressed.
    """
    token = 2 * head_size * element_size
    staged = _pages(num_seen) * (_PAGE * num_kv_heads * token + 4)
    return staged + 4 * (num_kv_heads + 2 * num_heads * num_queries)


def _pages(num_tokens: int) -> int:
    return triton.cdiv(num_tokens, _PAGE)


def read_on(
    query: torch.Tensor,
    first_position: int,
    dense: Pages,
    pages: Pages,
    chunk: Chunk,
    state: State,
    params: LayerParams,
    output: torch.Tensor,
) -> None:
    """See `Kernels.read_on`; through a copy of what the layer's queries see."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, dense_size = dense.keys.shape[1], dense.keys.shape[3]
    check_supported(query.dtype, head_size, dense_size, num_heads, num_kv_heads)
    method, layout, device = params.method, params.layout, query.device
    assert starts_at_zero(method) and not has_prompt_rules(method)
    assert query.stride(2) == 1 and output.stride(2) == 1
    begins = not state
    most = most_held(chunk.held, num_kv_heads, params)
    if begins:
        shape = num_kv_heads, most + chunk.end - chunk.start
        for name in method.fields:
            state[name] = torch.zeros(shape, device=device)
    (scores,) = state.values()
    num_fresh = first_position + num_queries - chunk.start
    # As large for each step of the chunk, so that they have the same memory in turn.
    num_pages = _pages(most + chunk.end - chunk.start)
    staged = dense.keys.new_empty(num_pages, num_kv_heads, _PAGE, 2 * head_size)
    held = torch.empty(num_kv_heads, dtype=torch.int32, device=device)
    tile = copied_tokens(head_size)
    assert chunk.held.pages.is_contiguous() and chunk.blocks.is_contiguous()
    in_dense = vector_arguments(dense)
    stage_kernel[(triton.cdiv(most + num_fresh, tile), num_kv_heads)](
        **page_arguments(pages), **table_arguments(params.device_tables),
        blocks=chunk.held.pages,
        **{f"dense_{name}": in_dense[name] for name in _VECTORS},
        dense_blocks=chunk.blocks,
        staged=staged, held=held,
        scores=scores if begins else None, scores_stride=scores.stride(0),
        placement=chunk.held.placement, num_tokens=chunk.start,
        grown_at=chunk.held.grown_at, num_fresh=num_fresh,
        HEAD_SIZE=head_size, BLOCK_SIZE=layout.block_size, DENSE_SIZE=dense_size,
        HEAVY=layout.heavy_slots, BUDGET=layout.budget, PAGE=_PAGE,
        BLOCK_S=tile, BLOCK_D=triton.next_power_of_2(head_size), num_warps=4,
    )  # fmt: skip
    read = torch.arange(len(staged), dtype=torch.int32, device=device)
    keys, values = staged.chunk(2, dim=-1)
    lse = torch.empty(num_heads, num_queries, device=device)
    tiles = tiles_of(query)
    if query.dtype == torch.float32:
        tiles["BLOCK_Q"] = max(tiles["BLOCK_Q"] // 2, 16)  # or registers spill
    read_kernel[(triton.cdiv(num_queries, tiles["BLOCK_Q"]), num_heads)](
        query=query, query_strides=query.stride()[:2],
        keys=keys, keys_strides=keys.stride(), values=values, blocks=read, held=held,
        sink_logits=params.sink_logits,
        output=output, output_strides=output.stride()[:2], lse=lse,
        num_queries=num_queries, first_position=first_position - chunk.start,
        scale=params.scale, softcap=params.softcap, SOFTCAP=params.softcap > 0.0,
        GROUP=num_heads // num_kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=_PAGE,
        **tiles, num_warps=4, num_stages=2,
    )  # fmt: skip
    unscored = max(chunk.first_scoring - first_position, 0)
    if unscored < num_queries:
        add_up(
            query[unscored:], keys.transpose(2, 3), read,
            first_position - chunk.start + unscored, state, params,
            lse[:, unscored:].contiguous(), held, most,
        )  # fmt: skip
