"""The transition: the selected prompt tokens move into resident blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops.triton.launch import page_arguments
from vllm_h2o.attention.ops.triton.slots import page_offsets
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.selection import select_residents

_TILE_SLOTS = 32


# Differ from prompt to prompt: one compilation must serve them all.
@triton.jit(do_not_specialize=["prompt_scores_stride", "selected_stride", "num_slots"])
def gather_kernel(
    keys, keys_strides, values, values_strides, scores, births, state_strides,
    prompt_scores, prompt_scores_stride, selected, selected_stride, slots,
    dense_blocks, resident_blocks, num_slots,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one tile of a KV head's selected tokens into their slots.

        K, V[resident slots[i]]  = K, V[dense selected[head,i]]
        score[resident slots[i]] = prompt_scores[head, selected[head,i]]
        birth[resident slots[i]] = selected[head,i]

    Grid `(tiles of slots, num_kv_heads)`. Dense and resident blocks differ.

    Reference: the last lines of attention/prompt.py::compress_prompt.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    i, d = tile * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    exists = i < num_slots
    token = tl.load(selected + head * selected_stride + i, mask=exists, other=0)
    token = token.to(tl.int32)
    slot = tl.load(slots + i, mask=exists, other=0).to(tl.int32)
    mask = exists[:, None] & (d < HEAD_SIZE)[None, :]

    source = page_offsets(dense_blocks, token, exists, head, keys_strides, BLOCK_SIZE)
    target = page_offsets(resident_blocks, slot, exists, head, keys_strides, BLOCK_SIZE)
    along = d[None, :] * keys_strides[3]
    k = tl.load(keys + source[:, None] + along, mask=mask)
    tl.store(keys + target[:, None] + along, k, mask=mask)

    source = page_offsets(dense_blocks, token, exists, head, values_strides, BLOCK_SIZE)
    target = page_offsets(
        resident_blocks, slot, exists, head, values_strides, BLOCK_SIZE
    )
    along = d[None, :] * values_strides[3]
    v = tl.load(values + source[:, None] + along, mask=mask)
    tl.store(values + target[:, None] + along, v, mask=mask)

    target = page_offsets(
        resident_blocks, slot, exists, head, state_strides, BLOCK_SIZE
    )
    at = prompt_scores + head * prompt_scores_stride + token
    tl.store(scores + target, tl.load(at, mask=exists), mask=exists)
    tl.store(births + target, token, mask=exists)


def compress_prompt(
    scores: torch.Tensor,
    pages: Pages,
    dense_blocks: torch.Tensor,
    resident_blocks: torch.Tensor,
    config: H2OConfig,
    layout: SlotLayout,
    first_query: int,
) -> None:
    """Copy each KV head's choice from the dense into the resident pages.

    Args:
        scores: `[num_kv_heads, prefill_end]` float32 of the whole prompt.
        pages: The layer's pages, any strides.
        dense_blocks: `[>= cdiv(prefill_end, block_size)]` block ids.
        resident_blocks: `[>= cdiv(min(prefill_end, budget), block_size)]`
            block ids, none of them dense.
        config: The policy.
        layout: The slots.
        first_query: Position of the first query that scored.
    """
    selected, slots = select_residents(scores, config, layout, first_query)
    num_kv_heads, num_slots = selected.shape
    head_size = pages.keys.shape[2]
    assert scores.stride(1) == 1 and selected.stride(1) == 1
    assert dense_blocks.is_contiguous() and resident_blocks.is_contiguous()
    gather_kernel[(triton.cdiv(num_slots, _TILE_SLOTS), num_kv_heads)](
        **page_arguments(pages),
        prompt_scores=scores, prompt_scores_stride=scores.stride(0),
        selected=selected, selected_stride=selected.stride(0), slots=slots,
        dense_blocks=dense_blocks, resident_blocks=resident_blocks,
        num_slots=num_slots, HEAD_SIZE=head_size, BLOCK_SIZE=layout.block_size,
        BLOCK_S=_TILE_SLOTS, BLOCK_D=triton.next_power_of_2(head_size), num_warps=4,
    )  # fmt: skip
