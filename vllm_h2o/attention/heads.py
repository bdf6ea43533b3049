"""Budgets by KV head: from a model's profile to the slots of each layer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm.utils.math_utils import cdiv

from vllm_h2o.attention.ops import HeadSlots
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.config import AUTO, MEASURE, UNIFORM, H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.lending import PageOf, lend
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile, allocate

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_MEASURED: WeakValueDictionary[int, HeadProfile] = WeakValueDictionary()
"""By the id of the engine's config; its worker holds both."""


@dataclass(frozen=True)
class LayerHeads:
    """One layer's part of the budgets by head.

    Attributes:
        layouts: `[num_kv_heads]` slots of each of this rank's heads.
        pages: `[num_kv_heads][blocks]` where their pages are.
        layer: Index of this layer among the evicting ones.
        members: All evicting layers, vLLM's `Attention` modules, in the order of
            the model.
    """

    layouts: Sequence[SlotLayout]
    pages: Sequence[Sequence[PageOf]]
    layer: int
    members: Sequence[Any]

    def slots(self) -> HeadSlots:
        """With the pages of all layers, which are there once the cache is bound."""
        layers = [member.impl.view(member.kv_cache) for member in self.members]
        return HeadSlots(self.layouts, self.pages, layers, self.layer)


def profile_path(config: H2OConfig, model: str) -> Path | None:
    """The profile's file; None where there is none to be read."""
    if config.head_budgets in (UNIFORM, MEASURE):
        return None
    if config.head_budgets != AUTO:
        return Path(config.head_budgets)
    path = Path(model) / FILE_NAME
    return path if config.may_differ_by_head and path.is_file() else None


def remember(vllm_config: VllmConfig, profile: HeadProfile | None) -> None:
    """Have `profile_of` give what this engine's worker has found, and holds."""
    _MEASURED.pop(id(vllm_config), None)  # Of an engine before this one.
    if profile is not None:
        _MEASURED[id(vllm_config)] = profile


def profile_of(vllm_config: VllmConfig) -> HeadProfile | None:
    """The profile in force in this worker; None: all heads have the same budget."""
    config = h2o_config(vllm_config)
    assert config is not None
    path = profile_path(config, vllm_config.model_config.model)
    return HeadProfile.load(path) if path else _MEASURED.get(id(vllm_config))


def largest_budget(vllm_config: VllmConfig) -> int:
    """Most slots that any KV head gets."""
    config = h2o_config(vllm_config)
    assert config is not None
    block_size = vllm_config.cache_config.block_size
    max_model_len = vllm_config.model_config.max_model_len
    layout = SlotLayout.from_config(config, block_size, max_model_len)
    profile = profile_of(vllm_config)
    if profile is None:
        return layout.budget
    longest = cdiv(max_model_len, block_size)
    blocks = _blocks(profile, config, layout, longest)
    return max(layout.budget, block_size * max(map(max, blocks)))


def split(
    profile: HeadProfile,
    config: H2OConfig,
    layout: SlotLayout,
    max_blocks: int,
    kv_heads: slice,
    members: Sequence[Any],
) -> list[LayerHeads]:
    """Budgets of every evicting layer.

    Args:
        profile: The model's profile.
        config: The policy.
        layout: The slots of a head on average.
        max_blocks: Blocks of the longest sequence.
        kv_heads: This rank's of the model's KV heads.
        members: See `LayerHeads`.

    Returns:
        One entry per evicting layer, in the order of the model.
    """
    size = layout.block_size
    blocks = _blocks(profile, config, layout, max_blocks)
    blocks = [layer[kv_heads] for layer in blocks]
    pages = lend(blocks, layout.budget_blocks)
    return [
        LayerHeads(
            [SlotLayout.of_blocks(config, size, n) for n in blocks[i]],
            pages[i],
            i,
            members,
        )
        for i in range(len(blocks))
    ]


def _blocks(
    profile: HeadProfile, config: H2OConfig, layout: SlotLayout, max_blocks: int
) -> list[list[int]]:
    """`[num_layers][num_kv_heads]` blocks; see `split` for the arguments."""
    longest = max_blocks * layout.block_size
    profile = profile.stretched(longest, layout.budget)
    curves = json.dumps([profile.grid_tokens, profile.errors])
    fewest = SlotLayout.fewest_blocks(config, layout.block_size)
    return _allocated(
        curves, layout.block_size, layout.budget_blocks, max_blocks, fewest
    )


@functools.lru_cache(maxsize=4)
def _allocated(curves: str, *sizes: int) -> list[list[int]]:
    """Once for all that ask at startup: long contexts and many layers take seconds."""
    return allocate(HeadProfile(*json.loads(curves)), *sizes)
