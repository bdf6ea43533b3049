"""Where requests have their slots: the tables of all KV cache groups of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.placements import (
    BY_HEAD,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.calibration.head_profiles import check_profile
from vllm_h2o.calibration.ranks import own_kv_heads
from vllm_h2o.calibration.resolve import Resolved
from vllm_h2o.policy.ladder import lengths_of
from vllm_h2o.policy.options import REQUEST
from vllm_h2o.policy.placement import Placement

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_h2o.policy.request import RequestLimits

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

    def make(self, builder: H2OMetadataBuilder) -> tuple[list[Any], RowPlacements]:
        """Make the table of a KV cache group, and give its layers theirs.

        Args:
            builder: The group's.

        Returns:
            vLLM's `Attention` modules of the group in order, and where their rows have
            their slots.
        """
        spec, layout = builder.spec, builder.layout
        names = sorted(builder.layer_names, key=extract_layer_index)
        modules = self._vllm_config.compilation_config.static_forward_context
        layers = [modules[name] for name in names]
        by_head, limits = self._has_head_budgets(builder), self._resolved.limits(spec)
        if not by_head and not limits.has_several:
            return layers, RowPlacements()
        requests = self._vllm_config.scheduler_config.max_num_seqs
        pages = [layer.impl.view_resident(layer.kv_cache, spec) for layer in layers]
        split, own_places, most = None, 0, [layout.budget_blocks] * len(pages)
        # Budgets of the ladder alone are all known, and made now.
        budgets, are_known = limits.ladder.budgets, limits.are_known
        end, classes = 2 * len(budgets), 1
        if limits.rounds:  # whoever asks for one has it from its beginning
            end *= 2
        if by_head and spec.h2o.head_budgets == REQUEST:
            own_places = requests
            most = [spec.longest_head // spec.page_slots] * len(pages)
        elif by_head:
            split = self._head_budgets(builder, limits).placement
            classes = limits.ladder.num_classes
            engines = split(spec.layout.budget_blocks)
            most = [max(map(len, heads)) for heads in engines.pages]
            if not are_known or classes > 1:  # other lengths are split otherwise
                most = [spec.largest_budget // spec.page_slots] * len(pages)
        has_several = limits.has_several or classes > 1
        if has_several and not are_known:
            any_number = len(lengths_of(spec.block_slots, spec.max_model_len))
            end = BudgetPlacements.indices(spec.layout, any_number, requests)
        elif classes > 1:
            end = 2 * classes
        table = PlacementTable(pages, layout, most, end + own_places)
        if split:
            table.put(BY_HEAD, engines)
        by_request = None
        if own_places:
            shape = len(pages), spec.num_kv_heads
            alike = [layout.budget_blocks]
            # For who warms up what heads do that part; no request has it.
            table.put(BY_HEAD, Placement.alike(shape, alike, spec.h2o, spec.page_slots))
            by_request = RequestPlacements(table, spec.h2o, layout, end)
        for layer, part in zip(layers, table.parts(), strict=True):
            layer.impl.placements = part
        if not has_several:
            return layers, RowPlacements(by_head, None, by_request)
        by_budget = BudgetPlacements(table, spec.h2o, limits.ladder, end, split)
        if are_known:
            by_budget.make_all(classes, limits.rounds)
        return layers, RowPlacements(by_head, by_budget, by_request)

    def _has_head_budgets(self, builder: H2OMetadataBuilder) -> bool:
        """Whether the heads of a KV cache group have budgets of their own."""
        config, resolved = builder.spec.h2o, self._resolved
        if not resolved.by_head and config.head_budgets != REQUEST:
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

    def _head_budgets(
        self, builder: H2OMetadataBuilder, limits: RequestLimits
    ) -> HeadBudgets:
        """What splits budgets over the heads of this rank, by the profile in force."""
        resolved, spec = self._resolved, builder.spec
        assert resolved.profile is not None
        check_profile(
            resolved.profile, resolved.source, self._vllm_config, self._evicting
        )
        own = own_kv_heads(self._vllm_config, spec.num_kv_heads)
        ladder = limits.ladder
        budgets = HeadBudgets(
            resolved.profile, spec.h2o, ladder, spec.page_slots, own, limits.rounds
        )
        split = budgets.split(ladder.budgets[-1])
        slots = [spec.page_slots * count for layer in split for count in layer]
        logger.info_once(
            "H2O budgets by KV head, from %s: %d to %d tokens, %d on average",
            resolved.source, min(slots), max(slots), sum(slots) // len(slots),
        )  # fmt: skip
        return budgets
