"""Views into the pages of one layer's KV cache.

A page is one block of one layer, or a part of a resident one (`policy.geometry`): keys
and values of all KV heads as vLLM has them in a block, then what H2O keeps beside them,
per KV head and slot: the attention that the slot has got, a float32, the position that
it was born at, an int32, and what else the method keeps; where keys and values are int8
their scales; then what H2O keeps of the page as a whole (see `floats_of_page`). Only
resident blocks use the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import floats_of_page, state_bytes
from vllm_h2o.policy.methods import State
from vllm_h2o.policy.quantization import NUM_SCALES

FIELDS = ("attention",)
"""What most methods keep of a slot."""


@dataclass(frozen=True, eq=False)
class Pages:
    """All pages of a layer; compared by identity, as `LayerParams` are.

    Attributes:
        keys: `[num_pages, num_kv_heads, head_size, block_size]`; on CPU, the
            layout of ISA `vec`, this is also their order in memory.
        values: `[num_pages, num_kv_heads, block_size, head_size]`.
        state: `[num_pages, num_kv_heads, block_size]` float32 for each of the method's
            fields; the first lies before the births, the others behind them.
        births: `[num_pages, num_kv_heads, block_size]` int32.
        key_scales: `[num_pages, num_kv_heads, block_size]` float32 where keys are int8
            (`policy.quantization`); None elsewhere.
        value_scales: The same of values.
        bounds: `[num_pages, num_kv_heads, head_size]` float32 on CUDA where queries
            read a part of the pages (`policy.sparse_read`); None elsewhere.
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
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    bounds: torch.Tensor | None = None

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
    def view_dense(cls, kv_cache: torch.Tensor) -> Pages:
        """View the blocks of such a cache, of which only keys and values are asked for.

        Where resident blocks are cut into pages, other blocks may have no room for
        more: there is no state, and births are of no slots.

        Args:
            kv_cache: See `view`.
        """
        return cls._view(kv_cache, (), False, False)

    @classmethod
    def view_cut(
        cls,
        kv_cache: torch.Tensor,
        page_slots: int,
        cut: BlockCut,
        fields: Sequence[str] = FIELDS,
        merges: bool = False,
        reads_part: bool = False,
        quantized: bool = False,
    ) -> Pages:
        """View the pages that resident blocks are cut into, each as `view` has it.

        Args:
            kv_cache: See `view`.
            page_slots: Of a page.
            cut: Where the pages are; their numbers are the first dimension of all.
            fields: See `view`, as are the next two.
            merges: See there.
            reads_part: See there.
            quantized: Whether keys and values are int8.
        """
        dtype = torch.int8 if quantized else kv_cache.dtype
        numbered = _numbered(kv_cache, page_slots, cut, dtype)
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
        needed, quantized = content, kv_cache.dtype == torch.int8
        if fields:
            floats = floats_of_page(head_size, block_size, reads_part, merges)
            num_fields = len(fields) + NUM_SCALES * quantized
            needed += state_bytes(num_kv_heads, block_size, num_fields, floats)
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
        state, births, scales = _state(
            kv_cache, start * item + content, fields, NUM_SCALES * quantized
        )
        thresholds = None
        if merges:
            last = (start * item + needed) // 4 - num_kv_heads
            thresholds = _elements(kv_cache, torch.float32).as_strided(
                (num_blocks, num_kv_heads), (page_stride // 4, 1), last
            )
        return cls(
            keys, values, state, births, page_stride, needed, content, thresholds,
            *scales,
        )  # fmt: skip

    @classmethod
    def view_rows(
        cls,
        kv_cache: torch.Tensor,
        fields: Sequence[str] = FIELDS,
        reads_part: bool = False,
    ) -> Pages:
        """View a cache whose tokens are rows of K beside V, as on CUDA.

        Args:
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, in
                any order within a page, whose block stride leaves room for the
                state of each page.
            fields: What the method keeps of a slot; none: dense pages, as `view_dense`.
            reads_part: See `view`.
        """
        pages = cls._view_rows(kv_cache, fields, reads_part)
        pages.check_room(fields)
        return pages

    @classmethod
    def view_rows_cut(
        cls,
        kv_cache: torch.Tensor,
        page_slots: int,
        cut: BlockCut,
        fields: Sequence[str] = FIELDS,
        reads_part: bool = False,
        quantized: bool = False,
    ) -> Pages:
        """View the pages that resident blocks are cut into: rows head by head.

        Args:
            kv_cache: See `view_rows`.
            page_slots: See `view_cut`, as are the others.
            cut: See there.
            fields: See there.
            reads_part: See there.
            quantized: See there.
        """
        dtype = torch.int8 if quantized else kv_cache.dtype
        numbered = _numbered(kv_cache, page_slots, cut, dtype)
        pages = cls._view_rows(numbered, fields, reads_part)
        assert pages.page_bytes <= cut.page_step * cut.unit
        return pages

    @classmethod
    def _view_rows(
        cls, kv_cache: torch.Tensor, fields: Sequence[str], reads_part: bool
    ) -> Pages:
        num_blocks, num_kv_heads, block_size, double_head = kv_cache.shape
        item = kv_cache.element_size()
        page_stride = kv_cache.stride(0) * item
        content = num_kv_heads * block_size * double_head * item
        needed, num_scales = content, NUM_SCALES * (kv_cache.dtype == torch.int8)
        if fields:
            num_fields = len(fields) + num_scales
            of_page = floats_of_page(double_head // 2, block_size, reads_part, False)
            needed += state_bytes(num_kv_heads, block_size, num_fields, of_page)
        spans = zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True)
        assert sum((n - 1) * stride for n, stride in spans) * item < content, (
            "the heads and tokens of a page do not lie together"
        )
        keys, values = kv_cache.split(double_head // 2, dim=3)
        first = int(kv_cache.storage_offset()) * item + content
        state, births, scales = _state(kv_cache, first, fields, num_scales)
        bounds = None
        if fields and reads_part:  # they end the page
            size = num_blocks, num_kv_heads, double_head // 2
            at = (first - content + needed) // 4 - num_kv_heads * size[2]
            bounds = _elements(kv_cache, torch.float32).as_strided(
                size, (page_stride // 4, size[2], 1), at
            )
        key_scales, value_scales = scales or (None, None)
        return cls(
            keys.transpose(2, 3), values, state, births, page_stride, needed, content,
            None, key_scales, value_scales, bounds,
        )  # fmt: skip

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

    @property
    def quantized(self) -> bool:
        """Whether keys and values are int8."""
        return self.key_scales is not None


def _numbered(
    kv_cache: torch.Tensor, page_slots: int, cut: BlockCut, dtype: torch.dtype
) -> torch.Tensor:
    """`[numbers of pages, num_kv_heads, page_slots, 2 * head_size]` of a cache."""
    num_blocks, num_kv_heads, _, double_head = kv_cache.shape
    item = kv_cache.element_size()
    assert cut.block_step * cut.unit == kv_cache.stride(0) * item
    assert not cut.unit % 4, "state is words of 4 bytes"
    last = (num_blocks - 1) * cut.block_step + (cut.per_block - 1) * cut.page_step
    assert last < 2**31, "numbers of pages are int32"
    shape = (last + 1, num_kv_heads, page_slots, double_head)
    strides = cut.unit // dtype.itemsize, page_slots * double_head, double_head, 1
    start = int(kv_cache.storage_offset()) * item // dtype.itemsize
    return _elements(kv_cache, dtype).as_strided(shape, strides, start)


def clear_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Overwrite blocks by zeros, whatever they have been.

    Args:
        kv_cache: See `Pages.view`.
        block_ids: `[n]` int64, on its device, of blocks that nobody reads.
    """
    whole_blocks(kv_cache).index_fill_(0, block_ids, 0)


def copy_blocks(
    kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copy blocks with all that is in them; what is a target may be a source too.

    Args:
        kv_cache: See `Pages.view`.
        sources: `[n]` int64 block ids, on its device.
        targets: The same, each once.
    """
    blocks = whole_blocks(kv_cache)
    blocks.index_copy_(0, targets, blocks[sources])


def whole_blocks(kv_cache: torch.Tensor) -> torch.Tensor:
    """`[num_blocks, n]` int32, what blocks of a cache have with our state."""
    num_blocks, item = len(kv_cache), kv_cache.element_size()
    stride = kv_cache.stride(0) * item // 4
    start = int(kv_cache.storage_offset()) * item // 4
    content = _elements(kv_cache, torch.int32)
    # The last block may end before its padding does.
    longest = min(stride, len(content) - start - (num_blocks - 1) * stride)
    return content.as_strided((num_blocks, longest), (stride, 1), start)


def _state(
    kv_cache: torch.Tensor, first_byte: int, fields: Sequence[str], num_scales: int = 0
) -> tuple[State, torch.Tensor, list[torch.Tensor]]:
    """State, births and scales of all pages.

    The first field, the births, then the other fields: kernels know the first two; and
    the scales, which kernels find behind the births, as they have one field.

    Args:
        kv_cache: See `Pages.view`.
        first_byte: Where those of page 0 begin.
        fields: What the method keeps of a slot.
        num_scales: Of a slot.
    """
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    if not fields:  # of dense pages
        return {}, torch.empty(0, dtype=torch.int32, device=kv_cache.device), []
    shape = (num_blocks, num_kv_heads, block_size)
    page_words = kv_cache.stride(0) * kv_cache.element_size() // 4
    strides, words = (page_words, block_size, 1), num_kv_heads * block_size

    def part(number: int, dtype: torch.dtype) -> torch.Tensor:
        start = first_byte // 4 + number * words
        return _elements(kv_cache, dtype).as_strided(shape, strides, start)

    first, *others = fields
    state = {first: part(0, torch.float32)}
    state |= {name: part(2 + i, torch.float32) for i, name in enumerate(others)}
    behind = 1 + len(fields)
    scales = [part(behind + i, torch.float32) for i in range(num_scales)]
    return state, part(1, torch.int32), scales


def _elements(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of `tensor` as elements of another type."""
    storage = tensor.untyped_storage()
    elements = torch.empty(0, dtype=dtype, device=tensor.device)
    return elements.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
