"""Worker methods that tests call by RPC (`worker_extension_cls`)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.upkeep import Upkeep
from vllm_h2o.attention.watch import HeldSlots, Watch
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.core.settings import parse_settings
from vllm_h2o.policy.layout import first_observer


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
            assert spec.page_layout.budget == builder.layout.budget
            builder.spec, builder.layout = spec, spec.page_layout
            alike = alike and not builder.placements.by_head
            layers = builder.upkeep._layers
            builder.upkeep = Upkeep(spec, layers, builder.placements)
        for layer in self._layers().values():
            if alike:  # requests' own budgets are of the policy that was
                layer.impl.placements = None
            layer.impl.h2o = config
            layer.impl._bound_to = ()
        self._scoring = config
        if not hasattr(self, "_begin"):
            self._begin, self._step.begin = self._step.begin, self._begin_step

    def _begin_step(self, plan: ResidencyPlan, gone: Sequence[str]) -> None:
        """The scheduler has its own policy: who scores here follows the worker's."""
        for i, row in enumerate(plan.rows.values()):
            if not row.stays_dense:
                first_query = first_observer(self._scoring, row.chunk_end)
                plan.first_queries[i] = first_query
        self._begin(plan, gone)

    def probe_watch(self) -> None:
        """Remember every request's resident blocks from now on."""
        if hasattr(self, "_watch"):
            self._watch.stop()
        self._watch = Watch(self._step, self._layers)

    def probe_poison(self) -> None:
        """Fill all blocks but the null block with NaN, as residents may leave them."""
        for layer in self._layers().values():
            cache, item = layer.kv_cache, layer.kv_cache.element_size()
            start = int(cache.storage_offset()) + cache.stride(0)
            torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())[
                start * item :
            ].fill_(255)

    def probe_survivors(self) -> dict[str, list[list[list[int]]]]:
        """Sorted positions by layer and KV head, of every watched request.

        Valid while the blocks of a finished request have not been reused.
        """
        return self._by_head(lambda held: sorted(held.positions().tolist()))

    def probe_values(self, of: str = "values") -> dict[str, list[list[torch.Tensor]]]:
        """Their values, or `keys`, `[survivors, head_size]` by position."""

        by_slot = {"keys": lambda x: x.keys.mT, "values": lambda x: x.values}

        def values(held: HeldSlots) -> torch.Tensor:
            order = held.positions().argsort()
            return held.gather(by_slot[of])[order]

        return self._by_head(values)

    def _by_head(self, look: Callable[[HeldSlots], Any]) -> dict[str, Any]:
        found = {}
        for request_id in self._watch.requests:
            layers: list[list[Any]] = [[] for _ in self._layers()]
            for held in self._watch.held(request_id):
                layers[held.layer].append(look(held))
            found[request_id] = layers
        return found

    def probe_checksums(self, block_ids: list[int]) -> list[str]:
        """A digest of each block over all layers, keys to births."""
        digests = []
        for block in block_ids:
            digest = hashlib.sha256()
            for layer in self._layers().values():
                pages = layer.impl.pages
                state = pages.state.values()
                for part in (pages.keys, pages.values, pages.births, *state):
                    digest.update(part[block].contiguous().view(torch.uint8).numpy())
            digests.append(digest.hexdigest())
        return digests


def _layer_index(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])
