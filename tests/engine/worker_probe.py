"""Worker methods that tests call by RPC (`worker_extension_cls`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import ALIKE
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.settings import parse_settings
from vllm_h2o.policy.layout import first_observer
from vllm_h2o.policy.placement import Placement


class WorkerProbe:
    """Looks into a worker; nothing of it exists in a real engine."""

    def _builders(self) -> list[H2OMetadataBuilder]:
        return [builder for _, builder in self._h2o_builders()]

    def _layers(self) -> dict[str, Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        names = {name for builder in self._builders() for name in builder.layer_names}
        return {name: context[name] for name in sorted(names, key=_layer_index)}

    def probe_h2o_layers(self) -> list[str]:
        return list(self._layers())

    def probe_layout(self) -> str:
        """How vLLM lays out the cache of the compressed layers, on CPU."""
        (isa,) = {builder.isa for builder in self._builders()}
        return isa

    def probe_set_policy(self, settings: str) -> None:
        """Change the policy of a running engine, but not its slots' counts.

        What the block manager counts stays as it is: for engines without
        prefix caching that is the budget alone.
        """
        config = parse_settings(json.loads(settings))
        alike = True
        for builder in self._builders():
            spec = dataclasses.replace(builder.spec, h2o=config)
            assert spec.layout.budget == builder.layout.budget
            builder.spec, builder.layout = spec, spec.layout
            alike = alike and not builder.parting
        for layer in self._layers().values():
            if alike:  # requests' own budgets are of the policy that was
                layer.impl.placements = None
            layer.impl.h2o = config
            layer.impl._bound = ()
        self._scoring = config
        if not hasattr(self, "_begin"):
            self._begin, self._step.begin = self._step.begin, self._begin_step

    def _begin_step(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """The scheduler has its own policy: who scores here follows the worker's."""
        for i, row in enumerate(plan.rows.values()):
            if not row.is_kept_whole:
                first_query = first_observer(self._scoring, row.prefill_end)
                plan.first_queries[i] = first_query
        self._begin(plan, gone)

    def probe_watch(self) -> None:
        """Remember every request's resident blocks from now on."""
        self._rows: dict[str, tuple[torch.Tensor, int, int]] = {}
        self._own: dict[str, Placement] = {}
        for builder in self._builders():
            if not hasattr(builder, "watched"):
                builder.watched = True
                builder.build = self._watching(builder, builder.build)

    def _watching(self, builder: H2OMetadataBuilder, build: Any) -> Any:
        def watched(common_prefix_len: int, common: Any, fast_build: bool = False):
            rows = builder.step.rows(common.num_reqs)
            for i, request_id in enumerate(rows.request_ids):
                row, first = rows.row(i), builder.spec.dense_columns
                if row.is_kept_whole:
                    continue
                if row.decodes or row.is_transition:
                    end = row.num_computed_tokens + row.num_scheduled_tokens
                    blocks = common.block_table_tensor[
                        i, first : first + builder.layout.budget_blocks
                    ]
                    self._rows[request_id] = blocks.clone().long(), end, row.budget
                    self._note_placement(builder, request_id, row.budget)
            return build(common_prefix_len, common, fast_build)

        return watched

    def _note_placement(
        self, builder: H2OMetadataBuilder, request_id: str, budget: int
    ) -> None:
        """That which it has once it fills its budget, if there are any."""
        own, part = self._step.own, next(iter(self._layers().values())).impl.placements
        if own is not None:
            if own.has(request_id):
                self._own[request_id] = own.table.placement(own.index(request_id))
        elif (index := builder._index_of(request_id, budget, True)) != ALIKE:
            self._own[request_id] = part.table.placement(index)

    def probe_survivors(self) -> dict[str, list[list[list[int]]]]:
        """Sorted positions by layer and KV head, of every watched request.

        Valid while the blocks of a finished request have not been reused.
        """
        return self._by_head(
            lambda slots: sorted(int(pages.births[at]) for pages, at in slots)
        )

    def probe_values(self) -> dict[str, list[list[torch.Tensor]]]:
        """Their values, `[survivors, head_size]` by position."""

        def values(slots: list[_Slot]) -> torch.Tensor:
            in_order = sorted(slots, key=lambda slot: slot[0].births[slot[1]])
            return torch.stack([pages.values[at] for pages, at in in_order])

        return self._by_head(values)

    def _by_head(self, look: Callable[[list[_Slot]], Any]) -> dict[str, Any]:
        self._step.settle()  # what the next step would begin with
        return {
            name: [
                [
                    look(
                        _held(
                            layer.impl, blocks, end, head, budget, self._own.get(name)
                        )
                    )
                    for head in range(layer.impl._pages.keys.shape[1])
                ]
                for layer in self._layers().values()
            ]
            for name, (blocks, end, budget) in self._rows.items()
        }

    def probe_checksums(self, block_ids: list[int]) -> list[str]:
        """A digest of each block over all layers, keys to births."""
        digests = []
        for block in block_ids:
            digest = hashlib.sha256()
            for layer in self._layers().values():
                pages = layer.impl._pages
                state = pages.state.values()
                for part in (pages.keys, pages.values, pages.births, *state):
                    digest.update(part[block].contiguous().view(torch.uint8).numpy())
            digests.append(digest.hexdigest())
        return digests


_Slot = tuple[Pages, tuple[int, int, int]]
"""The pages it is in, and there its block, head and offset."""


def _held(
    impl: Any,
    blocks: torch.Tensor,
    end: int,
    head: int,
    budget: int,
    own: Placement | None,
) -> list[_Slot]:
    """Where a KV head holds tokens of a request of `end` tokens and such a budget."""
    layout, pages, part = impl._params.layout, impl._pages, impl.placements
    places = [(pages, int(block)) for block in blocks]
    if own is not None and end > budget:
        layout = own.layouts[part.layer][head]
        pages_of_head = own.pages[part.layer][head]
        places = [(part.layers[p.layer], blocks[p.column]) for p in pages_of_head]
    size, last = layout.block_size, layout.slot(end - 1)
    slots = range(min(end, layout.budget))
    if layout.whole_blocks and end > layout.budget:
        slots = [s for s in slots if s // size != last // size or s <= last]
    return [
        (places[s // size][0], (int(places[s // size][1]), head, s % size))
        for s in slots
    ]


def _layer_index(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])
