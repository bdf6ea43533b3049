"""Budgets by KV head: from a model's profile to the slots of each layer."""

from __future__ import annotations

import functools
import json

from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.profile import HeadProfile, allocate


def richest_slots(
    profile: HeadProfile, config: H2OConfig, layout: SlotLayout, spec: H2OAttentionSpec
) -> tuple[int, int]:
    """Slots of the richest KV head, and of the heads of the richest layer of a rank.

    Args:
        profile: The model's profile.
        config: The policy.
        layout: The slots of a head on average.
        spec: Of the layers that evict. Which of the model's KV heads a rank has does
            not matter: the result is the same on all ranks.
    """
    longest = spec.dense_columns
    blocks = _blocks(profile, config, layout, longest, longest)
    own = [sum(sorted(layer)[-spec.num_kv_heads :]) for layer in blocks]
    size = layout.block_size
    return size * max(map(max, blocks)), size * max(own)


def placement_of(
    profile: HeadProfile,
    config: H2OConfig,
    layout: SlotLayout,
    max_blocks: int,
    most_blocks: int,
    kv_heads: slice,
) -> Placement:
    """How requests split their slots over the layers that evict.

    Args:
        profile: The model's profile.
        config: The policy.
        layout: The slots of a head on average.
        max_blocks: Blocks of the longest sequence.
        most_blocks: No head gets more.
        kv_heads: This rank's of the model's KV heads.
    """
    blocks = _blocks(profile, config, layout, max_blocks, most_blocks)
    own = [layer[kv_heads] for layer in blocks]
    return Placement.of_blocks(own, layout.budget_blocks, config, layout.block_size)


def _blocks(
    profile: HeadProfile,
    config: H2OConfig,
    layout: SlotLayout,
    max_blocks: int,
    most_blocks: int,
) -> list[list[int]]:
    """`[num_layers][num_kv_heads]` blocks; see `placement_of` for the arguments."""
    longest = max_blocks * layout.block_size
    profile = profile.stretched(longest, layout.budget)
    curves = json.dumps([profile.grid_tokens, profile.errors])
    fewest = SlotLayout.fewest_blocks(config, layout.block_size)
    return _allocated(
        curves, layout.block_size, layout.budget_blocks, most_blocks, fewest
    )


@functools.lru_cache(maxsize=4)
def _allocated(curves: str, *sizes: int) -> list[list[int]]:
    """Once for all that ask at startup: long contexts and many layers take seconds."""
    return allocate(HeadProfile(*json.loads(curves)), *sizes)
