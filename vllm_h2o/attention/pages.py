"""Views into the pages of one layer's KV cache.

A page is one block of one layer, or a part of a resident one (`policy.geometry`): keys
and values of all KV heads as vLLM has them in a block, then what H2O keeps beside them,
per KV head and slot: the attention that the slot has got, a float32, the position that
it was born at, an int32, and what else the method keeps; then what H2O keeps of the
page as a whole (see `floats_of_page`). Only resident blocks use the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import floats_of_page, state_bytes
from vllm_h2o.policy.methods import State

FIELDS = ("attention",)
"""What most methods keep of a slot."""


@dataclass(frozen=True, eq=False)
class Pages:
    """All pages of a layer; compared by identity, as `DecodeParams` are.

    Attributes:
        keys: `[num_pages, num_kv_heads, head_size, block_size]`; on CPU, the
            layout of ISA `vec`, this is also their order in memory.
        values: `[num_pages, num_kv_heads, block_size, head_size]`.
        state: `[num_pages, num_kv_heads, block_size]` float32 for each of the method's
            fields; the first lies before the births, the others behind them.
        births: `[num_pages, num_kv_heads, block_size]` int32.
        thresholds: `[num_pages, num_kv_heads]` float32 where heads merge what they
            lose (`policy.merging`), the last of a page; None elsewhere.
        page_stride: Bytes from a page to that of the next number.
        page_bytes: Bytes of a page; the page of the next number may begin within it
            (`policy.geometry.BlockCut`).
        state_offset: Bytes from the start of a page to its state.
    """

    keys: torch.Tensor
    values: torch.Tensor
    state: State
    births: torch.Tensor
    page_stride: int
    page_bytes: int
    state_offset: int
    thresholds: torch.Tensor | None = None

    @classmethod
    def view(
        cls,
        kv_cache: torch.Tensor,
        fields: Sequence[str] = FIELDS,
        merges: bool = False,
        reads_part: bool = False,
    ) -> Pages:
        """View a cache as vLLM hands it to a layer on CPU, with ISA `vec`.

        Args:
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`
                whose block stride leaves room for the state of each page.
            fields: What the method keeps of a slot.
            merges: Whether heads merge what they lose.
            reads_part: Whether queries read a part of the pages only.
        """
        pages = cls._view(kv_cache, fields, merges, reads_part)
        pages.check_room(fields)
        return pages

    @classmethod
    def view_cut(
        cls,
        kv_cache: torch.Tensor,
        page_slots: int,
        cut: BlockCut,
        fields: Sequence[str] = FIELDS,
        merges: bool = False,
        reads_part: bool = False,
    ) -> Pages:
        """View the pages that resident blocks are cut into, each as `view` has it.

        Args:
            kv_cache: See `view`.
            page_slots: Of a page.
            cut: Where the pages are; their numbers are the first dimension of all.
            fields: See `view`, as are the next two.
            merges: See there.
            reads_part: See there.
        """
        num_blocks, num_kv_heads, _, double_head = kv_cache.shape
        item = kv_cache.element_size()
        assert cut.block_step * cut.unit == kv_cache.stride(0) * item
        assert not cut.unit % 4, "state is words of 4 bytes"
        last = (num_blocks - 1) * cut.block_step
        last += (cut.per_block - 1) * cut.page_step
        assert last < 2**31, "numbers of pages are int32"
        shape = (last + 1, num_kv_heads, page_slots, double_head)
        strides = (cut.unit // item, page_slots * double_head, double_head, 1)
        numbered = kv_cache.as_strided(shape, strides)
        pages = cls._view(numbered, fields, merges, reads_part)
        assert pages.page_bytes <= cut.page_step * cut.unit
        return pages

    @classmethod
    def _view(
        cls,
        kv_cache: torch.Tensor,
        fields: Sequence[str],
        merges: bool,
        reads_part: bool,
    ) -> Pages:
        num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
        head_size = double_head // 2
        item = kv_cache.element_size()
        page_stride = kv_cache.stride(0) * item
        content = num_kv_heads * block_size * double_head * item
        assert kv_cache[0].is_contiguous(), "KV heads of a page are not contiguous"
        floats = floats_of_page(head_size, block_size, reads_part, merges)
        needed = content + state_bytes(num_kv_heads, block_size, len(fields), floats)
        half = block_size * head_size
        start = int(kv_cache.storage_offset())
        block, head = kv_cache.stride(0), 2 * half
        keys = kv_cache.as_strided(
            (num_blocks, num_kv_heads, head_size, block_size),
            (block, head, block_size, 1),
            start,
        )
        values = kv_cache.as_strided(
            (num_blocks, num_kv_heads, block_size, head_size),
            (block, head, head_size, 1),
            start + half,
        )
        state, births = _state(kv_cache, start * item + content, fields)
        thresholds = None
        if merges:
            last = (start * item + needed) // 4 - num_kv_heads
            thresholds = _words(kv_cache, torch.float32).as_strided(
                (num_blocks, num_kv_heads), (page_stride // 4, 1), last
            )
        return cls(
            keys, values, state, births, page_stride, needed, content, thresholds
        )

    @classmethod
    def view_rows(cls, kv_cache: torch.Tensor, fields: Sequence[str] = FIELDS) -> Pages:
        """View a cache whose tokens are rows of K beside V, as on CUDA.

        Args:
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, in
                any order within a page, whose block stride leaves room for the
                state of each page.
            fields: What the method keeps of a slot.
        """
        num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
        item = kv_cache.element_size()
        page_stride = kv_cache.stride(0) * item
        content = num_kv_heads * block_size * double_head * item
        needed = content + state_bytes(num_kv_heads, block_size, len(fields))
        spans = zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True)
        assert sum((n - 1) * stride for n, stride in spans) * item < content, (
            "the heads and tokens of a page do not lie together"
        )
        keys, values = kv_cache.split(double_head // 2, dim=3)
        first = int(kv_cache.storage_offset()) * item + content
        state, births = _state(kv_cache, first, fields)
        pages = cls(
            keys.transpose(2, 3), values, state, births, page_stride, needed, content
        )
        pages.check_room(fields)
        return pages

    def check_room(self, fields: Sequence[str]) -> None:
        """Fail where pages that follow each other overlap."""
        assert self.page_stride >= self.page_bytes, (
            f"a page of {self.page_stride} bytes has no room for {fields}: "
            "the layer's KV cache spec is not H2O's"
        )

    @property
    def attention(self) -> torch.Tensor:
        """`[num_blocks, num_kv_heads, block_size]` float32 that each slot has got."""
        return self.state["attention"]

    @property
    def block_size(self) -> int:
        """Token slots of a page."""
        return self.keys.shape[3]


def _state(
    kv_cache: torch.Tensor, first_byte: int, fields: Sequence[str]
) -> tuple[State, torch.Tensor]:
    """State and births of all pages; `first_byte`: where those of page 0 begin.

    The first field, the births, then the other fields: kernels know the first two.
    """
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    shape = (num_blocks, num_kv_heads, block_size)
    page_words = kv_cache.stride(0) * kv_cache.element_size() // 4
    strides, words = (page_words, block_size, 1), num_kv_heads * block_size

    def part(number: int, dtype: torch.dtype) -> torch.Tensor:
        start = first_byte // 4 + number * words
        return _words(kv_cache, dtype).as_strided(shape, strides, start)

    first, *others = fields
    state = {first: part(0, torch.float32)}
    state |= {name: part(2 + i, torch.float32) for i, name in enumerate(others)}
    return state, part(1, torch.int32)


def _words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of `tensor` as 4-byte words."""
    storage = tensor.untyped_storage()
    words = torch.empty(0, dtype=dtype, device=tensor.device)
    return words.set_(storage, 0, (storage.nbytes() // 4,), (1,))
