"""vLLM's scheduler, plus: where each prompt ends, the step's plan, the counters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_h2o.core import compat
from vllm_h2o.core.kept import KeptRequests, is_known_by_tokens
from vllm_h2o.core.manager import H2OManager, publish_alike
from vllm_h2o.core.metrics import Reporter
from vllm_h2o.core.plan import NUM_COUNTS, PLAN_ATTRIBUTE, ResidencyPlan
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.core.stats import H2OStats
from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.ladder import Climb
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import END, INT8, NONE, PROMPT
from vllm_h2o.policy.presets import FULL
from vllm_h2o.policy.request import DEFAULTS, RequestOptions

if TYPE_CHECKING:
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
            # multiplies by 0 past a sequence's end. As where caches are of several
            # types, blocks are cleared: by our worker.
            self.needs_kv_cache_zeroing = True
            for manager in managers:
                if isinstance(manager.kv_cache_spec, AttentionSpec):
                    manager._record_new_block_ids = True
        self._kept = self._kept_requests()
        self._aligns_states = self.need_mamba_block_aligned_split
        # vLLM asks where steps have to end; see `_mamba_block_aligned_split`.
        self.need_mamba_block_aligned_split |= self._spec.h2o.reads_on
        self._layout = self._spec.layout
        device = self.vllm_config.device_config.device_type
        self._limits = self._spec.limits(device)
        longest = self.max_model_len
        self._most = self._limits.climb(None, longest, longest).budget
        # vLLM holds a request back whose last token the step before is sure to give:
        # of earlier steps in flight it does not count the tokens.
        self._overrun = max(self.vllm_config.max_concurrent_batches - 3, 0)
        self.h2o_stats = H2OStats()
        self._reporter = Reporter()
        self._restarted: list[str] = []
        self._just_kept: list[str] = []
        self._ran_on: set[str] = set()
        self._logged_counters = ""
        logger.info_once("%s", self._summary())
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

    def _kept_requests(self) -> KeptRequests | None:
        """Where what requests have held is kept; None: it is not.

        Raises:
            ValueError: Layers have caches of several kinds.
        """
        if not (config := self._spec.h2o).keeps:
            return None
        if len(self._groups) > 1:
            raise ValueError(
                f"H2O does not support --h2o-keep={config.keep!r}: this model has "
                f"layers with a window or a state of their own: use {NONE!r}"
            )
        return KeptRequests(self.hash_block_size)

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
            options.check_length(self._limits.config, room)
            self._check_room(options, room)
        except ValueError as error:
            logger.error("Request %s ends at once: %s", request.request_id, error)
            request.sampling_params = params = copy.copy(request.sampling_params)
            assert params is not None
            params.extra_args = None
            # As if its grammar could not be compiled: vLLM ends such requests alone.
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
            # What it goes on from may have been read with more to come.
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
        options = self._options_of(request, 0)
        climb = self._limits.climb(options.budget, request.num_tokens, most)
        runs_to = most
        if request.num_tokens + 1 < most:  # else it ends with its next token
            runs_to = min(most + self._overrun, self.max_model_len)
        for manager in self.h2o_managers:
            manager.begin_prefill(
                request.request_id, request.num_tokens, runs_to, options, climb
            )
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        if self._kept is None or not options.continue_:
            return hit
        # From 0.33 on vLLM says how much of a request may be a hit.
        most_hit = args[0] if args else kwargs.get("max_cache_hit_length")
        return self._gone_on(request, options, climb, hit[1], most_hit) or hit

    def _gone_on(
        self,
        request: Request,
        options: RequestOptions,
        climb: Climb,
        num_hits: int,
        most_hit: int | None = None,
    ) -> Any:
        """A hit of what is kept of another request, if that is of more tokens."""
        kept, caching = self._kept, self.kv_cache_manager
        assert kept is not None
        reads_cache = caching.prefix_cache_lookup_enabled(request)
        # vLLM has asked a session's first turn alone.
        params = request.sampling_params
        needs_logits = params is not None and params.prompt_logprobs is not None
        if not is_known_by_tokens(request) or not reads_cache or needs_logits:
            return None
        last = request.num_tokens - 1
        most = last if most_hit is None else min(last, most_hit)
        residents = kept.longest(request, most, climb)
        if residents is None or residents.num_tokens <= num_hits:
            return None
        self.h2o_managers[0].go_on(request.request_id, residents, options)
        return caching.empty_kv_cache_blocks, residents.num_tokens, 0, False

    def _keep(self, request: Request) -> None:
        """Keep what a request holds that ends, if that is what it asks for."""
        kept, computed = self._kept, request.num_computed_tokens
        if kept is None or not is_known_by_tokens(request):
            return
        # With the tokens of steps in flight, of which the last may not be known.
        if computed > request.num_tokens or request.request_id in self._ran_on:
            return
        failed = request.status == RequestStatus.FINISHED_ERROR
        what = self._options_of(request, 0).kept(self._spec.h2o)
        manager, name = self.h2o_managers[0], request.request_id
        if failed or what == NONE or not manager.is_resident(name):
            return
        if what == PROMPT and computed > manager.prefill_end(name):
            return  # a copy of that is kept already
        residents = manager.residents(name, computed)
        if residents is not None:
            kept.keep(request, residents)
            self.h2o_stats.kept_requests += 1
            self._just_kept.append(name)

    def _keep_prompts(self, plan: ResidencyPlan) -> None:
        """Keep what requests hold whose prompts have been read by the last step."""
        kept, manager = self._kept, self.h2o_managers[0]
        if kept is None:
            return
        pool, ours = manager.block_pool, []
        read = plan.num_computed_tokens == plan.prefill_ends
        for i in np.flatnonzero(read & ~plan.stay_dense).tolist():
            request, end = self.requests[plan.request_ids[i]], int(plan.prefill_ends[i])
            if not self._keeps_prompt(request) or not is_known_by_tokens(request):
                continue
            held = manager.residents(request.request_id, end)
            if held is None:
                continue
            if known := kept.same(request, end, held.climb):
                pool.touch(known.blocks)  # another sample, or the same prompt once more
                ours.append(known)
            elif copy := manager.copy_of(held):
                kept.keep(request, copy)
                ours.append(copy)
                self.h2o_stats.kept_requests += 1
        # From now on they may be given away, but not to each other.
        for residents in ours:
            pool.free_blocks(reversed(residents.blocks))

    def _keeps_prompt(self, request: Request) -> bool:
        """Whether what is held of the prompt stays.

        Also of a session's turns: where one ends by a stop token, a step behind that
        token has run, and what is held then is of no use to the next.
        """
        what = self._options_of(request, 0).kept(self._spec.h2o)
        runs_ahead = bool(self.scheduler_config.async_scheduling)
        return what == PROMPT or (what == END and request.resumable and runs_ahead)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """End a prompt's step where a chunk ends that is compressed, and where a repeat
        resumes: a state is kept at ends only.

        vLLM keeps one at the prompt's last whole block, behind which the queries that
        score may have begun.
        """
        computed = num_new_local_computed_tokens, num_external_computed_tokens
        start = request.num_computed_tokens + sum(computed)
        manager, name = self.h2o_managers[0], request.request_id
        num_tokens = min(num_new_tokens, manager.chunk_end(name, start) - start)
        if not self._aligns_states:
            return num_tokens
        num_tokens = super()._mamba_block_aligned_split(request, num_tokens, *computed)
        resumes = manager.replay_boundary(name)
        return resumes - start if start < resumes < start + num_tokens else num_tokens

    def counters(self) -> dict[str, int]:
        """The counters by name; blocks in use as of now."""
        self.h2o_stats.count_blocks(self.h2o_managers)
        return self.h2o_stats.as_dict()

    def update_from_output(self, scheduler_output, model_runner_output):
        """Take in a step's results, with what its transitions took."""
        if self.log_stats:
            self._reporter.time(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """What the front end's loggers get, with our report in it."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            report = self._reporter.report(self.h2o_stats, self.h2o_managers)
            stats.num_kv_fetch_reqs_by_stage.update(report.pack())
        return stats

    def _free_request(self, request: Request, *args: Any, **kwargs: Any):
        report = self._report(request)
        self._count_finished(request)
        self._keep(request)
        self._ran_on.discard(request.request_id)
        transferred, *others = super()._free_request(request, *args, **kwargs)
        if report:
            transferred = {**(transferred or {}), "h2o": report}
        return transferred, *others

    def _count_finished(self, request: Request) -> None:
        """For the metrics; of a request that has read its prompt."""
        manager, name = self.h2o_managers[0], request.request_id
        answers = request.num_output_tokens and manager.req_to_blocks.get(name)
        if not self.log_stats or not answers:
            return
        tokens = request.num_tokens - 1
        has_read = request.num_computed_tokens >= manager.prefill_end(name)
        if has_read or manager.stays_dense(name):
            held = manager.tokens_held(name, tokens)
            self._reporter.finish(tokens - held, tokens)

    def _report(self, request: Request) -> dict[str, Any] | None:
        """What a finished request got, if it asked for that and ever ran.

        It travels in `kv_transfer_params`, the field of an answer that a scheduler
        fills: vLLM hands it to whoever asked, over HTTP too.
        """
        manager, name = self.h2o_managers[0], request.request_id
        if not manager.req_to_blocks.get(name):
            return None
        options = self._options_of(request, 0)
        if not options.report:
            return None
        # The last token that it was given has never been computed.
        tokens, full = request.num_tokens - 1, options.is_full
        held = manager.tokens_held(name, tokens)
        said = {
            "policy": FULL if full else self._spec.h2o.policy,
            "budget": None if full else manager.budgets([name])[0],
            "tokens_held": held,
            "tokens_evicted": tokens - held,
        }
        if options.continue_:
            said["tokens_continued"] = manager.tokens_continued(name)
        return said

    def _handle_stopped_request(self, request: Request) -> bool:
        # Of a session vLLM takes off what steps in flight compute, which run all the
        # same: what it holds is then another token's too.
        if request.resumable and request.num_output_placeholders:
            self._ran_on.add(request.request_id)
        return super()._handle_stopped_request(request)

    def _update_request_as_session(self, session, update) -> None:
        # Streaming input: the next turn is read densely again, like a request
        # resumed after a preemption; its prompt blocks may hit the prefix cache, or it
        # goes on from what the turn before it has held.
        self._keep(session)
        self._ran_on.discard(session.request_id)
        super()._update_request_as_session(session, update)
        self.kv_cache_manager.free(session)
        session.num_computed_tokens = 0
        self._restarted.append(session.request_id)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step and hang its plan on the output."""
        output = super().schedule(throttle_prefills)
        plan = self._plan(output)
        if plan.copies and output.new_block_ids_to_zero:
            # Of a request that this step has preempted they may be new, and are taken.
            targets = {target for _, target in plan.copies}
            to_zero = [x for x in output.new_block_ids_to_zero if x not in targets]
            output.new_block_ids_to_zero = to_zero
        self.h2o_stats.count_step(plan, self.h2o_managers, self._layout, output)
        plan.stats = self.h2o_stats.as_dict()
        setattr(output, PLAN_ATTRIBUTE, plan)
        return output

    def _plan(self, output: SchedulerOutput) -> ResidencyPlan:
        scheduled, requests = output.num_scheduled_tokens, self.requests
        request_ids, manager = list(scheduled), self.h2o_managers[0]
        counts = [
            [requests[request_id].num_computed_tokens for request_id in request_ids],
            list(scheduled.values()),
            manager.prefill_ends(request_ids),
            manager.first_queries(request_ids),
            manager.budgets(request_ids),
        ]
        plan = ResidencyPlan(
            request_ids, np.zeros((NUM_COUNTS, len(request_ids)), np.int64)
        )
        plan.counts[: len(counts)] = counts
        if growths := manager.growths(request_ids):
            plan.counts[len(counts) : len(counts) + len(growths)] = growths
        plan.restarted, self._restarted = self._restarted, []
        # schedule() has already advanced num_computed_tokens past this step.
        plan.counts[0] -= plan.num_scheduled_tokens
        manager.put_chunks(plan, request_ids)
        self._keep_prompts(plan)
        plan.copies = manager.take_copies()
        plan.kept, self._just_kept = self._just_kept, []
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

    def _blocks_of_others(self) -> int:
        """Most blocks of a request where H2O leaves layers alone: windows, states."""
        blocks = 0
        for group in self._groups:
            spec = group.kv_cache_spec
            if window := getattr(spec, "sliding_window", None):
                blocks += cdiv(window, spec.block_size) + 1
            elif isinstance(spec, MambaSpec):
                most = spec.max_memory_usage_bytes(self.vllm_config)
                blocks += cdiv(most, spec.page_size_bytes)
        return blocks

    def _summary(self) -> str:
        spec, config = self._spec, self._spec.h2o
        usable = self.kv_cache_config.num_blocks - 1
        full = cdiv(self.max_model_len, spec.block_size)
        others = self._blocks_of_others()
        count = len(self.h2o_managers)
        most, blocks = self._most, self._most // spec.block_slots
        layout = SlotLayout.of_blocks(config, spec.page_slots, most // spec.page_slots)
        resident = usable // (blocks * count + others)
        decay = getattr(config.method, "score_decay", None)
        observing = (
            "prompts by the gate"
            if config.gated
            else f"observation window {config.observation_window}, "
            f"pooling {config.pooling}"
        )
        decay = "" if decay is None else f", decay {decay:g}"
        reading = f", reading {config.read}" if config.reads_part else ""
        merging = f", merging {config.merge}s" if config.merges else ""
        rounded = f" in {INT8}" if config.quantizes else ""
        if config.resident_why:
            stored = rounded or " in the model's type"
            rounded = f"{stored}, {config.resident_why}"
        chosen = f"It goes by {config.chosen}. " if config.chosen else ""
        chunks = ""
        asked, held = config.prefill_chunk, config.slots_per_token
        if tokens := chunk_tokens(asked, most, spec.block_size, held):
            tokens = min(tokens, self.max_model_len)
            chunks = f"Prompts are read {tokens} tokens at once. "
            full = spec.blocks_while_reading(self.max_model_len, most, asked)
        budget = f"budget {most} tokens"
        ladder = self._limits.ladder
        if len(ladder.budgets) > 1:
            of_tokens = f"{100 * (config.share or 0):.3g}% of its tokens"
            budget = (
                f"budget {config.budget} of what a request takes in stock's cache "
                f"({of_tokens}), at least {ladder.budgets[0] * ladder.block_size} "
                f"tokens, of the longest {most}"
            )
        return (
            f"H2O is on: policy {config.policy}, {budget} "
            f"({blocks} blocks of {spec.block_slots}{rounded}): "
            f"{layout.heavy_slots} heavy ({layout.sinks} sinks) + "
            f"{layout.recent_slots} recent, unit {config.eviction_unit}, "
            f"score {config.score}{decay}, "
            f"{observing}{reading}{merging}. {chosen}{chunks}"
            f"After its prompt a request holds at most {most} KV tokens (stock: "
            f"{self.max_model_len}); the pool of {usable} blocks fits {resident} such "
            f"requests, or {usable // (full * count + others)} full-length ones."
        )
