"""Scoring of prompts: the attention that observation queries put on each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import LayerParams, reference
from vllm_h2o.attention.ops.triton.launch import check_supported
from vllm_h2o.attention.ops.triton.slots import page_offsets, soft_capped
from vllm_h2o.attention.ops.triton.splitting import num_sms
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.methods import State

_QUERY_TILE_BYTES = 32 * 1024
_KEY_TILE_BYTES = 16 * 1024
_MOST_LOGITS = 1 << 22
"""That a method with rules of its own for prompts has at once, or of one query."""
_ALIVE = 5
"""Of a tile's logits: themselves, attention, its squares, and what made these."""
# Differ from prompt to prompt: one compilation must serve them all.
_VARYING = ["num_queries", "first_position"]


@triton.jit
def tile_logits(
    q, keys, keys_strides, blocks, kv_head, tokens, visible, scale, softcap,
    SOFTCAP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of the queries `q` against the prompt's `tokens` in its pages."""
    d = tl.arange(0, BLOCK_D)
    places = (blocks, None, None)
    at = page_offsets(places, tokens, visible, kv_head, keys_strides, BLOCK_SIZE)
    k = tl.load(
        keys + at[None, :] + d[:, None] * keys_strides[3],
        mask=(d < HEAD_SIZE)[:, None] & visible[None, :],
        other=0.0,
    )
    z = tl.dot(q, k, input_precision="ieee") * scale
    return soft_capped(z, softcap, SOFTCAP)


@triton.jit
def load_queries(
    query, query_strides, head, rows, num_queries,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[len(rows), BLOCK_D]` queries of a head, zero past the last."""
    d = tl.arange(0, BLOCK_D)
    offsets = rows.to(tl.int64)[:, None] * query_strides[0] + d[None, :]
    mask = (rows < num_queries)[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(query + head * query_strides[1] + offsets, mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=[*_VARYING, "split_tokens"],
    do_not_specialize_on_alignment=["blocks"],
)
def lse_kernel(
    query, query_strides, keys, keys_strides, blocks, lse,
    num_queries, first_position, split_tokens, scale, softcap,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of the logits of each query, for one split of the tokens.

        lse[i,h,q] = log sum over t <= first_position + q in split i of
                     exp(scale * query[q,h] . keys[h's KV head,t], soft-capped)

    Grid `(query tiles, num_heads, splits)`; lse: `[splits, num_heads, num_queries]`
    float32, -inf where a query sees nothing of a split.

    Reference: torch.logsumexp of the logits in policy/prompt_attention.py.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = load_queries(query, query_strides, head, rows, num_queries, HEAD_SIZE, BLOCK_D)
    start = split * split_tokens
    seen = first_position + tl.minimum((tile + 1) * BLOCK_Q, num_queries)
    end = tl.minimum(start + split_tokens, seen)
    maximum = tl.full([BLOCK_Q], -1.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(start, end, BLOCK_K):
        tokens = first + tl.arange(0, BLOCK_K)
        z = tile_logits(
            q, keys, keys_strides, blocks, head // GROUP, tokens, tokens < end,
            scale, softcap, SOFTCAP, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
        visible = tokens[None, :] <= first_position + rows[:, None]
        z = tl.where(visible & (tokens < end)[None, :], z, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, axis=1))
        total = total * tl.exp(maximum - new_maximum)
        total += tl.sum(tl.exp(z - new_maximum[:, None]), axis=1)
        maximum = new_maximum
    at = (split * tl.num_programs(1) + head).to(tl.int64) * num_queries + rows
    tl.store(lse + at, maximum + tl.log(total), mask=rows < num_queries)


@triton.jit(
    do_not_specialize=[*_VARYING, "attention_stride", "most_held"],
    do_not_specialize_on_alignment=["blocks"],
)
def observe_kernel(
    query, query_strides, keys, keys_strides, blocks, lse, weights, attention,
    attention_stride, held, most_held, num_queries, first_position, scale, softcap,
    SOFTCAP: tl.constexpr, DECAYS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the attention that one tile of tokens receives.

        A[h,q,t]    = exp(scale * query[q,h] . keys[g,t] - lse[h,q]), t <= q
        attention[g,t] += sum over q, h in g of weights[q] * A[h,q,t]

    Grid `(tiles of tokens, num_kv_heads)`: tokens outside, queries inside, so
    nothing is shared between programs and the sums have one order.

    Where KV head g has `held[g]` tokens before those that positions count, the
    attention of the latter is `most_held` columns behind the first of the former.

    Reference: policy/methods/sum.py::observe, but for its decay of older attention.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    tokens = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    column = tokens
    if held is not None:
        num_held = tl.load(held + kv_head)
        first_position += num_held
        column += tl.where(tokens < num_held, 0, most_held - num_held)
    num_tokens = first_position + num_queries
    exists = tokens < num_tokens
    received = tl.zeros([BLOCK_K], tl.float32)
    # Queries before the tile's first token see none of it.
    first_row = tl.maximum(tile * BLOCK_K - first_position, 0) // BLOCK_Q * BLOCK_Q
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for start in range(first_row, num_queries, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            in_batch = rows < num_queries
            q = load_queries(
                query, query_strides, head, rows, num_queries, HEAD_SIZE, BLOCK_D
            )
            z = tile_logits(
                q, keys, keys_strides, blocks, kv_head, tokens, exists,
                scale, softcap, SOFTCAP, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
            )  # fmt: skip
            row_lse = tl.load(
                lse + head * num_queries + rows,
                mask=in_batch,
                other=float("inf"),
            )
            visible = tokens[None, :] <= first_position + rows[:, None]
            probs = tl.where(visible, tl.exp(z - row_lse[:, None]), 0.0)
            if DECAYS:
                weight = tl.load(weights + rows, mask=in_batch, other=0.0)
                probs *= weight[:, None]
            received += tl.sum(probs, axis=0)
    at = kv_head * attention_stride + column
    old = tl.load(attention + at, mask=exists, other=0.0)
    tl.store(attention + at, old + received, mask=exists)


def observe(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: LayerParams,
    lse: torch.Tensor | None = None,
) -> None:
    """See `Kernels.observe`; by methods with rules of their own for prompts in torch.

    Args:
        query: As there.
        pages: As there, any strides.
        dense_blocks: As there, of any integer type.
        first_position: As there.
        state: As there.
        params: As there.
        lse: `[num_heads, m]` float32 log-sum-exp (natural) of each query's
            logits over all it sees but a sink, as flash attention returns it where
            there is none; None computes it.
    """
    if params.fused_prompt_form is None:
        _observe_by_torch(query, pages, dense_blocks, first_position, state, params)
        return
    if lse is None:
        shared = _shared(query, pages.keys, dense_blocks, first_position, params)
        lse = _log_sum_exp(shared, query.shape[1], first_position + len(query))
    if params.sink_logits is not None:
        lse = torch.logaddexp(lse, params.sink_logits.float()[:, None])
    add_up(query, pages.keys, dense_blocks, first_position, state, params, lse)


def _observe_by_torch(
    query: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: LayerParams,
) -> None:
    """KV head by KV head, few logits at a time."""
    num_kv_heads = pages.keys.shape[1]
    group, sinks = query.shape[1] // num_kv_heads, params.sink_logits
    of_query = group * (first_position + len(query))
    at_once = max(_MOST_LOGITS // of_query, 1)
    for head in range(num_kv_heads):
        own = slice(head * group, (head + 1) * group)
        if sinks is not None:
            params = replace(params, sink_logits=sinks[own].float())
        one = replace(pages, keys=pages.keys[:, head : head + 1])
        mine = {name: of_heads[head : head + 1] for name, of_heads in state.items()}
        for start in range(0, len(query), at_once):
            reference.observe(
                query[start : start + at_once, own], one, dense_blocks,
                first_position + start, mine, params,
            )  # fmt: skip


def own_observe_bytes(
    num_tokens: int, group: int, head_size: int, element_size: int
) -> int:
    """Bytes of a KV head's observation by a method with rules of its own for prompts.

    Args:
        num_tokens: Of the prompt.
        group: Query heads of the KV head.
        head_size: Of keys.
        element_size: Bytes of an element of them.
    """
    keys = num_tokens * head_size * (2 * element_size + 4)
    return keys + _ALIVE * 4 * max(group * num_tokens, _MOST_LOGITS)


def add_up(
    query: torch.Tensor,
    keys: torch.Tensor,
    blocks: torch.Tensor,
    first_position: int,
    state: State,
    params: LayerParams,
    lse: torch.Tensor,
    held: torch.Tensor | None = None,
    most_held: int = 0,
) -> None:
    """Let queries score, whose log-sum-exps are known.

    Args:
        query: `[m, num_heads, head_size]` after RoPE, at `first_position` and on.
        keys: `[num_pages, num_kv_heads, head_size, page_size]`, any strides.
        blocks: `[pages]` those of the tokens, in their order, of any integer type.
        first_position: Of the queries.
        state: `[num_kv_heads, >= most_held + first_position + m]`.
        params: The layer's constants.
        lse: `[num_heads, m]` float32 of each query's logits and its sink, natural.
        held: `[num_kv_heads]` int32 tokens before those that positions count, if each
            KV head has another number of them; `observe_kernel` says where they are.
        most_held: The largest of them, or more.
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    shared = _shared(query, keys, blocks, first_position, params)
    attention, score_decay = state["attention"], params.score_decay
    num_tokens = most_held + first_position + num_queries
    assert attention.stride(1) == 1 and attention.shape[1] >= num_tokens
    assert lse.shape == (num_heads, num_queries) and lse.is_contiguous()
    weights = lse
    if score_decay != 1.0:
        attention.mul_(score_decay**num_queries)
        age = torch.arange(num_queries - 1, -1, -1, device=query.device)
        weights = torch.pow(torch.full_like(age, score_decay, dtype=torch.float32), age)
    observe_kernel[(triton.cdiv(num_tokens, shared["BLOCK_K"]), num_kv_heads)](
        lse=lse, weights=weights,
        attention=attention, attention_stride=attention.stride(0),
        held=held, most_held=most_held,
        DECAYS=score_decay != 1.0, **shared,
    )  # fmt: skip


def _shared(
    query: torch.Tensor,
    keys: torch.Tensor,
    blocks: torch.Tensor,
    first_position: int,
    params: LayerParams,
) -> dict[str, Any]:
    """The arguments that both kernels share."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, block_size = keys.shape[1], keys.shape[3]
    check_supported(query.dtype, head_size, block_size, num_heads, num_kv_heads)
    assert query.stride(2) == 1 and blocks.is_contiguous()
    keys = keys.transpose(2, 3)
    return {
        "query": query, "query_strides": query.stride()[:2],
        "keys": keys, "keys_strides": keys.stride(), "blocks": blocks,
        "num_queries": num_queries, "first_position": first_position,
        "scale": params.scale, "softcap": params.softcap,
        "SOFTCAP": params.softcap > 0.0,
        "GROUP": num_heads // num_kv_heads, "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size, **tiles_of(query), "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def tiles_of(query: torch.Tensor) -> dict[str, int]:
    """Queries and tokens that a program has at once."""
    block_d = triton.next_power_of_2(query.shape[2])
    row_bytes = block_d * query.element_size()
    return {
        "BLOCK_Q": min(64, _tile(_QUERY_TILE_BYTES, row_bytes)),
        "BLOCK_K": _tile(_KEY_TILE_BYTES, row_bytes),
        "BLOCK_D": block_d,
    }


def _log_sum_exp(shared: dict, num_heads: int, num_tokens: int) -> torch.Tensor:
    """`[num_heads, num_queries]` float32, over splits that fill the device."""
    query, num_queries = shared["query"], shared["num_queries"]
    tiles = triton.cdiv(num_queries, shared["BLOCK_Q"])
    key_tiles = triton.cdiv(num_tokens, shared["BLOCK_K"])
    wanted = triton.cdiv(4 * num_sms(query.device), tiles * num_heads)
    split_tokens = triton.cdiv(key_tiles, min(wanted, key_tiles)) * shared["BLOCK_K"]
    splits = triton.cdiv(num_tokens, split_tokens)
    shape = (splits, num_heads, num_queries)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    lse_kernel[(tiles, num_heads, splits)](lse=lse, split_tokens=split_tokens, **shared)
    return lse[0] if splits == 1 else lse.logsumexp(dim=0)


def _tile(tile_bytes: int, row_bytes: int) -> int:
    return min(max(tile_bytes // row_bytes, 16), 128)
