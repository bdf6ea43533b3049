"""The KV cache spec of a layer that H2O compresses.

Block table row of a request (columns):

    [0, dense_columns)                    the prompt, exactly as stock vLLM; all
                                          tokens of a request that stays dense; the
                                          blocks of a chunk in turn, if it is read so
    [dense_columns, + budget_blocks)      the resident blocks, private
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.geometry import BlockCut, ResidentBlock, bytes_of_page
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.reach import Reach
from vllm_h2o.policy.request import RequestLimits

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class H2OAttentionSpec(FullAttentionSpec):
    """Full attention whose requests become resident after their prompt.

    Attributes:
        h2o: The policy.
        max_model_len: Longest sequence in tokens, sizes the dense columns; that which
            vllm finds (`--max-model-len auto`) may be shorter.
        most_page_slots: Slots of a page at most, see `ResidentBlock.of`.
        richest_slots: Slots of the KV head with the largest budget, in any request; 0:
            all heads have the same budget.
        richest_layer_slots: Slots that the heads of one layer have together at most,
            on a rank; 0: likewise.
        slots_per_token: The most slots that the heads of one layer have per token of a
            request's budget, over all budgets; 0: likewise.
        fingerprint: Of all that gives a byte of what requests hold its meaning, where
            it goes to files (`plugin/fingerprint.py`).
    """

    h2o: H2OConfig = field(default_factory=H2OConfig)
    max_model_len: int = 0
    most_page_slots: int = 0
    richest_slots: int = 0
    richest_layer_slots: int = 0
    slots_per_token: float = 0.0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Pages end with the state of their slots. vLLM's own page padding keeps it
        # out of the view that stock kernels get.
        needed = self._resident.num_pages * self._page_bytes
        padded = max(needed, self.unpadded_page_size_bytes, self.page_size_padded or 0)
        object.__setattr__(self, "page_size_padded", padded)

    @classmethod
    def of(
        cls,
        spec: FullAttentionSpec,
        h2o: H2OConfig,
        max_model_len: int,
        most_page_slots: int = 0,
    ) -> Self:
        """Rebuild a full-attention spec as H2O's."""
        return replace_as(
            spec, cls, h2o=h2o, max_model_len=max_model_len,
            most_page_slots=most_page_slots,
        )  # fmt: skip

    @property
    def layout(self) -> SlotLayout:
        """The slots of a request as the scheduler counts them, in resident blocks."""
        return SlotLayout.from_config(self.h2o, self.block_slots, self.max_model_len)

    @property
    def page_layout(self) -> SlotLayout:
        """The same slots as kernels and heads have them, in pages."""
        pages = self.layout.budget // self.page_slots
        return SlotLayout.of_blocks(self.h2o, self.page_slots, pages)

    @property
    def dense_layout(self) -> SlotLayout:
        """The slots of a request that stays dense: a token's is its position."""
        blocks = min(cdiv(self.layout.budget, self.block_size), self.dense_columns)
        slots = blocks * self.block_size
        return SlotLayout(self.block_size, slots - 1, 1, sinks=0, whole_blocks=False)

    @property
    def dense_budget(self) -> int:
        """Its slots, where its pages are not as those of residents are; else 0."""
        return 0 if self.pages_are_blocks else self.dense_layout.budget

    @cached_property
    def _resident(self) -> ResidentBlock:
        return ResidentBlock.of(
            self.h2o, self.block_size, self.head_size, self.dtype.itemsize,
            self.most_page_slots,
        )  # fmt: skip

    @property
    def page_slots(self) -> int:
        """Slots of a page of a resident block."""
        return self._resident.page_slots

    @property
    def block_slots(self) -> int:
        """Slots of a resident block; a block of another request has `block_size`."""
        return self._resident.slots

    @property
    def _page_bytes(self) -> int:
        return self.num_kv_heads * bytes_of_page(
            self.h2o, self.head_size, self.dtype.itemsize, self.page_slots
        )

    @cached_property
    def cut(self) -> BlockCut:
        """Where the pages of resident blocks are."""
        pages = self._resident.num_pages
        return BlockCut.of(self.page_size_bytes, self._page_bytes, pages)

    @property
    def pages_are_blocks(self) -> bool:
        """Whether the pages of resident blocks are as vLLM's attention has blocks."""
        return self.cut.per_block == 1 and not self.h2o.quantizes

    def limits(self, device: str) -> RequestLimits:
        """What requests may ask for, on a device of the kind that torch calls so."""
        return RequestLimits.of(self.h2o, self.layout, device, self.max_model_len)

    @cached_property
    def reach(self) -> Reach | None:
        """How far back keys may be; None: they stay where they are in the text."""
        return Reach.of_config(self.h2o, self.layout.budget, self.block_size)

    @property
    def largest_budget(self) -> int:
        """Slots of the KV head with the largest budget."""
        return max(self.layout.budget, self.richest_slots)

    @property
    def longest_head(self) -> int:
        """Slots of a KV head that holds all of the longest request, in whole pages."""
        size = self.page_slots
        return max(cdiv(self.max_model_len, size) * size, self.layout.budget)

    @property
    def most_slots(self) -> int:
        """Slots that a request's heads of one layer have together at most."""
        return max(self.num_kv_heads * self.layout.budget, self.richest_layer_slots)

    @property
    def most_slots_per_token(self) -> float:
        """Of a layer's heads together, for a token of any request's budget."""
        return max(self.num_kv_heads, self.slots_per_token)

    @property
    def dense_columns(self) -> int:
        """Block table columns that are the prompt's."""
        return cdiv(self.max_model_len, self.block_size)

    def resident_pages(self, table: torch.Tensor, num_slots: int) -> torch.Tensor:
        """The pages of so many slots in the resident blocks of rows.

        Args:
            table: `[.., columns]` int32, of the block table.
            num_slots: Of a head on average.
        """
        first = self.dense_columns
        blocks = table[..., first : first + cdiv(num_slots, self.block_slots)]
        return self.cut.pages(blocks)[..., : cdiv(num_slots, self.page_slots)]

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Columns of the worker's block table."""
        return self.dense_columns + self.layout.budget_blocks

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest request, in the step of its transition if it has one.

        vLLM asks at several lengths to find one that fits (`--max-model-len auto`).
        """
        longest = vllm_config.model_config.max_model_len
        limits = self.limits(vllm_config.device_config.device_type)
        budget = limits.climb(None, longest, longest).budget
        blocks = self.blocks_while_reading(longest, budget, self.h2o.prefill_chunk)
        return blocks * self.page_size_bytes

    def blocks_while_reading(self, num_tokens: int, budget: int, chunk: int) -> int:
        """Most blocks of a request while it reads its prompt, its transition included.

        Args:
            num_tokens: Of the prompt.
            budget: Slots of a KV head on average.
            chunk: Tokens that it asks to read at once; 0: all.
        """
        held = self.h2o.slots_per_token
        at_once = chunk_tokens(chunk, budget, self.block_size, held) or num_tokens
        # One that goes on from what was kept may begin within a block.
        at_once += (self.block_size - 1) * self.h2o.keeps
        dense = cdiv(min(num_tokens, at_once), self.block_size)
        return dense + (budget // self.block_slots if num_tokens > budget else 0)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge the specs of the layers of one group.

        Raises:
            AssertionError: A layer has another spec; vLLM then groups by type.
        """
        # FullAttentionSpec.merge would rebuild only its own fields, and with a
        # plain spec first would silently turn eviction off.
        assert all(type(spec) is cls for spec in specs), (
            "layers with and without H2O can not share a KV cache group"
        )
        merged = specs[0]
        for spec in specs[1:]:
            for f in fields(AttentionSpec):
                if not f.compare:
                    continue
                assert getattr(spec, f.name) == getattr(merged, f.name), (
                    "All attention layers in the same KV cache group must have "
                    "the same attention spec."
                )
            assert spec == merged
        return merged


def with_equal_pages(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Lengthen blocks until keys and values fill as much of a page in every layer.

    All layers' pages are equally large. Where one kind's are a multiple of another's,
    vLLM lengthens the latter's blocks; with the state of slots ours never are, and the
    shorter ones would be half empty (Gemma 4). Layers that H2O compresses are alike, or
    vLLM puts them into a spec of its own, which is refused.
    """
    if len({x for x in specs.values() if isinstance(x, H2OAttentionSpec)}) != 1:
        return specs
    sizes = {
        name: spec.unpadded_page_size_bytes
        for name, spec in specs.items()
        if isinstance(spec, AttentionSpec)
    }
    largest, equal = max(sizes.values()), dict(specs)
    for name, size in sizes.items():
        if largest % size == 0 and largest > size:
            block_size = largest // size * specs[name].block_size
            equal[name] = replace(specs[name], block_size=block_size)
    return equal


def register() -> None:
    """Tell vLLM which manager serves this spec; idempotent.

    Workers send specs to the engine core by pickle, so importing this module is
    what every process that meets the spec does.
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_h2o.core.manager import H2OManager

    # Registering into an empty registry would hide the built-in specs in this
    # process: vLLM fills it only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        H2OAttentionSpec, H2OManager, uniform_type_base_spec=FullAttentionSpec
    )


register()
