"""Where a chunk ends: what KV heads hold is copied out of their slots, and back."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from vllm_h2o.attention.ops import Held, LayerParams, chunks
from vllm_h2o.attention.ops.triton.growth import VARYING, copy_slots, staged_slots
from vllm_h2o.attention.ops.triton.launch import (
    copied_tokens,
    page_arguments,
    table_arguments,
)
from vllm_h2o.attention.ops.triton.slots import place_after, sizes_of
from vllm_h2o.attention.pages import Pages


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["blocks"])
def held_kernel(
    keys, keys_strides, values, values_strides, attention, births, state_strides,
    key_scales, value_scales, staged, staged_attention, staged_births, staged_scales,
    slots, blocks, sizes, lists,
    placement, num_tokens, grown_at, most,
    BACK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAVY: tl.constexpr, BUDGET: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy one tile of what a KV head holds out of its slots, or back into others.

        staged[head, i] = what is in slot i, of as many as are held
        what is in slots[head, i] = staged[head, i]                   for BACK, if >= 0

    Grid `(tiles of slots, num_kv_heads)`.

    Reference: HeldHeads of ops/chunks.py.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    entry = placement * tl.num_programs(1) + head
    i = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    at = head.to(tl.int64) * most + i
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
        staged_scales, at, slot, exists, blocks, sizes, lists, entry, head,
        BACK, HEAD_SIZE, BLOCK_SIZE, BLOCK_D,
    )  # fmt: skip


class StagedHeads(chunks.HeldHeads):
    """What the KV heads of a layer hold, copied out of their pages at once."""

    def __init__(self, pages: Pages, held: Held, end: int, params: LayerParams) -> None:
        """Copy it; what is put stays here until `write`."""
        self._pages, self._held, self._params = pages, held, params
        num_kv_heads = pages.keys.shape[1]
        self._shape = num_kv_heads, params.largest_of(held.placement, num_kv_heads)
        staged = staged_slots(pages, self._shape)
        self._run(staged, None)
        self.held = _parts(staged)
        self.heads = [
            chunks.HeldHead(pages, held, end, head, params, StagedHead(self, head))
            for head in range(num_kv_heads)
        ]

    def write(self) -> None:
        """See the base class."""
        self._run(self._put, self.slots)

    @functools.cached_property
    def put(self) -> dict[str, torch.Tensor]:
        """`[num_kv_heads, most, ..]` parts of what is to be written, by head the first
        rows."""
        return _parts(self._put)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """`[num_kv_heads, most]` int32 where it is to be written, -1: nowhere."""
        device = self._pages.keys.device
        return torch.full(self._shape, -1, dtype=torch.int32, device=device)

    @functools.cached_property
    def _put(self) -> dict[str, torch.Tensor]:
        return staged_slots(self._pages, self._shape)

    def _run(self, staged: dict[str, torch.Tensor], slots: torch.Tensor | None) -> None:
        pages, held, layout = self._pages, self._held, self._params.layout
        (num_kv_heads, most), head_size = self._shape, pages.keys.shape[2]
        tile = copied_tokens(head_size)
        assert held.pages.is_contiguous()
        held_kernel[(triton.cdiv(most, tile), num_kv_heads)](
            **page_arguments(pages),
            **table_arguments(self._params.device_tables), **staged,
            slots=slots, blocks=held.pages, placement=held.placement,
            num_tokens=held.num_tokens, grown_at=held.grown_at, most=most,
            BACK=slots is not None, HEAD_SIZE=head_size, BLOCK_SIZE=layout.block_size,
            HEAVY=layout.heavy_slots, BUDGET=layout.budget,
            BLOCK_S=tile, BLOCK_D=triton.next_power_of_2(head_size), num_warps=4,
        )  # fmt: skip


def _parts(staged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of what a kernel copies, named as pages name them."""
    keys, values = staged["staged"].chunk(2, dim=-1)
    key_scales, value_scales = staged["staged_scales"].unbind(dim=-1)
    return {
        "keys": keys, "values": values,
        "key_scales": key_scales, "value_scales": value_scales,
        "attention": staged["staged_attention"], "births": staged["staged_births"],
    }  # fmt: skip


class StagedHead:
    """See `chunks.Content`; of one KV head of `StagedHeads`."""

    def __init__(self, heads: StagedHeads, head: int) -> None:
        """Read and write through the copies of all heads."""
        self._heads, self._head = heads, head

    def get(self, what: str, slots: torch.Tensor) -> torch.Tensor:
        """See `chunks.HeldHead.get`."""
        return self._heads.held[what][self._head, slots]

    def put(self, what: str, slots: torch.Tensor, content: torch.Tensor) -> None:
        """See `chunks.HeldHead.put`; all parts of a head to the same slots."""
        self._heads.put[what][self._head, : len(slots)] = content
        self._heads.slots[self._head, : len(slots)] = slots


compress_chunk = functools.partial(chunks.compress_chunk, hold=StagedHeads)
move_keys = functools.partial(chunks.move_keys, hold=StagedHeads)
