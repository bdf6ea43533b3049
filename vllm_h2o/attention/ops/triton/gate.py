"""The gate: one pass over a prompt's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import ScoredLayer
from vllm_h2o.attention.ops.triton.launch import copied_tokens
from vllm_h2o.attention.ops.triton.layers import (
    SOURCE,
    WEIGHTS,
    LayerBatch,
    batches,
    of_layer,
    pages_of_layer,
    stacked,
)
from vllm_h2o.attention.ops.triton.slots import page_offsets
from vllm_h2o.policy.gate import LEAST_NORM

LEAST = tl.constexpr(LEAST_NORM)


@triton.jit
def load_rows(
    rows, offsets, stride, first, step,
    exists, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`[len(offsets), BLOCK]` float32 elements `first + i * step` of rows, i < LENGTH.

    `offsets`: where rows begin; `stride`: from an element to the next.
    """
    i = tl.arange(0, BLOCK)
    at = offsets[:, None] + (first + i * step)[None, :] * stride
    mask = exists[:, None] & (i < LENGTH)[None, :]
    return tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_weights(weights, first, step, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """`[1, BLOCK]` elements `first + i * step` of a head's weights, i < LENGTH."""
    i = tl.arange(0, BLOCK)
    at = weights + first + i * step
    return tl.load(at, mask=i < LENGTH, other=0.0)[None, :]


@triton.jit(
    do_not_specialize=[
        "first_token",
        "num_tokens",
        "first_query",
        "layer_stride",
        "head_stride",
    ],
    do_not_specialize_on_alignment=["blocks", "attention"],
)
def gate_kernel(
    keys, keys_strides, values, values_strides, blocks, angles, weights, attention,
    layer_stride, head_stride, distances, first_token, num_tokens, first_query,
    KNOWN: tl.constexpr, NEOX: tl.constexpr, GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Write the attention that one tile of tokens is expected to get in one KV head.

    Tokens from `first_token` on, of a prompt of `num_tokens`.
    Grid `(tiles of tokens, num_kv_heads, num_layers)`. `KNOWN`: the rotation is, of
    the first `ROTARY` elements of a key; where it is not, a key's norm alone counts.

    Reference: policy/gate.py::features and ::expected, attention/gate.py::fill.
    """
    tile, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = pages_of_layer(keys, distances, SOURCE)
    values = pages_of_layer(values, distances, SOURCE)
    weights = of_layer(weights, distances, WEIGHTS)
    i = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = first_token + i
    exists = tokens < num_tokens
    places = (blocks, None, None)
    at = page_offsets(places, tokens, exists, head, keys_strides, BLOCK_SIZE)
    mine = weights + head * (2 * HEAD_SIZE + 4)

    squares = tl.zeros([BLOCK_T], tl.float32)
    along = tl.zeros([BLOCK_T], tl.float32)
    if KNOWN and ROTARY > 0:
        HALF: tl.constexpr = ROTARY // 2
        # Pairs are (i, i + HALF), or neighbours.
        step: tl.constexpr = 1 if NEOX else 2
        apart: tl.constexpr = HALF if NEOX else 1
        x = load_rows(keys, at, keys_strides[3], 0, step, exists, HALF, BLOCK_HALF)
        y = load_rows(keys, at, keys_strides[3], apart, step, exists, HALF, BLOCK_HALF)
        row = tokens.to(tl.int64) * ROTARY
        cos = load_rows(angles, row, 1, 0, 1, exists, HALF, BLOCK_HALF)
        sin = load_rows(angles, row, 1, HALF, 1, exists, HALF, BLOCK_HALF)
        turned_x, turned_y = x * cos + y * sin, y * cos - x * sin
        squares += tl.sum(turned_x * turned_x + turned_y * turned_y, axis=1)
        along += tl.sum(
            turned_x * load_weights(mine, 0, step, HALF, BLOCK_HALF)
            + turned_y * load_weights(mine, apart, step, HALF, BLOCK_HALF),
            axis=1,
        )
    if not KNOWN or ROTARY < HEAD_SIZE:
        first: tl.constexpr = ROTARY if KNOWN else 0
        REST: tl.constexpr = HEAD_SIZE - first
        rest = load_rows(keys, at, keys_strides[3], first, 1, exists, REST, BLOCK_REST)
        squares += tl.sum(rest * rest, axis=1)
        if KNOWN:
            w = load_weights(mine, first, 1, REST, BLOCK_REST)
            along += tl.sum(rest * w, axis=1)
    key_norm = tl.sqrt_rn(squares)
    if not KNOWN:
        along = key_norm * tl.load(mine)
    key_norm = tl.maximum(key_norm, LEAST)

    at = page_offsets(places, tokens, exists, head, values_strides, BLOCK_SIZE)
    value = load_rows(values, at, values_strides[3], 0, 1, exists, HEAD_SIZE, BLOCK_D)
    value_norm = tl.maximum(tl.sqrt_rn(tl.sum(value * value, axis=1)), LEAST)
    w = load_weights(mine, HEAD_SIZE, 1, HEAD_SIZE, BLOCK_D)
    value_along = tl.sum(value * w, axis=1)

    others = mine + 2 * HEAD_SIZE
    age = (num_tokens - tokens).to(tl.float32)
    length: tl.constexpr = HEAD_SIZE**0.5
    root = length * (along / key_norm + value_along / value_norm)
    root += tl.load(others) * tl.log(key_norm)
    root += tl.load(others + 1) * tl.log(value_norm)
    root += tl.load(others + 2) * tl.log(tl.where(exists, age, 1.0))
    root = tl.maximum(root + tl.load(others + 3), 0.0)
    queries = num_tokens - tl.maximum(tokens, first_query)
    expected = GROUP * (root * root) * (root * root) * queries.to(tl.float32)
    attention += layer.to(tl.int64) * layer_stride + head * head_stride
    tl.store(attention + i, expected, mask=exists)


def score_by_gate(
    layers: Sequence[ScoredLayer], dense_blocks: torch.Tensor, first_query: int
) -> None:
    """See `Kernels.score_by_gate`."""
    for batch in batches(layers):
        own = [layer.state["attention"] for layer in batch.layers]
        attention, is_view = stacked(own)
        expect(batch, attention, dense_blocks, first_query)
        if not is_view:
            for mine, written in zip(own, attention, strict=True):
                mine.copy_(written)


def expect(
    batch: LayerBatch,
    attention: torch.Tensor,
    blocks: torch.Tensor,
    first_query: int,
    first_token: int = 0,
) -> None:
    """Write the attention that the gate expects, see `LayerGate.fill`.

    Args:
        batch: The layers.
        attention: `[num_layers, num_kv_heads, num_tokens - first_token]` float32 of
            tokens of a prompt of `num_tokens`, written.
        blocks: As there.
        first_query: As there.
        first_token: Position of the first of the tokens.
    """
    pages, gate = batch.first.source, batch.first.params.gate
    assert gate is not None and gate.weights.is_contiguous()
    _, num_kv_heads, head_size, block_size = pages.keys.shape
    assert gate.weights.shape == (num_kv_heads, 2 * head_size + 4)
    num_layers, _, count = attention.shape
    num_tokens = first_token + count
    assert attention.stride(2) == 1 and blocks.stride(0) == 1
    angles, rotary, known, neox = gate.weights, 0, True, True
    if gate.rotation is not None:
        table, neox = gate.rotation.angles, gate.rotation.neox
        known = table is not None and len(table) >= num_tokens
        if table is not None and known:
            assert table.is_contiguous() and table.device == attention.device
            angles, rotary = table, table.shape[1]
    keys, tile = pages.keys.transpose(2, 3), copied_tokens(head_size)
    gate_kernel[(triton.cdiv(count, tile), num_kv_heads, num_layers)](
        keys=keys, keys_strides=keys.stride(),
        values=pages.values, values_strides=pages.values.stride(),
        blocks=blocks, angles=angles, weights=gate.weights,
        attention=attention, layer_stride=attention.stride(0),
        head_stride=attention.stride(1), distances=batch.distances,
        first_token=first_token, num_tokens=num_tokens, first_query=first_query,
        KNOWN=known, NEOX=neox, GROUP=gate.group,
        HEAD_SIZE=head_size, ROTARY=rotary, BLOCK_SIZE=block_size,
        BLOCK_T=tile, BLOCK_D=triton.next_power_of_2(head_size),
        BLOCK_HALF=triton.next_power_of_2(max(rotary // 2, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_size - rotary, 1)),
        num_warps=4,
    )  # fmt: skip
