"""The worker of every platform: give layers the backend, builders each step's plan.

It must not import what belongs to a platform: vLLM's CPU worker, say, turns torch's
CUDA interface off for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_h2o.attention.backend import H2OImpl
from vllm_h2o.attention.kept_store import KeptStore
from vllm_h2o.attention.metadata import H2OMetadataBuilder
from vllm_h2o.attention.pages import clear_blocks, copy_blocks
from vllm_h2o.attention.step import StepRows
from vllm_h2o.attention.watch import Recorder
from vllm_h2o.calibration.loaded_model import LoadedModel
from vllm_h2o.calibration.ranks import on_all_ranks
from vllm_h2o.calibration.resolve import (
    Resolved,
    gates_of,
    moving_rotations,
    resolve,
)
from vllm_h2o.core.compat import settle_block_size
from vllm_h2o.core.metrics import FAILED_ATTRIBUTE, SECONDS_ATTRIBUTE, attach
from vllm_h2o.core.plan import PLAN_ATTRIBUTE, Load, ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec, with_equal_pages
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.plugin.fingerprint import fingerprint
from vllm_h2o.plugin.rpc import H2OCalls
from vllm_h2o.plugin.runner import attention_groups, follow
from vllm_h2o.plugin.tables import Tables
from vllm_h2o.plugin.validate import (
    check_kernel_block_size,
    check_kv_cache_config,
    check_vllm_config,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.gpu_worker import Worker as _Stock
else:
    # The stock worker comes next among the bases of a platform's class.
    _Stock = object


class H2OWorker(H2OCalls, _Stock):
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
        self._fingerprint = ""
        self._refusal: ValueError | None = None
        self._warming_up = False
        self._recorder: Recorder | None = None
        self._kept: KeptStore | None = None
        self._failed_loads: list[Load] = []
        self._unread: set[str] = set()
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
        if kwargs.get("load_dummy_weights"):
            return  # Elastic experts: the weights come before the specs are asked for.
        try:
            self._resolve()
        except ValueError as error:
            # vLLM hands on what a call raises, and of a start only that it failed.
            self._refusal = error

    @property
    def _is_v2(self) -> bool:
        return self.vllm_config.use_v2_model_runner

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The specs of the layers, with what the start has decided.

        Raises:
            ValueError: The start has refused an option.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._resolved is None:
            self._resolve()
        assert self._resolved is not None
        return self._resolved.specs(self._specs(), self._fingerprint)

    def _specs(self) -> dict[str, KVCacheSpec]:
        """The specs as the backend makes them, by the options."""
        with set_current_vllm_config(self.vllm_config):
            return with_equal_pages(super().get_kv_cache_spec())

    def shutdown(self) -> None:
        """Let go of the KV cache, also where what a step has left points into it."""
        self._step.clear()
        if self._kept is not None:
            self._kept.finish()
            self._kept = None
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
        if self._resolved.config.keep_folder:
            ours = (x for x in self._specs().values() if type(x) is H2OAttentionSpec)
            spec = self._resolved.spec(next(ours))
            self._fingerprint = fingerprint(self.vllm_config, self._resolved, spec)
        gates = gates_of(model, self._resolved)
        rotations = moving_rotations(model, self._resolved.config)
        for name, layer in model.layers.items():
            layer.impl.resolve(
                self._resolved.config, gates.get(name), rotations.get(name)
            )

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
        builders = [builder for _, builder in self._h2o_builders()]
        assert self._resolved is not None
        tables = Tables(self.vllm_config, self._resolved, builders)
        self._step.groups.clear()
        for builder in builders:
            builder.bind(self._step, *tables.make(builder))
        if self._resolved.config.keep_folder:
            names = [name for builder in builders for name in builder.layer_names]
            caches = {name: self._h2o_layers[name].kv_cache for name in sorted(names)}
            group = get_tp_group()
            self._kept = KeptStore(caches, group.rank_in_group, group.world_size)

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

        One layer of a group does: they differ in no constant. Of what they write into
        the null block nothing stays.
        """
        for _, builder in self._h2o_builders():
            layer = self._h2o_layers[builder.layer_names[0]]
            layer.impl.warm_up(layer.kv_cache, builder.spec, builder.padding())
            clear_blocks(layer.kv_cache, torch.zeros(1).long().to(self.device))

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
        if plan:
            self._move_blocks(plan, gone)
        if (stores := scheduler_output.kv_connector_metadata) is not None:
            # What a connector still stores must not be cleared before that.
            get_kv_transfer_group().handle_preemptions(stores)
        self._clear_blocks(scheduler_output)
        try:
            return self._reported(super().execute_model(scheduler_output))
        finally:
            self._step.end()

    def _move_blocks(self, plan: ResidencyPlan, gone: set[str]) -> None:
        """What goes out of blocks or into them before anything of the step does.

        What is saved or copied may have been given away to what is loaded.

        Args:
            plan: Of the step.
            gone: Requests that have ended, or are read again, since the last.
        """
        for save in plan.saves:
            assert self._kept is not None
            if save.request_id not in self._unread:
                self._kept.save(save)
        self._unread.difference_update(gone)
        if plan.copies:
            self._copy_blocks(plan.copies)
        if not plan.loads:
            return
        assert self._kept is not None
        done = [self._kept.load(load) for load in plan.loads]
        # One rank's answer is the engine's.
        pairs = zip(plan.loads, on_all_ranks(done), strict=True)
        failed = [load for load, there in pairs if not there]
        self._unread.update(load.request_id for load in failed)
        self._failed_loads += failed

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of all layers, before anything of the step is written."""
        sources, targets = async_tensor_h2d(np.array(copies).T, self.device)
        for _, builder in self._h2o_builders():
            for name in builder.layer_names:
                copy_blocks(self._h2o_layers[name].kv_cache, sources, targets)

    def _clear_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Clear the blocks that are about to be vLLM's, where they may have been cut.

        vLLM's own runners would clear what its layers have in a block, of which ours
        may be longer.
        """
        if not (new := scheduler_output.new_block_ids_to_zero):
            return
        block_ids = async_tensor_h2d(new, self.device)
        for _, builder in self._h2o_builders():
            for name in builder.layer_names:
                clear_blocks(self._h2o_layers[name].kv_cache, block_ids)
        if not self.model_runner.kv_cache_config.needs_kv_cache_zeroing:
            scheduler_output.new_block_ids_to_zero = None

    def sample_tokens(self, grammar_output):
        """Sample, where that is a step of its own."""
        return self._reported(super().sample_tokens(grammar_output))

    def _reported(self, output: Any) -> Any:
        """What a step returns, with what transitions before it took, and the loads that
        have failed."""
        if output is None:
            return None
        transitions, failed = self._step.transitions, self._failed_loads
        if transitions.seconds:
            output = attach(output, SECONDS_ATTRIBUTE, transitions.seconds)
            transitions.seconds = []
        if failed:
            output = attach(output, FAILED_ATTRIBUTE, failed)
            self._failed_loads = []
        return output


def _impl(layer: Any) -> H2OImpl | None:
    """Our implementation of a layer's attention, if it has one."""
    impl = getattr(layer, "impl", None)
    return impl if isinstance(impl, H2OImpl) else None
