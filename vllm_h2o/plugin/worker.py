"""The worker of every platform: give layers the backend, builders each step's plan.

It must not import what belongs to a platform: vLLM's CPU worker, say, turns torch's
CUDA interface off for the whole process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_h2o.attention.backend import H2OImpl
from vllm_h2o.attention.heads import placement_of
from vllm_h2o.attention.metadata import H2OMetadataBuilder, StepRows
from vllm_h2o.attention.placements import (
    BY_HEAD,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.watch import Losses, Recorder, Watch
from vllm_h2o.calibration.head_profiles import check_profile
from vllm_h2o.calibration.measure import LoadedModel, measure, texts_to_read
from vllm_h2o.calibration.resolve import Resolved, gates_of, own_kv_heads, resolve
from vllm_h2o.core.compat import settle_block_size
from vllm_h2o.core.metrics import attach_seconds
from vllm_h2o.core.plan import PLAN_ATTRIBUTE, ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.plugin.runner import attention_groups, follow
from vllm_h2o.plugin.validate import (
    check_kernel_block_size,
    check_kv_cache_config,
    check_vllm_config,
)
from vllm_h2o.policy.config import REQUEST
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.placement import Placement
from vllm_h2o.policy.profile import HeadProfile
from vllm_h2o.policy.request import RequestLimits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(f"vllm.{__name__}")

_Stock: Any = object
"""The stock worker, which comes next among the bases of a platform's class."""


class H2OWorker(_Stock):
    """What the workers of all platforms share."""

    overridden: AttentionBackendEnum
    """The name that H2O's backend has while layers are made."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # Again here: --worker-cls may be given without our engine arguments.
        settle_block_size(vllm_config)
        check_vllm_config(vllm_config)
        self._plan = ResidencyPlan(stats=H2OStats().as_dict())
        self._step = StepRows()
        self._resolved: Resolved | None = None
        self._warming_up = False
        self._recorder: Recorder | None = None
        self._backend = self.choose_backend(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    @staticmethod
    def choose_backend(vllm_config: VllmConfig) -> str:
        """Path of the class that layers take; what it needs is made ready."""
        raise NotImplementedError

    def init_device(self) -> None:
        """Make the model runner, and connect the steps to it."""
        super().init_device()
        follow(self.model_runner, self._step, self._is_v2)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model: its layers take H2O's backend, another engine's do not.

        vLLM remembers by process which backend it gave, and engines may share one.
        """
        register_backend(self.overridden, self._backend)
        _cached_get_attn_backend.cache_clear()
        try:
            super().load_model(*args, **kwargs)
        finally:
            self.overridden.clear_override()
            _cached_get_attn_backend.cache_clear()
        # As vLLM does next: budgets are whole blocks.
        current_platform.update_block_size_for_backend(self.vllm_config)
        self._resolve()

    @property
    def _is_v2(self) -> bool:
        return self.vllm_config.use_v2_model_runner

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The specs of the layers, with what the start has decided."""
        assert self._resolved is not None, "the model is not loaded"
        return {
            name: self._resolved.spec_of(spec) for name, spec in self._specs().items()
        }

    def _specs(self) -> dict[str, KVCacheSpec]:
        """The specs as the backend makes them, by the options."""
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def shutdown(self) -> None:
        """Let go of the KV cache, also where what a step has left points into it."""
        self._step.clear()
        super().shutdown()

    def _loaded_model(self) -> LoadedModel:
        evicting = {
            name: self._h2o_layers[name]
            for name, spec in self._specs().items()
            if type(spec) is H2OAttentionSpec
        }
        return LoadedModel(self.vllm_config, self.model_runner, evicting)

    def _resolve(self) -> None:
        """Decide what the options leave open, and tell the layers.

        The model is loaded, and nothing has been allocated or scheduled.
        """
        model = self._loaded_model()
        self._resolved = resolve(model)
        gates = gates_of(model, self._resolved)
        for name, layer in model.layers.items():
            layer.impl.resolve(self._resolved.config, gates.get(name))

    def h2o_profile(self) -> HeadProfile | None:
        """The head profile in force; called by RPC."""
        assert self._resolved is not None
        return self._resolved.profile

    def h2o_measure(self, texts: list[list[int]] | None, length: int) -> dict[str, Any]:
        """Measure the heads; called by RPC, by `vllm_h2o.calibrate`.

        Args:
            texts: Token ids, all of one length; None: the package's texts.
            length: Of those, in tokens.

        Returns:
            The fields of a `HeadProfile`, on all ranks the same.
        """
        kind = "tokens"
        if texts is None:
            texts, kind = texts_to_read(self.vllm_config.model_config, length)
        return asdict(measure(self._loaded_model(), texts, kind))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, then connect the builders to the steps."""
        check_kv_cache_config(self.vllm_config, kv_cache_config)
        for layer in self._h2o_layers.values():
            if (impl := _impl(layer)) is not None:
                impl.unbind()
        # As CUDA's worker does: builders size their scratch by it.
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        super().initialize_from_config(kv_cache_config)
        for managed, builder in self._h2o_builders():
            check_kernel_block_size(managed, builder.spec)
            builder.bind(self._step, *self._make_tables(builder))

    @property
    def _h2o_layers(self) -> dict[str, Any]:
        """vLLM's attention modules by name."""
        return self.vllm_config.compilation_config.static_forward_context

    def _h2o_builders(self) -> Iterator[tuple[KVCacheSpec, H2OMetadataBuilder]]:
        """Those of the KV cache groups that H2O compresses, and the groups' specs."""
        for group in attention_groups(self.model_runner, self._is_v2):
            for builder in group.metadata_builders:
                if isinstance(builder, H2OMetadataBuilder) and builder.compresses:
                    yield group.kv_cache_spec, builder

    def _make_tables(
        self, builder: H2OMetadataBuilder
    ) -> tuple[Sequence[Any], BudgetPlacements | None]:
        """Make the tables of where requests of a KV cache group have their slots.

        Returns:
            The layers whose heads have budgets of their own, and the placements of
            requests with budgets of their own, if there can be any.
        """
        spec, layout = builder.spec, builder.layout
        names = sorted(builder.layer_names, key=extract_layer_index)
        layers = [self._h2o_layers[name] for name in names]
        by_head = self._has_head_budgets(builder)
        device = self.model_runner.device.type
        several = not RequestLimits.of(spec.h2o, layout, device).why_one_budget
        if not by_head and not several:
            return (), None
        requests = self.vllm_config.scheduler_config.max_num_seqs
        end = BudgetPlacements.indices(layout, requests) if several else BY_HEAD
        pages = [layer.impl.view(layer.kv_cache) for layer in layers]
        split = None
        if not by_head:
            most = [layout.budget_blocks] * len(pages)
            table = PlacementTable(pages, layout, most, end)
        elif spec.h2o.head_budgets == REQUEST:
            most = [spec.dense_columns] * len(pages)
            table = PlacementTable(pages, layout, most, end + requests)
            self._step.by_request = RequestPlacements(table, spec.h2o, layout, end)
        else:
            split = self._split_by_profile(builder)
            table = PlacementTable.of(pages, layout, split(layout))
            if several:
                most = [spec.richest_blocks] * len(pages)
                table = PlacementTable(pages, layout, most, end)
                table.put(BY_HEAD, split(layout))
        for layer, part in zip(layers, table.parts(), strict=True):
            layer.impl.placements = part
        by_budget = BudgetPlacements(table, spec.h2o, layout, end, split)
        return layers if by_head else (), by_budget if several else None

    def _has_head_budgets(self, builder: H2OMetadataBuilder) -> bool:
        """Whether the heads of a KV cache group have budgets of their own."""
        config, resolved = builder.spec.h2o, self._resolved
        assert resolved is not None
        if resolved.profile is None and config.head_budgets != REQUEST:
            return False
        evicting = sum(len(other.layer_names) for _, other in self._h2o_builders())
        if len(builder.layer_names) == evicting:
            return True
        several = (
            f"{resolved.source} has budgets for {evicting} layers together, which vLLM "
            "has put into several KV cache groups, because the model has fewer "
            "windowed layers"
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
        assert resolved is not None and resolved.profile is not None
        layers = len(builder.layer_names)
        check_profile(resolved.profile, resolved.source, self.vllm_config, layers)
        split = functools.partial(
            placement_of,
            resolved.profile,
            spec.h2o,
            max_blocks=spec.dense_columns,
            most_blocks=spec.richest_blocks,
            kv_heads=own_kv_heads(self.vllm_config, spec.num_kv_heads),
        )
        slots = split(builder.layout).budgets
        logger.info_once(
            "H2O budgets by KV head, from %s: %d to %d tokens, %d on average",
            resolved.source, min(slots), max(slots), sum(slots) // len(slots),
        )  # fmt: skip
        return split

    def compile_or_warm_up_model(self) -> Any:
        """Warm up; vLLM makes steps of its own for that, which have no plan."""
        self._warming_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            self._warming_up = False

    @torch.inference_mode()
    def warm_up_kernels(self) -> None:
        """Use H2O's kernels, for platforms that compile them when they are first used.

        One layer of a group does: they differ in no constant.
        """
        for _, builder in self._h2o_builders():
            layer = self._h2o_layers[builder.layer_names[0]]
            layer.impl.warm_up(layer.kv_cache, builder.layout, builder.padding())

    def execute_model(self, scheduler_output: SchedulerOutput):
        """Run a step under the scheduler's plan."""
        plan = getattr(scheduler_output, PLAN_ATTRIBUTE, None)
        if plan is None and self._warming_up:
            return super().execute_model(scheduler_output)
        if plan is None and scheduler_output.total_num_scheduled_tokens:
            raise RuntimeError(
                "H2O's worker got a step without a plan: --worker-cls is H2O's but "
                "--scheduler-cls is not; use --kv-policy, or give both"
            )
        self._plan = plan or self._plan
        gone = {*scheduler_output.finished_req_ids, *(plan.restarted if plan else ())}
        gone |= scheduler_output.preempted_req_ids or set()
        if self._recorder:
            self._recorder.look()
        self._step.begin(self._plan, sorted(gone))
        try:
            return self._timed(super().execute_model(scheduler_output))
        finally:
            self._step.end()

    def sample_tokens(self, grammar_output):
        """Sample, where that is a step of its own."""
        return self._timed(super().sample_tokens(grammar_output))

    def _timed(self, output: Any) -> Any:
        """What a step returns, with what transitions before it took."""
        if output is None or not self._step.seconds:
            return output
        seconds, self._step.seconds = self._step.seconds, []
        return attach_seconds(output, seconds)

    def h2o_record(self) -> None:
        """Record what KV heads lose, step by step, from now on; called by RPC."""
        if self._recorder:
            self._recorder.stop()
        self._recorder = Recorder(Watch(self._step, self._evicting_layers))

    def _evicting_layers(self) -> dict[str, Any]:
        """vLLM's attention modules that evict, by name, in their order."""
        layers = self._loaded_model().layers
        return {name: layers[name] for name in sorted(layers, key=extract_layer_index)}

    def h2o_recorded(self) -> list[dict[str, Any]]:
        """Record no longer; called by RPC.

        Returns:
            For each request that was compressed since `h2o_record`: `ends`, see
            `attention.watch.Losses`, and `heads`, a list of `layer` (as the model
            counts), `head` (likewise) and `lost_at`.
        """
        assert self._recorder is not None
        names = list(self._evicting_layers())
        recorder, self._recorder = self._recorder, None
        return [self._as_the_model_counts(x, names) for x in recorder.stop().values()]

    def _as_the_model_counts(self, losses: Losses, names: list[str]) -> dict[str, Any]:
        heads = [
            {
                "layer": extract_layer_index(names[number]),
                "head": own_kv_heads(self.vllm_config, 1).start + head,
                "lost_at": lost_at.tolist(),
            }
            for (number, head), lost_at in losses.lost_at.items()
        ]
        return {"ends": losses.ends, "heads": heads}

    def h2o_stats(self) -> dict[str, int]:
        """The scheduler's counters up to the last executed step."""
        return self._plan.stats


def _impl(layer: Any) -> H2OImpl | None:
    """Our implementation of a layer's attention, if it has one."""
    impl = getattr(layer, "impl", None)
    return impl if isinstance(impl, H2OImpl) else None
