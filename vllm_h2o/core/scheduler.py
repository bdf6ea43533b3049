"""vLLM's scheduler, plus: where each prompt ends, the step's plan, the counters."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_h2o.core import compat
from vllm_h2o.core.connectors import check_groups, check_session, forget_released
from vllm_h2o.core.continuing import Continuing
from vllm_h2o.core.manager import H2OManager, publish_alike
from vllm_h2o.core.metrics import FAILED_ATTRIBUTE, NOTHING_KEPT, Reporter
from vllm_h2o.core.plan import PLAN_ATTRIBUTE, Load, ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.core.summary import summary
from vllm_h2o.policy.life import Life
from vllm_h2o.policy.request import DEFAULTS, RequestOptions

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

_ANY_GRAMMAR = StructuredOutputsParams(json_object=True)


class H2OScheduler(AsyncScheduler):
    """Counts tokens; never sees a score."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the managers count, and say what H2O does; see the base class."""
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self.h2o_managers = [x for x in managers if isinstance(x, H2OManager)]
        if not self.h2o_managers:
            raise ValueError(
                "H2O is on but no layer of this model has full attention that it "
                "could compress: drop --kv-policy (kv_policy, enable_h2o)"
            )
        for manager in managers:
            if not isinstance(manager, H2OManager):
                publish_alike(manager, self.h2o_managers[0])
        if not self._spec.pages_are_blocks:
            # What is left of a resident block may read as NaN, which vLLM's attention
            # multiplies by 0 past a sequence's end. So blocks are cleared before reuse,
            # as vLLM does for mixed cache types. Our worker does it.
            self.needs_kv_cache_zeroing = True
            for manager in managers:
                if isinstance(manager.kv_cache_spec, AttentionSpec):
                    manager._record_new_block_ids = True
        self.h2o_stats = H2OStats()
        self._continuing = Continuing.of_engine(
            self.vllm_config, self.kv_cache_config, self.h2o_managers, self.h2o_stats,
            self.hash_block_size,
        )  # fmt: skip
        if self.connector is not None:
            check_groups(len(self._groups))
            self.h2o_managers[0].released = []
        most_drafts = self.num_spec_tokens
        self._terms = self.h2o_managers[0].terms._replace(most_drafts=most_drafts)
        self._aligns_states = self.need_mamba_block_aligned_split
        # vLLM asks where steps have to end; see `_mamba_block_aligned_split`.
        asks = self._spec.h2o.reads_on or most_drafts > 0
        self.need_mamba_block_aligned_split |= asks
        self._layout = self._spec.layout
        device = self.vllm_config.device_config.device_type
        self._limits = self._spec.limits(device)
        longest = self.max_model_len
        self._most = self._limits.climb(None, longest, longest).budget
        # vLLM holds a request back whose last token the step before is sure to give:
        # of earlier steps in flight it does not count the tokens.
        self._overrun = max(self.vllm_config.max_concurrent_batches - 3, 0)
        self._reporter = Reporter()
        self._restarted: list[str] = []
        self._logged_counters = ""
        said = summary(self.vllm_config, self.kv_cache_config, self._spec, self._limits)
        logger.info_once("%s", said)
        if self._most >= longest:
            logger.warning_once(
                "H2O evicts nothing: its budget (--h2o-budget) of %d tokens holds the "
                "longest request, --max-model-len %d",
                self._most,
                longest,
            )
        if any(isinstance(manager.kv_cache_spec, MambaSpec) for manager in managers):
            logger.warning_once(
                "What eviction loses where other layers keep states has not been "
                "measured. Elsewhere details that were asked for later were lost "
                "before losses showed it: try questions of your own, and a larger "
                "budget (--h2o-budget)"
            )

    def add_request(self, request: Request) -> None:
        """Queue a request, or end it with an error if it asks for what is not there.

        Most are checked before (`vllm_h2o.plugin.requests`), but those that are made
        elsewhere are not, and what one of them says must not end the others.
        """
        known = request.request_id in self.requests
        if known and not request.resumable:
            super().add_request(request)  # a streaming session says that it ends
            return
        try:
            most = self._most_tokens(request)
            options = self._options_of(request, most)
            # A session's turns add up.
            room = self.max_model_len if request.resumable else most
            if self.connector is not None:
                check_session(request)
            options.check_length(self._limits.config, room)
            self._check_room(self._in_session(request, options), room)
        except ValueError as error:
            logger.error("Request %s ends at once: %s", request.request_id, error)
            request.sampling_params = params = copy.copy(request.sampling_params)
            assert params is not None
            params.extra_args = None
            # vLLM can not reject a queued request. The path of a grammar that could
            # not be compiled ends this request and no other.
            if known:
                # The session with this turn.
                compat.end_with_error(self, request.request_id, str(error))
            else:
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                refused = StructuredOutputRequest(_ANY_GRAMMAR, error)
                request.structured_output_request = refused
        super().add_request(request)

    def _options_of(self, request: Request, most_tokens: int) -> RequestOptions:
        params = request.sampling_params
        extra_args = params.extra_args if params else None
        if not extra_args:
            return DEFAULTS
        return RequestOptions.parse(extra_args, self._limits, most_tokens)

    def _in_session(self, request: Request, options: RequestOptions) -> RequestOptions:
        """The options of a request; with the name of a session it goes on by itself."""
        named = request.session_id and self._continuing is not None
        if options.continue_ is not None or options.is_full or not named:
            return options
        return dataclasses.replace(options, continue_=True)

    def _check_room(self, options: RequestOptions, most_tokens: int) -> None:
        """Raise ValueError for a request that the pool will never hold.

        Where prompts are read in chunks it may be smaller than the longest request that
        keeps all of its tokens.
        """
        asked, spec = options.prefill_chunk, self._spec
        if not spec.h2o.prefill_chunk or not (options.is_full or asked is not None):
            return
        option, value, slots = "policy", options.policy, most_tokens
        if not options.is_full:
            option, value = "prefill_chunk", str(asked)
            # A snapshot may be of a longer request: assume the largest budget.
            end = self.max_model_len if options.continue_ else most_tokens
            slots = self._limits.climb(options.budget, most_tokens, end).budget
        needed = spec.blocks_while_reading(most_tokens, slots, asked or 0)
        needed *= len(self.h2o_managers)
        needed += sum(
            cdiv(other.max_memory_usage_bytes(self.vllm_config), other.page_size_bytes)
            for other in (group.kv_cache_spec for group in self._groups)
            if not isinstance(other, H2OAttentionSpec)
        )
        usable = self.kv_cache_config.num_blocks - 1
        if needed > usable:
            raise ValueError(
                f"h2o_{option} of this request is {value!r}: its {most_tokens} tokens "
                f"(prompt and max_tokens) take up to {needed} blocks at once, and the "
                f"pool has {usable}: leave it out, or use fewer tokens"
            )

    def _most_tokens(self, request: Request) -> int:
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any):
        # Called for every request that is about to be admitted, before its
        # first allocation, also after a preemption.
        most = self._most_tokens(request)
        # Checked on arrival. A session has grown since, so that its share may exceed
        # the engine's budget, and is then capped.
        asked = self._options_of(request, 0)
        options = self._in_session(request, asked)
        climb = self._limits.climb(options.budget, request.num_tokens, most)
        runs_to = most
        if request.num_tokens + 1 < most:  # else it ends with its next token
            runs_to = min(most + self._overrun, self.max_model_len)
        life = Life.begin(self._terms, request.num_tokens, runs_to, climb, options)
        for manager in self.h2o_managers:
            manager.begin(request.request_id, life)
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        caching, continuing = self.kv_cache_manager, self._continuing
        if continuing is None or not options.continue_:
            return hit
        if not caching.prefix_cache_lookup_enabled(request):
            return hit
        # From 0.33 on vLLM says how much of a request may be a hit.
        most_hit = args[0] if args else kwargs.get("max_cache_hit_length")
        # Who does not ask for it goes on from what its own session holds.
        session = None if asked.continue_ else request.session_id
        num_tokens = continuing.hit(request, climb, hit[1], most_hit, session)
        if not num_tokens:
            return hit
        return caching.empty_kv_cache_blocks, num_tokens, 0, False

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """End a step where what is held is laid out anew (`Life.step_end`), and a
        prompt's where a repeat resumes: a state is kept at ends only.

        vLLM keeps one at the prompt's last whole block, behind which the queries that
        score may have begun.
        """
        computed = num_new_local_computed_tokens, num_external_computed_tokens
        start = request.num_computed_tokens + sum(computed)
        life = self.h2o_managers[0].lives[request.request_id]
        num_tokens = min(num_new_tokens, life.step_end(start) - start)
        if not self._aligns_states:
            return num_tokens
        num_tokens = super()._mamba_block_aligned_split(request, num_tokens, *computed)
        resumes = life.resumes_at()
        return resumes - start if start < resumes < start + num_tokens else num_tokens

    def counters(self) -> dict[str, int]:
        """The counters by name; blocks in use as of now."""
        self.h2o_stats.count_blocks(self.h2o_managers)
        return self.h2o_stats.as_dict()

    def update_from_output(self, scheduler_output, model_runner_output):
        """Take in a step's results, with what its transitions took."""
        if self.log_stats:
            self._reporter.time(model_runner_output)
        plan = getattr(scheduler_output, PLAN_ATTRIBUTE, None)
        if plan is not None and plan.loads:
            self._end_loads(plan, getattr(model_runner_output, FAILED_ATTRIBUTE, []))
        if scheduler_output.scheduled_spec_decode_tokens:
            assert plan is not None
            self.h2o_stats.take_back(plan, scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _end_loads(self, plan: ResidencyPlan, failed: list[Load]) -> None:
        """Let requests read their tokens that could not go on from a file.

        What steps in flight give of them is of no use.
        """
        assert self._continuing is not None
        self._continuing.end_loads(plan.loads, failed)
        for name in (load.request_id for load in failed):
            request = self.requests.get(name)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                now = time.monotonic()
                self._preempt_request(request, now, drop_stale_output=True)
                # As where vLLM resets its cache: it may be scheduled again at once.
                self.prev_step_scheduled_req_ids.discard(name)
                self._restarted.append(name)
            elif request.num_stale_output_tokens:  # It has been preempted since.
                request.drop_stale_output = True

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the cache, and what is kept, as its blocks have no hash any more."""
        done = super().reset_prefix_cache(*args, **kwargs)
        if done and self._continuing is not None:
            self._continuing.forget()
        return done

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.num_spec_tokens and not self.scheduler_config.async_scheduling:
            # vLLM's asynchronous scheduler announces drafts that follow in the worker.
            # Here they come once the step has ended.
            for name in scheduler_output.num_scheduled_tokens:
                self.requests[name].spec_token_ids = []

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """What the front end's loggers get, with our report in it."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            kept = self._continuing.kept() if self._continuing else NOTHING_KEPT
            report = self._reporter.report(self.h2o_stats, self.h2o_managers, kept)
            stats.num_kv_fetch_reqs_by_stage.update(report.pack())
        return stats

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        manager = self.h2o_managers[0]
        assert manager.released is not None
        if manager.released:
            forget_released(connector, manager.released)
            manager.released = []
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any):
        report = self._report(request)
        self._count_finished(request)
        if self._continuing is not None:
            self._continuing.keep(request)
        transferred, *others = super()._free_request(request, *args, **kwargs)
        if report:
            transferred = {**(transferred or {}), "h2o": report}
        return transferred, *others

    def _count_finished(self, request: Request) -> None:
        """For the metrics; of a request that has read its prompt."""
        life = self._life_with_blocks(request)
        if not self.log_stats or not request.num_output_tokens or life is None:
            return
        tokens = request.num_tokens - 1
        if request.num_computed_tokens >= life.prefill_end or life.stays_dense:
            self._reporter.finish(tokens - life.tokens_held(tokens), tokens)

    def _life_with_blocks(self, request: Request) -> Life | None:
        """The life of a request that has run."""
        manager, name = self.h2o_managers[0], request.request_id
        return manager.lives[name] if manager.req_to_blocks.get(name) else None

    def _report(self, request: Request) -> dict[str, Any] | None:
        """What a finished request got, if it asked for that and ever ran.

        It travels in `kv_transfer_params`, the field of an answer that a scheduler
        fills: vLLM hands it to whoever asked, over HTTP too.
        """
        life = self._life_with_blocks(request)
        if life is None or not life.options.report:
            return None
        # The last token that it was given has never been computed.
        return life.report(request.num_tokens - 1)

    def _handle_stopped_request(self, request: Request) -> bool:
        if self._continuing is not None:
            self._continuing.note_stop(request)
        return super()._handle_stopped_request(request)

    def _update_request_as_session(self, session, update) -> None:
        # Streaming input: the next turn is read densely again, like a request
        # resumed after a preemption; its prompt blocks may hit the prefix cache, or it
        # goes on from what the turn before it has held.
        if self._continuing is not None:
            self._continuing.keep(session)
        # vLLM looks at the length of each turn alone.
        has, more = session.num_computed_tokens, len(update.prompt_token_ids or ())
        if has + more >= self.max_model_len:
            error = (
                f"the turns of this session have {has + more} tokens, and "
                f"--max-model-len is {self.max_model_len}: begin another session"
            )
            logger.error("Request %s ends at once: %s", session.request_id, error)
            compat.end_with_error(self, session.request_id, error)
            update = dataclasses.replace(update, prompt_token_ids=[], mm_features=None)
        super()._update_request_as_session(session, update)
        self.kv_cache_manager.free(session)
        session.num_computed_tokens = 0
        self._restarted.append(session.request_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step and hang its plan on the output."""
        output = super().schedule(throttle_prefills)
        plan = self._plan(output)
        if (plan.copies or plan.loads) and output.new_block_ids_to_zero:
            # Of a request that this step has preempted they may be new, and are taken.
            targets = {target for _, target in plan.copies}
            targets |= {target for load in plan.loads for target in load.blocks}
            to_zero = [x for x in output.new_block_ids_to_zero if x not in targets]
            output.new_block_ids_to_zero = to_zero
        self.h2o_stats.count_step(plan, self.h2o_managers, self._layout, output)
        plan.stats = self.h2o_stats.as_dict()
        setattr(output, PLAN_ATTRIBUTE, plan)
        return output

    def _plan(self, output: SchedulerOutput) -> ResidencyPlan:
        scheduled, requests = output.num_scheduled_tokens, self.requests
        lives, request_ids = self.h2o_managers[0].lives, list(scheduled)
        # schedule() has already advanced num_computed_tokens past this step.
        computed = [
            requests[name].num_computed_tokens - num for name, num in scheduled.items()
        ]
        rows = [
            lives[name].next_row(before)
            for name, before in zip(request_ids, computed, strict=True)
        ]
        plan = ResidencyPlan.of_rows(request_ids, rows, computed, scheduled.values())
        plan.restarted, self._restarted = self._restarted, []
        if self._continuing is not None:
            self._continuing.keep_prompts(plan, requests)
            plan.kept = self._continuing.take_kept()
            plan.saves = self._continuing.take_saves()
        plan.copies = self.h2o_managers[0].take_copies()
        plan.loads = self.h2o_managers[0].take_loads()
        if plan.loads and self._continuing is not None:
            self._continuing.note_loads(plan.loads)
        return plan

    def finish_requests(self, request_ids, finished_status):
        """Finish requests; None means all, which is how a server shuts down.

        A server kills its engine core soon after that, so log here already.
        """
        finished = super().finish_requests(request_ids, finished_status)
        if request_ids is None:
            self._log_counters()
        return finished

    def shutdown(self) -> None:
        """Log the counters and shut down."""
        self._log_counters()
        super().shutdown()

    def _log_counters(self) -> None:
        if self._logged_counters != (counters := str(self.h2o_stats)):
            self._logged_counters = counters
            logger.info("H2O counters: %s", counters)

    @property
    def _groups(self) -> list[KVCacheGroupSpec]:
        return self.kv_cache_config.kv_cache_groups

    @property
    def _spec(self) -> H2OAttentionSpec:
        spec = self.h2o_managers[0].kv_cache_spec
        assert isinstance(spec, H2OAttentionSpec)
        return spec
