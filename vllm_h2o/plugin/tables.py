"""Where requests have their slots: the tables of all KV cache groups of an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.attention.heads import placement_of
from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.placements import (
    BY_HEAD,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.transition import Transitions
from vllm_h2o.calibration.head_profiles import check_profile
from vllm_h2o.calibration.resolve import Resolved, own_kv_heads
from vllm_h2o.policy.config import REQUEST
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.request import RequestLimits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class Tables:
    """Makes the tables of an engine's KV cache groups."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        resolved: Resolved,
        builders: Sequence[H2OMetadataBuilder],
    ) -> None:
        """Prepare for the groups that H2O compresses.

        Args:
            vllm_config: The engine's.
            resolved: What its start has decided.
            builders: Of these groups.
        """
        self._vllm_config, self._resolved = vllm_config, resolved
        self._evicting = sum(len(builder.layer_names) for builder in builders)

    def make(
        self, builder: H2OMetadataBuilder, transitions: Transitions
    ) -> tuple[Sequence[Any], BudgetPlacements | None]:
        """Make the table of a KV cache group, and give its layers theirs.

        Args:
            builder: The group's.
            transitions: The engine's; get the placements of requests that share out
                their budgets each in its own way.

        Returns:
            The layers whose heads have budgets of their own, and the placements of
            requests with budgets of their own, if there can be any.
        """
        spec, layout = builder.spec, builder.layout
        names = sorted(builder.layer_names, key=extract_layer_index)
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [modules[name] for name in names]
        by_head = self._has_head_budgets(builder)
        device = builder.device.type
        several = not RequestLimits.of(spec.h2o, layout, device).why_one_budget
        if not by_head and not several:
            return (), None
        requests = self._vllm_config.scheduler_config.max_num_seqs
        end = BudgetPlacements.indices(layout, requests) if several else BY_HEAD
        pages = [layer.impl.view(layer.kv_cache) for layer in layers]
        split = None
        if not by_head:
            most = [layout.budget_blocks] * len(pages)
            table = PlacementTable(pages, layout, most, end)
        elif spec.h2o.head_budgets == REQUEST:
            most = [spec.dense_columns] * len(pages)
            table = PlacementTable(pages, layout, most, end + requests)
            transitions.by_request = RequestPlacements(table, spec.h2o, layout, end)
        else:
            split = self._split_by_profile(builder)
            table = PlacementTable.of(pages, layout, split(layout))
            if several:
                most = [spec.largest_budget // spec.block_size] * len(pages)
                table = PlacementTable(pages, layout, most, end)
                table.put(BY_HEAD, split(layout))
        for layer, part in zip(layers, table.parts(), strict=True):
            layer.impl.placements = part
        by_budget = BudgetPlacements(table, spec.h2o, layout, end, split)
        return layers if by_head else (), by_budget if several else None

    def _has_head_budgets(self, builder: H2OMetadataBuilder) -> bool:
        """Whether the heads of a KV cache group have budgets of their own."""
        config, resolved = builder.spec.h2o, self._resolved
        if resolved.profile is None and config.head_budgets != REQUEST:
            return False
        if len(builder.layer_names) == self._evicting:
            return True
        several = (
            f"{resolved.source} has budgets for {self._evicting} layers together, "
            "which vLLM has put into several KV cache groups, because the model has "
            "fewer windowed layers"
        )
        if resolved.file is None and config.head_budgets != REQUEST:
            logger.warning_once("H2O gives all KV heads the same budget: %s", several)
            return False
        raise ValueError(
            f"h2o_head_budgets (--h2o-head-budgets): {several}: use 'uniform'"
        )

    def _split_by_profile(
        self, builder: H2OMetadataBuilder
    ) -> Callable[[SlotLayout], Placement]:
        """What splits a budget over the heads of this rank, by the profile in force."""
        resolved, spec = self._resolved, builder.spec
        assert resolved.profile is not None
        check_profile(
            resolved.profile, resolved.source, self._vllm_config, self._evicting
        )
        split = functools.partial(
            placement_of,
            resolved.profile,
            spec.h2o,
            max_blocks=spec.dense_columns,
            most_blocks=spec.largest_budget // spec.block_size,
            kv_heads=own_kv_heads(self._vllm_config, spec.num_kv_heads),
        )
        slots = split(builder.layout).budgets
        logger.info_once(
            "H2O budgets by KV head, from %s: %d to %d tokens, %d on average",
            resolved.source, min(slots), max(slots), sum(slots) // len(slots),
        )  # fmt: skip
        return split
