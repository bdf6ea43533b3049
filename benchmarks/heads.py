"""Budgets by head without a profile: the kernel benchmarks say who gets what."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import LayerPlacements, PlacementTable
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import Placement


def placements_of(
    layers: Sequence[Pages],
    blocks: list[list[int]],
    budget_blocks: int,
    config: H2OConfig,
) -> list[LayerPlacements]:
    """Of every layer, where its heads get `blocks[layer][head]`."""
    size = layers[0].block_size
    layout = SlotLayout.of_blocks(config, size, budget_blocks)
    placement = Placement.of_blocks(blocks, budget_blocks, config, size)
    return PlacementTable.of(layers, layout, placement).parts()
