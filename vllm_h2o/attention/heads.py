"""Budgets by KV head: from a model's profile to the slots of each layer."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm.utils.math_utils import cdiv

from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.config import AUTO, MEASURE, REQUEST, UNIFORM, H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile, allocate

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_MEASURED: WeakValueDictionary[int, HeadProfile] = WeakValueDictionary()
"""By the id of the engine's config; its worker holds both."""


def profile_path(config: H2OConfig, model: str) -> Path | None:
    """The profile's file; None where there is none to be read."""
    if config.head_budgets in (UNIFORM, MEASURE, REQUEST):
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


def budgets(
    vllm_config: VllmConfig, max_model_len: int | None = None
) -> tuple[int, int]:
    """Slots of a KV head: on average, and of the richest.

    Args:
        vllm_config: The engine's.
        max_model_len: That the KV cache's specs have, which stays where vLLM shortens
            its own to fit the memory (`--max-model-len auto`); None: vLLM's.
    """
    layout, blocks = _split(vllm_config, max_model_len)
    richest = max(map(max, blocks), default=0)
    return layout.budget, max(layout.budget, layout.block_size * richest)


def most_slots(
    vllm_config: VllmConfig, num_kv_heads: int, max_model_len: int | None = None
) -> int:
    """Slots that a request's heads of one layer have together at most, on a rank.

    Args:
        vllm_config: The engine's.
        num_kv_heads: Of the rank; which of the model's they are does not matter.
        max_model_len: See `budgets`.
    """
    layout, blocks = _split(vllm_config, max_model_len)
    richest = [sum(sorted(layer)[-num_kv_heads:]) for layer in blocks]
    return max(
        num_kv_heads * layout.budget, layout.block_size * max(richest, default=0)
    )


def _split(
    vllm_config: VllmConfig, max_model_len: int | None
) -> tuple[SlotLayout, list[list[int]]]:
    """The slots of a head on average, and the blocks of each KV head of each layer.

    No blocks: all heads have the same budget.
    """
    config = h2o_config(vllm_config)
    assert config is not None
    block_size = vllm_config.cache_config.block_size
    max_model_len = max_model_len or vllm_config.model_config.max_model_len
    layout = SlotLayout.from_config(config, block_size, max_model_len)
    profile = profile_of(vllm_config)
    if profile is None:
        return layout, []
    longest = cdiv(max_model_len, block_size)
    return layout, _blocks(profile, config, layout, longest, longest)


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
