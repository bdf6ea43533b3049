"""The worker of every platform: give layers the backend, builders each step's plan.

It must not import what belongs to a platform: vLLM's CPU worker, say, turns torch's
CUDA interface off for the whole process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_h2o.attention.backend import H2OImpl
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.heads import (
    budgets,
    placement_of,
    profile_of,
    profile_path,
    remember,
)
from vllm_h2o.attention.metadata import H2OMetadataBuilder, StepRows
from vllm_h2o.attention.placements import (
    BY_HEAD,
    BudgetPlacements,
    PlacementTable,
    RequestPlacements,
)
from vllm_h2o.attention.watch import Losses, Recorder, Watch
from vllm_h2o.core.compat import settle_block_size
from vllm_h2o.core.metrics import attach_seconds
from vllm_h2o.core.plan import PLAN_ATTRIBUTE, ResidencyPlan
from vllm_h2o.core.settings import h2o_config, settle
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.plugin.calibration import (
    ANSWERED_TOKENS,
    FEWEST_TOKENS,
    LoadedModel,
    longest_step,
    measure,
    of_first_rank,
    rotations_of,
    texts_to_read,
)
from vllm_h2o.plugin.head_profiles import (
    holds_longest,
    profile_at_startup,
    why_not_measured,
)
from vllm_h2o.plugin.runner import attention_groups, follow
from vllm_h2o.plugin.validate import (
    check_kernel_block_size,
    check_kv_cache_config,
    check_profile,
    check_vllm_config,
)
from vllm_h2o.policy.config import (
    ATTENTION,
    AUTO,
    GATE,
    MEASURE,
    REQUEST,
    H2OConfig,
)
from vllm_h2o.policy.gate import num_features
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
        self._profile: HeadProfile | None = None
        self._settled = False
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

    @property
    def _is_v2(self) -> bool:
        return self.vllm_config.use_v2_model_runner

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The specs of the layers; the backend reads the policy from the config.

        The model is loaded, and nothing has been allocated or scheduled: time to find
        out what the policy leaves to the worker, since specs tell it to the scheduler.
        """
        if not self._settled:
            self._settled = True
            self._find_profile()
            self._settle_prompt_score()
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def shutdown(self) -> None:
        """Let go of the KV cache, also where what a step has left points into it."""
        self._step.clear()
        super().shutdown()

    def _loaded_model(self) -> LoadedModel:
        evicting = {
            name: self._h2o_layers[name]
            for name, spec in self.get_kv_cache_spec().items()
            if type(spec) is H2OAttentionSpec
        }
        return LoadedModel(self.vllm_config, self.model_runner, evicting)

    def _find_profile(self) -> None:
        """Find or measure the head profile, for all that ask `profile_of` later."""
        start = time.perf_counter()
        self._profile = profile_at_startup(self._loaded_model())
        remember(self.vllm_config, self._profile)
        if self._profile is not None:
            logger.info_once(
                "H2O has the profile of the heads, after %.1f s: %s",
                time.perf_counter() - start, self._profile.measured_on,
            )  # fmt: skip

    def _settle_prompt_score(self) -> None:
        """Let prompts go by the gate where there is one, if the user leaves it open."""
        config = h2o_config(self.vllm_config)
        assert config is not None
        if config.prompt_score != AUTO:
            return
        parallel = self.vllm_config.parallel_config
        if parallel.data_parallel_size > 1 or parallel.enable_eplb:
            # Their ranks may know of different profiles, and their passes belong
            # together: one that made a pass for its gate would wait for the others.
            why = "with data parallelism or EPLB the gate has to be asked for"
        elif holds_longest(self.vllm_config, config):
            why = "nothing is evicted"
        else:
            # Ranks on other machines may see other files.
            why = of_first_rank(self._why_no_gate(config))
        settle(self.vllm_config, prompt_score=ATTENTION if why else GATE)
        by = f"their attention: {why}" if why else "the gate"
        logger.info_once("H2O compresses prompts by %s", by)

    def _why_no_gate(self, config: H2OConfig) -> str:
        """What there would have to be for prompts to go by a gate; empty: there is."""
        profile = profile_of(self.vllm_config)
        if profile is None:
            why = why_not_measured(self.vllm_config, config)
            return why or "there is no head profile, see the log"
        if profile.gate is None:
            return "the head profile in force has no gate"
        sizes = {x.impl.head_size for x in self._loaded_model().layers.values()}
        has, features = profile.gate["features"], [num_features(x, x) for x in sizes]
        if features != [has]:
            return (
                f"the gate of the head profile in force has {has} weights for a head, "
                f"where this model needs {features}"
            )
        option, tokens = longest_step(self.vllm_config)
        if tokens < ANSWERED_TOKENS:
            needed = ANSWERED_TOKENS
            return f"{option} is {tokens}, to see how keys rotate takes {needed}"
        return ""

    def _give_gates(self) -> None:
        """Give each layer that evicts its part of the gate, if prompts go by it."""
        config, profile = h2o_config(self.vllm_config), profile_of(self.vllm_config)
        assert config is not None
        if not config.gated or holds_longest(self.vllm_config, config):
            return
        if why := self._why_no_gate(config):
            option, tokens = longest_step(self.vllm_config)
            measured = f"h2o_head_budgets={MEASURE!r}"
            if tokens < FEWEST_TOKENS:
                measured += f" with {option} of at least {FEWEST_TOKENS}"
            raise ValueError(
                f"h2o_prompt_score (--h2o-prompt-score) is {GATE!r}, but {why}: use "
                f"{measured}, or h2o_prompt_score={ATTENTION!r}"
            )
        assert profile is not None
        model = self._loaded_model()
        rotations = rotations_of(model)
        names = sorted(model.layers, key=extract_layer_index)
        check_profile(profile, profile.measured_on, self.vllm_config, len(names))
        all_weights = torch.from_numpy(profile.gate_weights().copy())
        for name, weights in zip(names, all_weights, strict=True):
            impl = model.layers[name].impl
            own = weights[self._own_kv_heads(impl.num_kv_heads)]
            group = impl.num_heads // impl.num_kv_heads
            own = own.to(self.model_runner.device)
            # Settled after the layer was made.
            impl.h2o, impl.gate = config, LayerGate(own, rotations[name], group)

    def _own_kv_heads(self, count: int) -> slice:
        """This rank's of the model's KV heads.

        With fewer heads than ranks, neighbouring ranks have the same head.
        """
        parallel = self.vllm_config.parallel_config
        total = self.vllm_config.model_config.get_total_num_kv_heads()
        first = parallel.rank % parallel.tensor_parallel_size * total
        first //= parallel.tensor_parallel_size
        return slice(first, first + count)

    def h2o_profile(self) -> HeadProfile | None:
        """The head profile in force; called by RPC."""
        return profile_of(self.vllm_config)

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
        self._give_gates()
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
                most = [self._richest_blocks(spec)] * len(pages)
                table = PlacementTable(pages, layout, most, end)
                table.put(BY_HEAD, split(layout))
        for layer, part in zip(layers, table.parts(), strict=True):
            layer.impl.placements = part
        by_budget = BudgetPlacements(table, spec.h2o, layout, end, split)
        return layers if by_head else (), by_budget if several else None

    def _richest_blocks(self, spec: H2OAttentionSpec) -> int:
        """Blocks of the richest head of any rank, by the engine's budget."""
        return budgets(self.vllm_config, spec.max_model_len)[1] // spec.block_size

    def _has_head_budgets(self, builder: H2OMetadataBuilder) -> bool:
        """Whether the heads of a KV cache group have budgets of their own."""
        config, profile = builder.spec.h2o, profile_of(self.vllm_config)
        if profile is None and config.head_budgets != REQUEST:
            return False
        path = profile_path(config, self.vllm_config.model_config.model)
        source = path or (profile.measured_on if profile else repr(REQUEST))
        evicting = sum(len(other.layer_names) for _, other in self._h2o_builders())
        if len(builder.layer_names) == evicting:
            return True
        several = (
            f"{source} has budgets for {evicting} layers together, which vLLM has "
            "put into several KV cache groups, because the model has fewer "
            "windowed layers"
        )
        if path is None and config.head_budgets != REQUEST:
            logger.warning_once("H2O gives all KV heads the same budget: %s", several)
            return False
        raise ValueError(
            f"h2o_head_budgets (--h2o-head-budgets): {several}: use 'uniform'"
        )

    def _split_by_profile(
        self, builder: H2OMetadataBuilder
    ) -> Callable[[SlotLayout], Placement]:
        """What splits a budget over the heads of this rank, by the profile in force."""
        profile, spec = profile_of(self.vllm_config), builder.spec
        assert profile is not None
        path = profile_path(spec.h2o, self.vllm_config.model_config.model)
        source = path or profile.measured_on
        check_profile(profile, source, self.vllm_config, len(builder.layer_names))
        split = functools.partial(
            placement_of,
            profile,
            spec.h2o,
            max_blocks=spec.dense_columns,
            most_blocks=self._richest_blocks(spec),
            kv_heads=self._own_kv_heads(spec.num_kv_heads),
        )
        slots = split(builder.layout).budgets
        logger.info_once(
            "H2O budgets by KV head, from %s: %d to %d tokens, %d on average",
            source, min(slots), max(slots), sum(slots) // len(slots),
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
                "head": self._own_kv_heads(1).start + head,
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
